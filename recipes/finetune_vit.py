#!/usr/bin/env python
"""Train an image classifier with MARS.

    python recipes/finetune_vit.py                                  # scikit-learn's digits, no network, a minute
    python recipes/finetune_vit.py --optim mars_adamw               # or adamw_torch, or another one of --optim
    python recipes/finetune_vit.py --image_folder photos            # a folder with a subfolder of images per class
    python recipes/finetune_vit.py --dataset food101 --model_name_or_path google/vit-base-patch16-224-in21k

Without --model_name_or_path it trains a small ViT from scratch. The learning rates to start from: for the small ViT
STARTS, the best of a sweep on the digits (benchmarks/tune.py); for a pretrained model STARTS_PRETRAINED, what
`python -m mars_hf suggest` derives from 5e-5, a common rate of AdamW for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import metrics
import numpy as np
from PIL import Image
from pretraining.run.errors import one_line_errors
from sklearn.datasets import load_digits
from tasks import command_line, running
from tasks.command_line import Start
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    default_data_collator,
    set_seed,
)

STARTS = {
    "mars_m": Start(2e-3, "beta1=0.95"),
    "mars_adamw": Start(1e-3, "beta1=0.9,beta2=0.95"),
    "adamw_torch": Start(2e-3),
}
STARTS_PRETRAINED = {
    "mars_m": Start(6.4e-5, "beta1=0.95,lr_1d=5e-5"),
    "mars_adamw": Start(6e-5, "beta1=0.9,beta2=0.95"),
    "adamw_torch": Start(5e-5),
}
_DIGITS = "scikit-learn digits"
_SIZES = {"image_size": 32, "patch_size": 4, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES_OF_DIGITS = {**_SIZES, "image_size": 8, "patch_size": 2}
_HELD_OUT = ("validation", "valid", "val", "test")  # names of splits
_SPLIT_SEED = 0  # the same held-out images in runs of any --seed


@dataclass
class DataArguments:
    """Source of the images; neither folder nor name: scikit-learn's digits."""

    image_folder: str | None = field(
        default=None,
        metadata={"help": "Folder with a subfolder of images per class, or train/ and test/ of such."},
    )
    dataset: str | None = field(default=None, metadata={"help": "Image classification set on the Hub."})
    image_column: str = field(default="image", metadata={"help": "Column of the images."})
    label_column: str = field(default="label", metadata={"help": "Column of the classes."})
    test_size: float = field(default=0.2, metadata={"help": "Share to hold out of data that hold nothing out."})


