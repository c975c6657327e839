"""python -m mars_hf suggest: its output can be pasted, and its mistakes are one line."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from transformers import Trainer, TrainingArguments

import mars_hf
from mars_hf.__main__ import main
from mars_hf.groups.settings import MARS_TYPES

BASIC = ["suggest", "--adamw-lr", "3e-4", "--batch-tokens", "524288", "--width", "768"]


def printed(capsys, *argv: str) -> str:
    main(list(argv))
    return capsys.readouterr().out


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of the table by rule."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("rule "))
    cells = [[cell for cell in line.split("  ") if cell.strip()] for line in lines[start + 1 : lines.index("", start)]]
    return {rule: [cell.strip() for cell in rest] for rule, *rest in cells}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))


def groups_of(optimizer: mars_hf.Mars) -> list[dict]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def test_the_table_has_a_row_per_rule(capsys):
    rows = rows_of(printed(capsys, *BASIC))
    assert list(rows) == list(MARS_TYPES)
    assert rows["mars-lion"][:3] == ["6.88e-05", "0.0003", "6.88e-05"]  # 3e-4 sqrt(0.1 / 1.9)
    assert rows["mars-lion"][6] == "0.436"  # 0.1 * 3e-4 / 6.88e-5


@pytest.mark.parametrize("rule", MARS_TYPES)
@pytest.mark.parametrize("batch", ["1024", "65536", "524288", "8388608"])
def test_both_forms_make_the_same_optimizer(rule, batch, capsys, tmp_path):
    text = printed(capsys, *BASIC, "--adamw-batch-tokens", batch, "--adamw-betas", "0.9", "0.999", "--rule", rule)
    command, call = text[text.index("  --optim ") :].split("  mars_hf.create")
    call = f"mars_hf.create{call}"
    mars_hf.register()
    words = shlex.split(command.replace("\\\n", " "))
    given = dict(zip([word.removeprefix("--") for word in words[::2]], words[1::2], strict=True))
    args = TrainingArguments(
        str(tmp_path),
        optim=given["optim"],
        optim_args=given["optim_args"],
        learning_rate=float(given["learning_rate"]),
        weight_decay=float(given["weight_decay"]),
        use_cpu=True,
    )
    make, settings = Trainer.get_optimizer_cls_and_kwargs(args, model())
    by_name = make()(model(), **settings)
    by_call = eval(call, {"mars_hf": mars_hf, "model": model()})
    assert groups_of(by_name) == groups_of(by_call)
    assert by_call.param_groups[0]["mars_type"] == rule


def test_json_has_keywords_of_create(capsys):
    found = json.loads(printed(capsys, *BASIC, "--json"))
    assert found["adamw"] == {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    assert list(found["rules"]) == list(MARS_TYPES)
    for rule, suggestion in found["rules"].items():
        optimizer = mars_hf.create(model(), **suggestion["settings"])
        assert optimizer.param_groups[0]["mars_type"] == rule
        size = optimizer.param_groups[0]["lr"] * suggestion["update_rms"]
        assert size == pytest.approx(3e-4 * (0.1 / 1.9) ** 0.5)


def test_one_rule_by_either_name(capsys):
    assert list(rows_of(printed(capsys, *BASIC, "--rule", "mars_m"))) == ["mars-m"]
    assert list(rows_of(printed(capsys, *BASIC, "--rule", "mars-m"))) == ["mars-m"]


def test_without_a_batch_half_lives_are_in_steps(capsys):
    text = printed(capsys, "suggest", "--adamw-lr", "3e-4", "--adamw-weight-decay", "0", "--rule", "mars-lion")
    assert "Half-lives in steps: first moment 6.58, second moment 13.5\n" in text


def test_another_batch_shows_where_adamw_went(capsys):
    text = printed(capsys, *BASIC, "--adamw-batch-tokens", "131072", "--rule", "mars-lion")
    assert "AdamW, tuned at 131,072 tokens a step: lr 0.0003, betas (0.9, 0.95), weight decay 0.1\n" in text
    assert "AdamW, moved to 524,288 tokens a step: lr 0.0006, betas (0.656, 0.815), weight decay 0.2\n" in text
    assert "first moment 862K" in text  # 6.5788 * 131072


def test_without_a_width_mars_shampoo_is_left_out(capsys):
    text = printed(capsys, "suggest", "--adamw-lr", "3e-4")
    assert list(rows_of(text)) == ["mars-adamw", "mars-lion", "mars-m"]
    assert "mars-shampoo's update depends on the width of the model: add --width or --model\n" in text


@pytest.mark.parametrize(
    "config", [{"n_embd": 768}, {"hidden_size": 768}, {"text_config": {"hidden_size": 768}, "vision_config": {}}]
)
def test_the_width_comes_from_the_config_of_a_model(config, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = printed(capsys, *BASIC)
    without = BASIC[: BASIC.index("--width")]
    assert printed(capsys, *without, "--model", str(tmp_path)) == expected
    assert printed(capsys, *without, "--model", str(tmp_path / "config.json")) == expected


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "the following arguments are required: --adamw-lr"),
        (["--adamw-lr", "0"], "lr=0.0 of AdamW leaves nothing to match"),
        (["--adamw-lr", "nan"], "lr=nan is out of range"),
        (["--adamw-lr", "1e-3", "--adamw-betas", "0.9", "1"], "betas[1]=1.0 is out of range"),
        (["--adamw-lr", "1e-3", "--batch-tokens", "0"], "'0' is not a number of tokens; accepted: an integer >= 1"),
        (["--adamw-lr", "1e-3", "--batch-tokens", "many"], "'many' is not a number of tokens"),
        (["--adamw-lr", "1e-3", "--batch-tokens", "inf"], "'inf' is not a number of tokens"),
        (["--adamw-lr", "1e-3", "--adamw-batch-tokens", "8"], "give --batch-tokens of the MARS run too"),
        (["--adamw-lr", "1e-3", "--rule", "mars-shampoo"], "give --width or --model"),
        (["--adamw-lr", "1e-3", "--width", "0"], "width=0 is out of range"),
        (["--adamw-lr", "1e-3", "--rule", "adamw"], "invalid choice: 'adamw'"),
        (["--adamw-lr", "1e-3", "--width", "8", "--model", "."], "not allowed with argument --width"),
        (["--adamw-lr", "1e-3", "--model", "nowhere"], "--model 'nowhere': nowhere: No such file or directory"),
        (["--adamw-lr", "1e-3", "--model", "."], "--model '.': config.json: No such file or directory"),
        (["--adamw-lr", "1e-3", "--model", "broken.json"], "broken.json is not JSON; give --width"),
        (["--adamw-lr", "1e-3", "--model", "empty.json"], "empty.json has none of hidden_size, n_embd"),
        (["--adamw-lr", "1e-3", "--model", "list.json"], "list.json has none of hidden_size, n_embd"),
    ],
)
def test_mistakes_are_told_in_one_line(argv, part, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"broken.json": "{", "empty.json": '{"hidden_size": "big"}', "list.json": "[]"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["suggest", *argv])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert part in line and line.count("\n") == 1
    assert line.startswith("python -m mars_hf: ")
