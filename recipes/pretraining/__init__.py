"""The parts of the GPT-2 pretraining recipe."""