@dataclass
class ModelArguments:
    """A pretrained model, or the size of a new ViT."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Folder or name on the Hub; default: new."})
    image_size: int | None = field(
        default=None, metadata={"help": "Pixels; left out: 8 for the digits, 32 for others."}
    )
    patch_size: int | None = field(default=None, metadata={"help": "Pixels; left out: 2 for the digits, 4 for others."})
    hidden_size: int | None = field(default=None, metadata={"help": "Width of the model; left out: 64."})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Blocks; left out: 2."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Heads per block; left out: 4."})


@dataclass
class VitArguments(TrainingArguments):
    """transformers.TrainingArguments with the recipe's defaults."""

    output_dir: str | None = field(default=None, metadata={"help": "Left out: runs/vit-OPTIM."})
    optim: str = field(default="mars_m", metadata={"help": "mars_m, mars_adamw, adamw_torch or another one."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Left out: that of STARTS, or of STARTS_PRETRAINED."}
    )  # type: ignore[assignment]
    num_train_epochs: float = 10
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 128
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    logging_steps: float = 50
    eval_strategy: str = "epoch"
    eval_on_start: bool = True
    save_strategy: str = "no"
    report_to: str | None = "none"
    remove_unused_columns: bool = False


@one_line_errors("finetune_vit.py")
def main(argv: list[str] | None = None) -> None:
    """Train; `argv` is the command line without the program's name."""
    train(argv)


def train(argv: list[str] | None = None) -> tuple[Trainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; see `main`."""
    data, sizes, training = command_line.parse(
        (DataArguments, ModelArguments, VitArguments),
        argv,
        description=__doc__,
        name="vit",
        starts=lambda values: STARTS_PRETRAINED if values.model_name_or_path else STARTS,
    )
    set_seed(training.seed)
    name, parts = load(data)
    model, processor = build(sizes, parts["train"].features[data.label_column].names, is_digits=name == _DIGITS)
    prepare = partial(_prepare, processor, data.image_column, data.label_column)
    with running.output_folder(training):
        trainer = running.trainer_class(training)(
            model=model,
            args=training,
            train_dataset=parts["train"].with_transform(prepare),
            eval_dataset=parts["held_out"].with_transform(prepare),
            processing_class=processor,
            data_collator=default_data_collator,
            **metrics.classification(),
        )
        found = running.train(trainer, name, dataset=name)
    running.conclude(trainer, found, "accuracy", "macro_f1", "loss")
    return trainer, found


def load(data: DataArguments) -> tuple[str, dict[str, datasets.Dataset]]:
    """Return the name of the data, and the parts `train` and `held_out`.

    Raises:
        ValueError: there are no images, or their columns have other names.
    """
    if data.image_folder is not None and data.dataset is not None:
        raise ValueError("--image_folder and --dataset both name the data; leave one out")
    if data.image_folder is not None:
        name, flag = Path(data.image_folder).name, f"--image_folder {data.image_folder}"
        if not Path(data.image_folder).is_dir():
            raise ValueError(f"{flag}: no such folder; give one with a subfolder of images per class")
        with running.loading(flag, "put the images of each class into a subfolder with its name"):
            parts = datasets.load_dataset("imagefolder", data_dir=data.image_folder)
    elif data.dataset is not None:
        name, flag = data.dataset, f"--dataset {data.dataset}"
        with running.loading(flag, "check the name, and that the Hub is in reach; or give --image_folder"):
            parts = datasets.load_dataset(data.dataset)
    else:
        name, flag, parts = _DIGITS, "the digits", datasets.DatasetDict(train=_digits())
    first = next(iter(parts.values()))
    for column, given in (("image_column", data.image_column), ("label_column", data.label_column)):
        if given not in first.features:
            raise ValueError(f"--{column} {given}: {flag} has no such column; it has {', '.join(first.features)}")
    if not isinstance(first.features[data.label_column], datasets.ClassLabel):
        raise ValueError(f"--label_column {data.label_column} holds no class labels; give a column of type ClassLabel")
    held_out = next((split for split in _HELD_OUT if split in parts), None)
    if held_out is not None and "train" in parts:
        return name, {"train": parts["train"], "held_out": parts[held_out]}
    with running.loading(f"--test_size {data.test_size}", "give another share, or data with a split of their own"):
        split = first.train_test_split(data.test_size, stratify_by_column=data.label_column, seed=_SPLIT_SEED)
    return name, {"train": split["train"], "held_out": split["test"]}


def _digits() -> datasets.Dataset:
    """Return scikit-learn's 1,797 handwritten digits, 8 x 8 pixels of 17 shades of grey."""
    found = load_digits()
    images = [Image.fromarray(shades) for shades in (found.images * (255 / 16)).astype(np.uint8)]
    names = [str(digit) for digit in found.target_names]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"image": images, "label": found.target}, features)


def build(sizes: ModelArguments, labels: list[str], *, is_digits: bool) -> tuple[Any, Any]:
    """Return the model and its image processor.

    Raises:
        ValueError: the model cannot be loaded, or its sizes do not fit one another.
    """
    names: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    given = {key: value for key, value in vars(sizes).items() if value is not None}
    if (path := given.pop("model_name_or_path", None)) is not None:
        if given:
            raise ValueError(f"--{next(iter(given))} would be ignored: --model_name_or_path has its own; leave it out")
        with running.loading(f"--model_name_or_path {path}", "give a folder or a name on the Hub"):
            model = AutoModelForImageClassification.from_pretrained(
                path, ignore_mismatched_sizes=True, trust_remote_code=False, **names
            )
            return model, AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    chosen: dict[str, Any] = {**(_SIZES_OF_DIGITS if is_digits else _SIZES), **given}
    for whole, part in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
        if chosen[whole] % chosen[part]:
            raise ValueError(f"--{whole} {chosen[whole]} is not a multiple of --{part} {chosen[part]}; change one")
    config = ViTConfig(**chosen, intermediate_size=4 * chosen["hidden_size"], **names)
    side = {"height": chosen["image_size"], "width": chosen["image_size"]}
    return ViTForImageClassification(config), ViTImageProcessor(size=side)


def _prepare(processor: Any, images: str, labels: str, rows: dict[str, list[Any]]) -> dict[str, Any]:
    pixels = processor([image.convert("RGB") for image in rows[images]], return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels, "labels": rows[labels]}


if __name__ == "__main__":
    main()
