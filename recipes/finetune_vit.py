#!/usr/bin/env python
"""Fine-tune an image classifier with MARS. Copy this file and change it.

    python finetune_vit.py                # a small ViT with random weights, on scikit-learn's digits
    python finetune_vit.py --model_name_or_path google/vit-base-patch16-224-in21k --dataset_name food101 --bf16 true
    python finetune_vit.py --model_name_or_path google/vit-base-patch16-224-in21k --dataset_name photos --bf16 true

A folder of photos has a subfolder of images per class. `--optim mars_m` is another rule, `--optim adamw_torch` the
baseline. `--learning_rate` is AdamW's for all of them, and MARS converts it: 5e-5 if you give none, and 2e-3 without a
model. All flags of TrainingArguments work.
"""

from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from PIL import Image
from sklearn.datasets import load_digits
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
from transformers.hf_argparser import HfArg

import mars_hf


@dataclass
class Arguments:
    """Model and images."""

    model_name_or_path: str | None = HfArg(default=None, help="Hub or folder; left out: a small model, from scratch.")
    dataset_name: str | None = HfArg(default=None, help="Hub, or a folder of images; left out: digits.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of a data set on the Hub.")
    image_column_name: str = HfArg(default="image", help="Column of the images.")
    label_column_name: str = HfArg(default="label", help="Column of the classes.")


def digits() -> DatasetDict:
    """Return 1,797 handwritten digits, 8 x 8 pixels of 17 shades of grey."""
    found = load_digits()
    images = [Image.fromarray(shades) for shades in (found.images * (255 / 16)).astype("uint8")]
    rows = Dataset.from_dict({"image": images, "label": found.target})
    return DatasetDict(train=rows.cast_column("label", ClassLabel(names=[str(digit) for digit in found.target_names])))


def load_images(args: Arguments) -> tuple[Dataset, Dataset]:
    """Return the images to train on, and those held out."""
    parts = load_dataset(args.dataset_name, args.dataset_config_name) if args.dataset_name else digits()
    columns = parts["train"].features
    if args.image_column_name not in columns or not isinstance(columns.get(args.label_column_name), ClassLabel):
        needed = f"a column {args.image_column_name!r}, and {args.label_column_name!r} of type ClassLabel"
        raise SystemExit(f"the data set needs {needed}; it has {dict(columns)}")
    if not {"validation", "test"} & parts.keys():
        parts = parts["train"].train_test_split(0.2, seed=0, stratify_by_column=args.label_column_name)
    return parts["train"], parts["validation" if "validation" in parts else "test"]


def load_model(args: Arguments, names: list[str]) -> tuple[Any, Any]:
    """Return the model, in float32 and with a new head for the classes, and its image processor."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if path := args.model_name_or_path:
        model = AutoModelForImageClassification.from_pretrained(
            path, dtype="float32", ignore_mismatched_sizes=True, trust_remote_code=False, **labels
        )
        return model, AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    print("A small ViT with random weights trains on two CPU cores in about a minute.", flush=True)
    size = 32 if args.dataset_name else 8
    config = ViTConfig(image_size=size, patch_size=size // 4, hidden_size=64, intermediate_size=256, **labels)
    config.num_hidden_layers, config.num_attention_heads = 2, 4
    return ViTForImageClassification(config), ViTImageProcessor(size={"height": size, "width": size})


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save; `argv` is the command line without the program's name."""
    mars_hf.register()  # --optim mars_adamw and the other names
    parser = HfArgumentParser((Arguments, TrainingArguments))
    # AdamW's rate and betas; from the rate follows MARS's.
    parser.set_defaults(learning_rate=None, optim="mars_adamw", optim_args="adamw_rates=true,beta1=0.9,beta2=0.999")
    parser.set_defaults(output_dir="finetuned-vit", lr_scheduler_type="cosine", warmup_steps=0.05)
    parser.set_defaults(per_device_train_batch_size=32, num_train_epochs=10, logging_steps=50, eval_on_start=True)
    parser.set_defaults(remove_unused_columns=False)  # the images become pixels when they are read
    args, training = parser.parse_args_into_dataclasses(argv)
    if training.learning_rate is None:
        training.learning_rate = 5e-5 if args.model_name_or_path else 2e-3
    set_seed(training.seed)

    train, held_out = load_images(args)
    model, processor = load_model(args, train.features[args.label_column_name].names)

    def pixels(rows: dict[str, list[Any]]) -> dict[str, Any]:
        images = [image.convert("RGB") for image in rows[args.image_column_name]]
        return {**processor(images, return_tensors="pt"), "labels": rows[args.label_column_name]}

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train.with_transform(pixels),
        eval_dataset=held_out.with_transform(pixels),
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()
    if training.push_to_hub:
        trainer.push_to_hub(dataset=args.dataset_name)
    else:
        trainer.create_model_card(dataset=args.dataset_name)
    trainer.end()
    return trainer


if __name__ == "__main__":
    main()
