"""Add LoRA adapters to a language model."""

from __future__ import annotations

from dataclasses import dataclass, field

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tasks import running


@dataclass
class AdapterArguments:
    """LoRA adapters."""

    lora_r: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "Adapters are scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: str = field(
        default="all-linear", metadata={"help": "Names of layers with adapters, separated by commas, or all-linear."}
    )


def add(model: PreTrainedModel, arguments: AdapterArguments) -> PeftModel:
    """Return the model with new adapters, which alone are trainable, and print how many parameters that are.

    Raises:
        ValueError: the model has no such layers.
    """
    modules = arguments.lora_target_modules
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=modules if modules == "all-linear" else modules.split(","),
        task_type="CAUSAL_LM",
    )
    with running.loading(f"--lora_target_modules {modules}", "name linear layers of the model, or all-linear"):
        adapted: PeftModel = get_peft_model(model, config)
    adapted.print_trainable_parameters()
    return adapted
