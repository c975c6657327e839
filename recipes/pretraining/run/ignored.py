"""List the flags of transformers.TrainingArguments that this recipe would ignore; each is refused with what to use."""

from __future__ import annotations

_NO_METRICS = "the recipe computes the held-out loss and nothing else; leave it out"
_FIXED_BATCHES = "the recipe's batches are blocks of tokens of one length; leave it out"
_BOTH = "the recipe trains and evaluates; leave it out"
_OBJECT = "only Python code can make its value; leave it out"

# Flag -> why it has no effect, and the remedy.
ALWAYS = {
    "optim": "the recipe makes the optimizer itself; choose it with --optimizer",
    "optim_args": "the recipe makes the optimizer itself; every setting has a flag, such as --gamma 0.025",
    "optim_target_modules": "the recipe makes the optimizer itself; choose it with --optimizer",
    "adam_beta1": "use --beta1",
    "adam_beta2": "use --beta2",
    "adam_epsilon": "use --eps",
    "do_train": _BOTH,
    "do_eval": _BOTH,
    "do_predict": _BOTH,
    "include_for_metrics": _NO_METRICS,
    "batch_eval_metrics": _NO_METRICS,
    "eval_do_concat_batches": _NO_METRICS,
    "eval_use_gather_object": _NO_METRICS,
    "label_names": _FIXED_BATCHES,
    "length_column_name": _FIXED_BATCHES,
    "remove_unused_columns": _FIXED_BATCHES,
    "auto_find_batch_size": "the recipe counts tokens by the batch size that it is given; use "
    "--per_device_train_batch_size",
    "parallelism_config": _OBJECT,
    "liger_kernel_config": _OBJECT,
}

# Flag -> the setting that it needs, the values that make it count, and the flag to add.
ON_CONDITION = {
    "save_steps": ("save_strategy", ("steps",), "--save_strategy steps"),
    "save_total_limit": ("save_strategy", ("steps", "epoch", "best"), "--save_strategy steps"),
    "save_only_model": ("save_strategy", ("steps", "epoch", "best"), "--save_strategy steps"),
    "eval_steps": ("eval_strategy", ("steps",), "--eval_strategy steps"),
    "logging_steps": ("logging_strategy", ("steps",), "--logging_strategy steps"),
    "hub_model_id": ("push_to_hub", (True,), "--push_to_hub true"),
    "hub_strategy": ("push_to_hub", (True,), "--push_to_hub true"),
    "hub_private_repo": ("push_to_hub", (True,), "--push_to_hub true"),
    "hub_revision": ("push_to_hub", (True,), "--push_to_hub true"),
    "hub_always_push": ("push_to_hub", (True,), "--push_to_hub true"),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", (True,), "--gradient_checkpointing true"),
}
