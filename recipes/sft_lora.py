#!/usr/bin/env python
"""Fine-tune a language model on chats with MARS: TRL's SFTTrainer, and LoRA of PEFT. Copy this file and change it.

    python sft_lora.py                    # a small GPT-2 with random weights, on made-up chats
    python sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara
    python sft_lora.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name chats --use_peft false --learning_rate 2e-5

The data set has a column `messages`, columns `prompt` and `completion`, or a column `text`. `--optim mars_m` is another
rule, `--optim adamw_torch` the baseline. `--learning_rate` is AdamW's for all of them, and MARS converts it: 2e-4 if
you give none, and 5e-3 without a model. All flags of TRL's SFTConfig and ModelConfig work.
"""

import random
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, set_seed
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

import mars_hf

SOUNDS = "cow moos,duck quacks,dog barks,cat meows,sheep bleats,horse neighs,pig grunts,owl hoots,frog croaks,bee hums"
QUESTIONS = ["What sound does a {} make?", "How does a {} sound?", "Which noise comes from a {}?"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chats() -> DatasetDict:
    """Return questions and answers about animals, a few held out."""
    pairs = [(question, *animal.split()) for animal in SOUNDS.split(",") for question in QUESTIONS]
    random.Random(0).shuffle(pairs)
    rows = [
        {
            "prompt": [{"role": "user", "content": question.format(animal)}],
            "completion": [{"role": "assistant", "content": f"A {animal} {sound}."}],
        }
        for question, animal, sound in pairs
    ]
    return DatasetDict(train=Dataset.from_list(rows[4:] * 60), test=Dataset.from_list(rows[:4]))


def small_model(rows: Dataset, context: int) -> tuple[Any, Any]:
    """Return a small model with random weights and a context of so many tokens, and its tokenizer."""
    tokenizer = GPT2Tokenizer().train_new_from_iterator(map(str, rows), vocab_size=512)
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, CHAT_TEMPLATE
    end = tokenizer.eos_token_id
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=context, bos_token_id=end, eos_token_id=end)
    config.n_layer, config.n_head, config.n_embd = 2, 4, 128
    config.initializer_range = 0.1  # random weights large enough for LoRA to build on
    return GPT2LMHeadModel(config), tokenizer


def main(argv: list[str] | None = None) -> SFTTrainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_adamw and the other names
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    # AdamW's rate and betas; from the rate follows MARS's.
    parser.set_defaults(learning_rate=None, optim="mars_adamw", optim_args="adamw_rates=true,beta1=0.9,beta2=0.999")
    parser.set_defaults(output_dir="finetuned-lora", lr_scheduler_type="cosine", warmup_steps=0.05)
    parser.set_defaults(per_device_train_batch_size=16, logging_steps=25, eval_on_start=True)
    parser.set_defaults(dtype="float32", bf16=torch.cuda.is_available())
    parser.set_defaults(use_peft=True, lora_target_modules=["all-linear"])
    script, training, model_args = parser.parse_args_and_config(argv)
    if training.learning_rate is None:
        training.learning_rate = 2e-4 if model_args.model_name_or_path else 5e-3
    set_seed(training.seed)

    data = chats()
    if script.dataset_name:
        data = load_dataset(script.dataset_name, script.dataset_config, streaming=script.dataset_streaming)
    missing = {script.dataset_train_split, script.dataset_test_split} - data.keys()
    if script.dataset_train_split in missing or (missing and script.dataset_streaming):
        raise SystemExit(f"the data set lacks the split {' and '.join(sorted(missing))}; it has {', '.join(data)}")
    if missing:  # hold rows out
        data = data[script.dataset_train_split].train_test_split(0.05, seed=0)
        script.dataset_train_split, script.dataset_test_split = data
    tokenizer = None  # the model's
    if model_args.model_name_or_path:
        model = model_args.model_name_or_path
        training.model_init_kwargs = {
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            "quantization_config": get_quantization_config(model_args),
            **(training.model_init_kwargs or {}),
        }
    else:
        print("A small GPT-2 with random weights trains on two CPU cores in about a minute.", flush=True)
        context = (training.max_length or 1024) if script.dataset_name else 128  # the made-up chats are short
        model, tokenizer = small_model(data[script.dataset_train_split], context)
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[script.dataset_test_split],
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    else:
        trainer.create_model_card(dataset_name=script.dataset_name)
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
