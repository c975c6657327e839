#!/usr/bin/env python
"""Fine-tune an image classifier with MARS. Copy this file and change it.

    python finetune_vit.py                # a small ViT with random weights on scikit-learn's digits, about a minute
    python finetune_vit.py --model_name_or_path google/vit-base-patch16-224-in21k --dataset_name food101 --bf16 true
    python finetune_vit.py --model_name_or_path google/vit-base-patch16-224-in21k --dataset_name photos --bf16 true

A folder of photos has a subfolder of images per class. `--optim mars_adamw` is another rule, `--optim adamw_torch` the
baseline. `--learning_rate` is AdamW's for all of them: unless you give `--optim_args`, MARS converts it. All flags of
TrainingArguments work; `--resume_from_checkpoint True` resumes from the newest checkpoint in `--output_dir`.
"""

import argparse
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetsError
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import mars_hf


def option(default: Any, text: str) -> Any:
    """Return a flag's default and help."""
    return field(default=default, metadata={"help": text})


@dataclass
class Arguments:
    """Model and images."""

    model_name_or_path: str | None = option(None, "Hub or folder; left out: a small ViT with random weights.")
    dataset_name: str | None = option(None, "Hub, or a folder of images; left out: scikit-learn's digits.")
    dataset_config_name: str | None = option(None, "Configuration of a data set on the Hub.")
    image_column_name: str = option("image", "Column of the images.")
    label_column_name: str = option("label", "Column of the classes.")
    train_val_split: float = option(0.2, "Share to hold out of data that hold nothing out.")


@dataclass
class Training(TrainingArguments):
    """Those of transformers, with the recipe's defaults."""

    _argument_group_name = "options of transformers.TrainingArguments"
    output_dir: str | None = option("finetuned-vit", "Folder of the run.")
    learning_rate: float = option(None, "AdamW's rate, which MARS converts; left out: 5e-5, without a model 2e-3.")
    num_train_epochs: float = option(None, "Times that the images are read; left out: 3, without a model 10.")
    optim_args: str | None = option(
        None, "Settings of the rule, such as gamma=0.05; left out: adamw_rates=true, and AdamW's betas for mars_adamw."
    )


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows the text above as it stands, and the default of each flag."""


def digits() -> datasets.Dataset:
    """Return scikit-learn's 1,797 handwritten digits, 8 x 8 pixels of 17 shades of grey."""
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = [Image.fromarray(shades) for shades in (bunch.images * (255 / 16)).astype(np.uint8)]
    labels = datasets.ClassLabel(names=[str(digit) for digit in bunch.target_names])
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    return datasets.Dataset.from_dict({"image": images, "label": bunch.target}, features)


def load_images(args: Arguments) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the images to train on and those held out."""
    parts = {"train": digits()}
    if args.dataset_name:
        parts = datasets.load_dataset(args.dataset_name, args.dataset_config_name)
    image, label, features = args.image_column_name, args.label_column_name, parts["train"].features
    if image not in features or not isinstance(features.get(label), datasets.ClassLabel):
        raise ValueError(
            f"the data have the columns {', '.join(features)}; name one of images by --image_column_name and one of "
            "ClassLabel by --label_column_name"
        )
    held_out = next((parts[name] for name in ("validation", "test") if name in parts), None)
    if held_out is not None:
        return parts["train"], held_out
    halves = parts["train"].train_test_split(args.train_val_split, seed=0, stratify_by_column=label)
    return halves["train"], halves["test"]


def load_model(args: Arguments, labels: list[str]) -> tuple[Any, Any]:
    """Return the model, in float32 and with a head for the labels, and its image processor."""
    names: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    if path := args.model_name_or_path:
        names |= {"dtype": "float32", "ignore_mismatched_sizes": True}  # the head's
        try:
            model = AutoModelForImageClassification.from_pretrained(path, trust_remote_code=False, **names)
            return model, AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        except OSError as error:
            raise ValueError(f"--model_name_or_path {path}: {error}") from error
    size, patch = (32, 4) if args.dataset_name else (8, 2)
    sizes: dict[str, Any] = {"image_size": size, "patch_size": patch, "hidden_size": 64, "intermediate_size": 256}
    model = ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, **names))
    return model, ViTImageProcessor(size={"height": size, "width": size})


def build(args: Arguments, training: TrainingArguments) -> Trainer:
    """Return the Trainer; raise ValueError for wrong input."""
    if int(os.environ.get("WORLD_SIZE", "1")) != training.world_size:
        raise ValueError("the launched processes are not connected, so each would train alone; add --use_cpu true")
    if (given := training.resume_from_checkpoint) in ("True", "true"):
        output = str(training.output_dir)
        training.resume_from_checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
    if given and not Path(training.resume_from_checkpoint or "", "trainer_state.json").is_file():
        raise ValueError(f"--resume_from_checkpoint {given}: no checkpoint there; leave the flag out to start anew")
    set_seed(training.seed)
    with training.main_process_first():
        train, held_out = load_images(args)
        model, processor = load_model(args, train.features[args.label_column_name].names)

    def pixels(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows[args.image_column_name]]
        return {**processor(images, return_tensors="pt"), "labels": rows[args.label_column_name]}

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    return Trainer(
        model,
        training,
        default_data_collator,
        train.with_transform(pixels),
        held_out.with_transform(pixels),
        processor,
        compute_metrics=accuracy,
    )


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_m and the other names
    kinds: Any = (Arguments, Training)
    parser = HfArgumentParser(
        kinds, prog="finetune_vit.py", usage=argparse.SUPPRESS, description=__doc__, formatter_class=Help
    )
    parser.set_defaults(optim="mars_m", lr_scheduler_type="cosine", warmup_steps=0.05, per_device_train_batch_size=32)
    parser.set_defaults(logging_steps=50, eval_on_start=True, remove_unused_columns=False)
    try:
        args, training = parser.parse_args_into_dataclasses(argv)
        if args.model_name_or_path is None:
            print("A small ViT with random weights trains on two CPU cores in about a minute.", flush=True)
        if training.learning_rate is None:
            training.learning_rate = 5e-5 if args.model_name_or_path else 2e-3
        if training.num_train_epochs is None:
            training.num_train_epochs = 3 if args.model_name_or_path else 10
        if training.optim_args is None and training.optim.startswith("mars_"):
            training.optim_args = "adamw_rates=true"
            training.optim_args += ",beta1=0.9,beta2=0.999" if training.optim == "mars_adamw" else ""  # AdamW's
        trainer: Any = build(args, training)
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        parser.error(" ".join(str(error).split()))
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", metrics)
    first: dict[str, Any] = next((row for row in trainer.state.log_history if row["step"] == 0), {})
    if trainer.is_world_process_zero():
        trainer.create_model_card(dataset=args.dataset_name)
        for name in ("eval_loss", "eval_accuracy"):
            before, after = first.get(name, math.nan), metrics[name]
            print(f"held-out {name.removeprefix('eval_')}: {before:.3f} before, {after:.3f} after")
        print(f"saved in {training.output_dir}; --push_to_hub true, or hf upload NAME FOLDER, uploads it")
    if training.push_to_hub:
        trainer.push_to_hub(dataset=args.dataset_name)
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
