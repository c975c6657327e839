"""Parameter groups: settings, roles, and what a model's modules say about its matrices."""
