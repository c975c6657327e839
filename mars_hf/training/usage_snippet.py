"""Write the lines of Python that load a model back, for its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from mars_hf.training import card_facts

_NEW_TOKENS = 32


def place(trainer: Any) -> str:
    """Return what `from_pretrained` takes: the repository if the run has one, else the output folder."""
    pushed = getattr(trainer, "hub_model_id", None) or (trainer.args.push_to_hub and trainer.args.hub_model_id)
    return str(pushed or trainer.args.output_dir)


def snippet(trainer: Any) -> str:
    """Return Python that loads the model of a Trainer and, for a language model, continues a text."""
    model, where = card_facts.model_of(trainer), place(trainer)
    if card_facts.is_adapter(model):
        return _adapter(model, where, trainer)
    if not isinstance(model, transformers.PreTrainedModel):
        return _plain(model, where)
    processor = _processor(trainer)
    generates = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) and model.can_generate()
    if generates and isinstance(processor, transformers.PreTrainedTokenizerBase) and _is_public(model):
        room = getattr(model.config, "max_position_embeddings", None) or 2 * _NEW_TOKENS
        return (
            "from transformers import pipeline\n\n"
            f'generate = pipeline("text-generation", model={_quoted(where)})\n'
            f'print(generate("The", max_new_tokens={max(1, min(_NEW_TOKENS, room // 2))})[0]["generated_text"])\n'
        )
    lines = [_import(model), "", f"model = {type(model).__name__}.from_pretrained({_quoted(where)})"]
    if processor is not None:
        name = _processor_class(processor)
        lines[0] = _merged([lines[0], f"from transformers import {name}"])
        lines.append(f"{_role(processor)} = {name}.from_pretrained({_quoted(where)})")
    return "\n".join(lines) + "\n"


def _adapter(model: Any, where: str, trainer: Any) -> str:
    base = model.get_base_model()
    config = next(iter(model.peft_config.values()))
    name = config.base_model_name_or_path or getattr(getattr(base, "config", None), "name_or_path", "")
    if not name:
        first = f"base = ...  # the {type(base).__name__} that the adapter was trained on"
        return f"from peft import PeftModel\n\n{first}\nmodel = PeftModel.from_pretrained(base, {_quoted(where)})\n"
    return (
        f"from peft import PeftModel\n{_import(base)}\n\n"
        f"base = {type(base).__name__}.from_pretrained({_quoted(name)})\n"
        f"model = PeftModel.from_pretrained(base, {_quoted(where)})\n"
    )


def _plain(model: Any, where: str) -> str:
    if Path(where).is_dir():
        path = _quoted(str(Path(where) / "model.safetensors"))
        first = "from safetensors.torch import load_file\n\n"
    else:
        path = f'hf_hub_download({_quoted(where)}, "model.safetensors")'
        first = "from huggingface_hub import hf_hub_download\nfrom safetensors.torch import load_file\n\n"
    return f"{first}weights = load_file({path})  # of a {type(model).__name__}: model.load_state_dict(weights)\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _processor(trainer: Any) -> Any:
    """Return what Trainer saves beside the weights."""
    own = trainer.processing_class
    return own if own is not None else getattr(trainer.data_collator, "tokenizer", None)


def _processor_class(processor: Any) -> str:
    if isinstance(processor, transformers.PreTrainedTokenizerBase):
        return "AutoTokenizer"
    name = type(processor).__name__
    return name if hasattr(transformers, name) else "AutoProcessor"


def _role(processor: Any) -> str:
    return "tokenizer" if isinstance(processor, transformers.PreTrainedTokenizerBase) else "processor"


def _is_public(model: Any) -> bool:
    return getattr(transformers, type(model).__name__, None) is type(model)


def _import(model: Any) -> str:
    kind = type(model)
    if _is_public(model):
        return f"from transformers import {kind.__name__}"
    module = kind.__module__ if kind.__module__ != "__main__" else "your_training_script"
    return f"from {module} import {kind.__name__}"


def _merged(imports: list[str]) -> str:
    """Return imports in one line each module, as a linter wants them."""
    modules: dict[str, list[str]] = {}
    for line in imports:
        _, module, _, name = line.split()
        modules.setdefault(module, []).append(name)
    return "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items()))
