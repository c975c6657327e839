"""Metrics of recipes/metrics.py: the numbers by hand, without a network, and as Trainer calls them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import metrics
import numpy as np
import pytest
import torch
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ROOT = Path(__file__).resolve().parents[2]


def test_metrics_of_a_classifier_by_hand():
    combined = evaluate.combine([metrics.Accuracy(), metrics.MacroF1()])
    found = combined.compute(predictions=[0, 0, 1, 2, 3], references=[0, 1, 1, 2, 2])
    # F1: of 0 2/3, of 1 2/3, of 2 2/3, of 3 (never right) 0
    assert found == {"accuracy": 3 / 5, "macro_f1": pytest.approx(2 / 3 * 3 / 4)}
    # Nothing stays for the next evaluation.
    assert combined.compute(predictions=[1], references=[1]) == {"accuracy": 1.0, "macro_f1": 1.0}


def test_perplexity_by_hand():
    assert metrics.Perplexity().compute(losses=[1.0, 2.0, 3.0]) == {"perplexity": pytest.approx(math.e**2)}
    assert metrics.Perplexity().compute(losses=[1e9])["perplexity"] == math.exp(700)


def test_arguments_for_a_classifier():
    arguments = metrics.classification()
    labels = torch.tensor([1, 0, 0])
    predictions = arguments["preprocess_logits_for_metrics"](torch.tensor([[0.0, 2.0], [3.0, 1.0], [0.0, 1.0]]), labels)
    assert predictions.tolist() == [1, 0, 1]
    found = arguments["compute_metrics"](EvalPrediction(predictions.numpy(), labels.numpy()))
    assert found == {"accuracy": pytest.approx(2 / 3), "macro_f1": pytest.approx(2 / 3)}


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_language_model_in_trainer(tmp_path, by_batch):
    """Two sequences, one of them padded: 3 + 2 predicted tokens, in batches of different lengths."""
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=11))
    rows = [[3, 1, 4, 1], [5, 9, 2, -100], [6, 5]]

    def collate(batch):
        width = max(map(len, batch))
        labels = torch.tensor([[*row, *[-100] * (width - len(row))] for row in batch])
        return {"input_ids": labels.clamp(min=0), "labels": labels}

    args = TrainingArguments(
        str(tmp_path / "out"),
        per_device_eval_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        batch_eval_metrics=by_batch,
        remove_unused_columns=False,
    )
    trainer = Trainer(model, args, data_collator=collate, eval_dataset=rows, **metrics.language_modeling())
    for _ in range(2):  # an evaluation leaves nothing for the next
        found = trainer.evaluate()

    hits, losses = [], []
    model.eval()
    with torch.no_grad():
        for row in rows:
            for place in range(1, sum(token >= 0 for token in row)):
                scores = model(torch.tensor([row[:place]])).logits[0, -1].log_softmax(-1)
                hits.append(scores.argmax().item() == row[place])
                losses.append(-scores[row[place]].item())
    assert len(losses) == 3 + 2 + 1
    assert found["eval_accuracy"] == pytest.approx(np.mean(hits))
    assert found["eval_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


@pytest.mark.slow
def test_metrics_need_no_network(tmp_path):
    """In a new process, with an empty cache, and with every socket refused."""
    script = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('the network was used')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import metrics\n"
        "print(metrics.Accuracy().compute(predictions=[1, 0], references=[1, 1]))\n"
    )
    environment = {name: text for name, text in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "recipes")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("{'accuracy': 0.5}"), done.stderr[-2000:]
