#!/usr/bin/env python
"""Train an image classifier with MARS.

    python recipes/finetune_vit.py                                  # scikit-learn's digits, no network, a minute
    python recipes/finetune_vit.py --optim mars_adamw               # or adamw_torch, or another one of --optim
    python recipes/finetune_vit.py --dataset_name photos            # a folder with a subfolder of images per class
    python recipes/finetune_vit.py --dataset_name food101 --model_name_or_path google/vit-base-patch16-224-in21k

Without --model_name_or_path it trains a small ViT from scratch. The learning rates to start from: for the small ViT
STARTS, the best of a sweep on the digits (benchmarks/tune.py); for a pretrained model what `python -m mars_hf
suggest` derives from 5e-5, a common rate of AdamW for it.
"""

from __future__ import annotations

from pretraining.run import errors

if __name__ == "__main__":
    errors.run("finetune_vit")  # above the imports that take seconds: it watches the launcher

from dataclasses import dataclass, field
from typing import Any

import datasets
import metrics
import numpy as np
from PIL import Image
from pretraining.run.arguments import RecipeParser
from sklearn.datasets import load_digits
from tasks import finetuning
from tasks.finetuning import RecipeArguments, SuggestedRate
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

import mars_hf

STARTS = {
    "mars_m": SuggestedRate(2e-3, "beta1=0.95"),
    "mars_adamw": SuggestedRate(1e-3, "beta1=0.9,beta2=0.95"),
    "adamw_torch": SuggestedRate(2e-3),
}


@dataclass
class VitArguments(RecipeArguments, TrainingArguments):
    """Data, model, and transformers.TrainingArguments with the recipe's defaults."""

    image_column: str = field(default="image", metadata={"help": "Column of the images."})
    label_column: str = field(default="label", metadata={"help": "Column of the classes."})
    test_size: float = field(default=0.2, metadata={"help": "Share to hold out of data that hold nothing out."})
    optim: str = field(default="mars_m", metadata={"help": "mars_m, mars_adamw, adamw_torch or another one."})
    num_train_epochs: float = 10
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 128
    logging_steps: float = 50
    eval_strategy: str = "epoch"
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        """Fill in what the command line leaves out."""
        self.fill_in(finetuning.suggested(5e-5) if self.model_name_or_path else STARTS, "vit")
        super().__post_init__()


@errors.one_line_errors("finetune_vit.py")
def main(argv: list[str] | None = None) -> tuple[Trainer, dict[str, Any]]:
    """Train and return the Trainer and the content of metrics.json; `argv` is the command line without the program."""
    mars_hf.register()
    (args,) = RecipeParser(VitArguments, TrainingArguments).parse_args_into_dataclasses(argv)
    set_seed(args.seed)
    parts = finetuning.load_dataset(args) if args.dataset_name else digits()
    features = next(iter(parts.values())).features
    if args.image_column not in features or not isinstance(features.get(args.label_column), datasets.ClassLabel):
        raise ValueError(
            f"the data have the columns {', '.join(features)}; name one of images by --image_column and one of "
            "ClassLabel by --label_column"
        )
    train_set, held_out = finetuning.split(parts, args.test_size, stratify_by_column=args.label_column)
    model, processor = build(args, features[args.label_column].names)

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows[args.image_column]]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": rows[args.label_column]}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_set.with_transform(prepare),
        eval_dataset=held_out.with_transform(prepare),
        processing_class=processor,
        data_collator=default_data_collator,
        **metrics.classification(),
    )
    name = args.dataset_name or "scikit-learn digits"
    return trainer, finetuning.train(trainer, name, dataset=name)


def digits() -> datasets.DatasetDict:
    """Return scikit-learn's 1,797 handwritten digits, 8 x 8 pixels of 17 shades of grey."""
    bunch = load_digits()
    images = [Image.fromarray(shades) for shades in (bunch.images * (255 / 16)).astype(np.uint8)]
    labels = datasets.ClassLabel(names=[str(digit) for digit in bunch.target_names])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    return datasets.DatasetDict(train=datasets.Dataset.from_dict({"image": images, "label": bunch.target}, features))


def build(args: VitArguments, labels: list[str]) -> tuple[Any, Any]:
    """Return the model and its image processor."""
    names: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if path := args.model_name_or_path:
        model = AutoModelForImageClassification.from_pretrained(
            path, ignore_mismatched_sizes=True, trust_remote_code=False, **names
        )
        return model, AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    size, patch = (32, 4) if args.dataset_name else (8, 2)
    config = ViTConfig(
        image_size=size,
        patch_size=patch,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        **names,
    )
    return ViTForImageClassification(config), ViTImageProcessor(size={"height": size, "width": size})
