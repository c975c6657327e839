"""Scripts as people have them: what a comparison finds in each, or why it refuses."""

import json
from pathlib import Path

import pytest
from compare.scripts import PLAIN, compare, forked, script  # noqa: F401

from mars_hf.compare import page

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

TWO = ["--optim", "adamw_torch", "mars_adamw"]
QUICK = [*TWO, "--no_search", "--seeds", "1"]
DATA = "train_dataset=data(64, 1), eval_dataset=data(32, 2)"


def test_whole_comparison(tmp_path, capsys):
    """Rates searched, the best three with two more seeds, new seeds in pairs; one line a run, and what was changed."""
    answer = compare(capsys, script(tmp_path, PLAIN), *TWO, "--seeds", "2", "--jobs", "2")
    assert answer.code == 0, answer.error
    lines = answer.out.splitlines()
    assert lines[0].endswith("the first run tells metric and time")
    assert "mars_adamw against adamw_torch, new seeds 1, 2" in lines[0]
    assert any(line.startswith("21 to ") and "Ctrl-C stops" in line for line in lines)
    numbers, results = answer.numbers, list(answer.results())
    assert all(one["state"] == "complete" for one in results)
    assert sum(", rate " in line or "the script's own rate, seed" in line for line in lines) == len(results) >= 22
    for arm, rows in numbers["search"].items():
        full = [row for row in rows if len(row["values"]) == 3]
        best = min(full, key=lambda row: sum(row["values"]))
        assert len(full) >= 3 and best["rate"] == next(run["rate"] for run in numbers["runs"] if run["arm"] == arm)
    assert {(run["arm"], run["seed"]) for run in numbers["runs"]} == {(a, s) for a in TWO[1:] for s in (1, 2)}
    by_seed = {}
    for run in numbers["runs"]:
        by_seed.setdefault(run["seed"], set()).add((run["weights"], run["batch"]))
    assert [len(prints) for prints in by_seed.values()] == [1, 1] and by_seed[1] != by_seed[2]
    assert "metric: eval_loss" in answer.page and "the comparison does, 5 times" in answer.page
    assert "other seeds than those compared: 42, 43, 44." in answer.page and "Runs shared a device" in answer.page
    assert {"comparison.md", "comparison.json", "comparison.png"} < {path.name for path in answer.folder.iterdir()}
    # The trainer, the optimizer, and the settings that MARS gets from the baseline's best.
    kinds = {
        (one["order"]["arm"]["optim"], *(one["training"][key] for key in ("trainer", "optimizer"))) for one in results
    }
    assert kinds == {("adamw_torch", "Trainer", "AdamW"), ("mars_adamw", "MarsTrainer", "Mars")}
    # Nothing is repeated, and nothing else may be mixed in.
    again = compare(capsys, tmp_path / "train.py", *TWO, "--seeds", "2", "--jobs", "2")
    assert again.code == 0 and again.numbers["runs"] == numbers["runs"] and ", seed " not in again.out.split("\n#")[0]
    other = compare(capsys, tmp_path / "train.py", *TWO, "--seeds", "2", "--set", "max_steps=4")
    assert other.code == 2 and "a run with other settings (max_steps: null, now 4)" in other.error
    assert other.error.count("\n") == 1
    assert not any((tmp_path / "out").glob("*")) and not any(answer.folder.glob("runs/*/*/output"))
    size = sum(path.stat().st_size for path in answer.folder.glob("runs/*/*/*"))
    assert size < 2e5 * len(results)


OWN = f"""
class Own(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.KIND(self.model.parameters(), lr=0.1)
        return self.optimizer


Own(Net(), arguments(), {DATA}).train()
"""
GIVEN = f"""
net = Net()
mine = torch.optim.SGD(net.parameters(), lr=0.1)
Trainer(net, arguments(), {DATA}, optimizers=(mine, None)).train()
"""
LOOP = "net = Net()\nprint(net(torch.ones(1, 6), torch.ones(1, 4))['loss'])\n"
# What is wrong with a script or a command: text, further words, and what the last line says.
REFUSED = {
    "twice": (PLAIN + PLAIN, [], "trains more than once, 6 steps the first time, and"),
    "optimizers": (GIVEN, [], "makes its own optimizer, SGD, and hands it to its Trainer"),
    "create": (OWN.replace("KIND", "SGD"), [], "SGD, where adamw_torch was asked for"),
    "rate": (
        OWN.replace("KIND", "AdamW"),
        [],
        "learning_rate=0.01 of the TrainingArguments does not reach AdamW, whose",
    ),
    "no_trainer": (LOOP, [], "no transformers.Trainer has trained"),
    "error": ("raise RuntimeError('no such corpus')", [], "RuntimeError: no such corpus (its log: "),
    "exit": ("sys.exit('give --corpus')", [], "the script ended with 'give --corpus'"),
    "import": ("import nowhere_at_all", [], "No module named 'nowhere_at_all'"),
    "killed": ("os._exit(7)", [], "it ended with code 7"),
    "set": (
        PLAIN,
        ["--set", "nonsense=1"],
        "--set nonsense: TrainingArguments, the script's TrainingArguments, has no",
    ),
    "metric": (PLAIN, ["--metric", "accuracy"], "--metric accuracy: the script's evaluations have eval_loss"),
}


# A script that is edited while it trains: the run that trains it has read the old text.
EDITS_ITSELF = PLAIN + 'open(__file__, "a").write("print(1)\\n")\n'


def test_edited_script_is_not_mixed_with_its_former_self(tmp_path, capsys):
    edited = compare(capsys, script(tmp_path, EDITS_ITSELF), *QUICK)
    assert edited.code == 2 and len(list(edited.results())) == 2
    assert "train.py was edited after the comparison began: bring back" in edited.error.splitlines()[-1]
    later = compare(capsys, tmp_path / "train.py", *QUICK)
    assert later.code == 2 and later.error.count("\n") == 1
    assert f"holds a run of {tmp_path / 'train.py'} before it was edited: give another --output_dir" in later.error
    assert compare(capsys, script(tmp_path, EDITS_ITSELF.replace("open", "# open")), *QUICK, folder="new").code == 0


@pytest.mark.parametrize(("text", "words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(tmp_path, capsys, text, words, message):
    answer = compare(capsys, script(tmp_path, text), *TWO, *words)
    assert answer.code == 2 and answer.error.rstrip().splitlines()[-1].count(message) == 1, answer.error
    assert answer.error.rstrip().splitlines()[-1].startswith("python -m mars_hf compare: ")
    assert len(list(answer.results())) == 1 and not (answer.folder / "comparison.md").exists()


def test_mars_that_the_script_makes_is_refused(tmp_path, capsys):
    """It would train in all arms, whatever their settings."""
    text = f"""
    import mars_hf
    net, args = Net(), arguments()
    Trainer(net, args, {DATA}, optimizers=(mars_hf.create(net, lr=args.learning_rate), None)).train()
    """
    answer = compare(capsys, script(tmp_path, text), "--optim", "mars_adamw", "mars_adamw:gamma=0.2")
    assert answer.code == 2 and len(list(answer.results())) == 1
    assert "makes its own optimizer, Mars, and hands it to its Trainer" in answer.error.splitlines()[-1]
    inside = "import mars_hf\n" + OWN.replace(
        "torch.optim.KIND(self.model.parameters(), lr=0.1)", "mars_hf.create(self.model, lr=0.01)"
    )
    answer = compare(capsys, script(tmp_path, inside), "--optim", "mars_adamw", "mars_adamw:gamma=0.2", folder="inside")
    assert answer.code == 2 and "makes its own optimizer, Mars, where mars_adamw was" in answer.error.splitlines()[-1]


def test_script_that_catches_everything(tmp_path, capsys):
    text = f"""
    trainer = Trainer(Net(), arguments(), {DATA})
    trainer.train()
    try:
        trainer.train()
    except Exception:
        print("whatever")
    """
    answer = compare(capsys, script(tmp_path, text), *QUICK)
    assert answer.code == 2 and "trains more than once" in answer.error


def test_hard_coded_arguments_and_seeds(tmp_path, capsys):
    """A seed and rate of its own, set before and after, optim_args of its own, an output folder that must be new."""
    text = """
    import dataclasses
    set_seed(1234)
    net = Net()
    args = arguments(seed=7, data_seed=7, optim="rmsprop", optim_args="alpha=0.9", report_to="all", push_to_hub=True)
    args.learning_rate, args.seed, args.output_dir = 3e-3, 99, "mine"
    kind = type(args.save_strategy)
    args = dataclasses.replace(args, weight_decay=0.1)
    args.save_strategy, args.save_steps = kind("steps"), 2
    if os.path.isdir(args.output_dir) and os.listdir(args.output_dir):
        sys.exit(0)
    Trainer(net, args, train_dataset=data(64, 1), eval_dataset=data(32, 2)).train()
    """
    answer = compare(capsys, script(tmp_path, text), *TWO, "--search_seeds", "42", "--seeds", "2")
    assert answer.code == 0, answer.error
    for one in answer.results():
        args, order = one["training"]["arguments"], one["order"]
        assert (args["seed"], args["data_seed"]) == (order["shared"]["seed"],) * 2
        assert args["optim"] == order["arm"]["optim"] and args["optim_args"] == order["arm"]["optim_args"]
        assert args["report_to"] in ([], "none", ["none"]) and not args["push_to_hub"]
        assert args["output_dir"].startswith(str(answer.folder)) and args["save_strategy"] == "no"
    first = next(one for one in answer.results("adamw_torch") if "learning_rate" not in one["order"]["arm"])
    assert first["training"]["arguments"]["learning_rate"] == 3e-3  # as changed afterwards
    assert "All seeds began with the same weights, which the script seeds itself" in answer.page


def test_unseeded_script_is_paired(tmp_path, capsys):
    """A model and a shuffle that nothing seeds begin alike in all arms."""
    text = """
    net, rows = Net(), data(64, 1)
    order = torch.randperm(64).tolist()
    Trainer(net, arguments(), train_dataset=[rows[at] for at in order], eval_dataset=data(32, 2)).train()
    """
    answer = compare(capsys, script(tmp_path, text), *TWO, "--no_search", "--seeds", "2")
    prints = {(run["seed"], run["weights"], run["batch"]) for run in answer.numbers["runs"]}
    assert len(prints) == 2 and "Not paired" not in answer.page and "All seeds began" not in answer.page
    assert "no verdict**, because nobody searched the rates" in answer.page and " shown |" not in answer.page


def test_arms_that_begin_unlike_are_told(tmp_path, capsys):
    text = f"torch.manual_seed(os.getpid())\nTrainer(Net(), arguments(), {DATA}).train()\n"
    answer = compare(capsys, script(tmp_path, text), *QUICK)
    assert "Not paired: runs of seed 1 began with different weights" in answer.page


def test_nothing_random_gives_no_verdict(tmp_path, capsys):
    text = """
    set_seed(3)
    net, args = Net(), arguments(train_sampling_strategy="sequential")
    Trainer(net, args, train_dataset=data(64, 1), eval_dataset=data(32, 2)).train()
    """
    answer = compare(capsys, script(tmp_path, text), *TWO, "--search_seeds", "42", "--seeds", "2")
    assert answer.code == 0, answer.error
    assert (
        "**mars_adamw: no verdict**, because all runs of mars_adamw ended alike, the seeds changed nothing"
        in answer.page
    )


@pytest.mark.parametrize(
    ("rest", "words", "metric", "line"),
    [
        ("train_dataset=data(64, 1)", [], "loss", "THE TRAINING LOSS, because the script evaluates nothing"),
        (DATA, ["--metric", "loss"], "loss", "the mean training loss of the last tenth of the steps, as asked for"),
        (DATA, ["--set", "eval_strategy=no"], "eval_loss", "metric: eval_loss, the last of each run"),
        (
            "train_dataset=data(64, 1), eval_dataset={'a': data(8, 2), 'b': data(8, 3)}",
            [],
            "eval_a_loss",
            "(--metric: eval_b_loss)",
        ),
    ],
    ids=["none", "loss", "eval_strategy_no", "several"],
)
def test_metric_of_a_script(tmp_path, capsys, rest, words, metric, line):
    """Evaluations are switched on unless --set says no; then there is one at the end, unless nobody asks for it."""
    answer = compare(capsys, script(tmp_path, f"Trainer(Net(), arguments(), {rest}).train()\n"), *QUICK, *words)
    assert answer.code == 0, answer.error
    assert answer.numbers["metric"]["name"] == metric and line in answer.page
    steps = [row["step"] for row in next(answer.results())["training"]["evaluations"]]
    # Five times, each second step of six; of the last step one at the end.
    assert steps == ([] if metric == "loss" else [6] if "eval_strategy=no" in words else [2, 4, 6])


def test_accuracy_of_a_model_that_is_nan(tmp_path, capsys):
    """Its metric is finite; its run has diverged, by the last loss, also where too few bad steps end it."""
    text = f"""
    net = Net()
    trainer = Trainer(net, arguments(max_steps=2), {DATA}, compute_metrics=lambda _: {{"accuracy": 0.9}})
    if trainer.args.optim == "sgd":
        net.inner[0].weight.data.mul_(float("nan"))
    trainer.train()
    """
    words = ["--optim", "adamw_torch", "sgd", "--no_search", "--seeds", "1", "--metric", "accuracy"]
    answer = compare(capsys, script(tmp_path, text), *words, "--greater_is_better")
    assert answer.code == 0, answer.error
    assert [one["state"] for one in answer.results()] == ["complete", "diverged"]
    assert "**sgd: no verdict**, runs diverged: 1 of sgd" in answer.page


def test_best_model_at_end(tmp_path, capsys):
    """The best evaluation of each run counts, by the script's own metric; one checkpoint at a time, and none stays."""
    text = f"""
    args = arguments(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, save_steps=2)
    Trainer(Net(), args, {DATA}).train()
    """
    answer = compare(capsys, script(tmp_path, text), *QUICK)
    assert answer.code == 0, answer.error
    assert answer.numbers["metric"]["best"] and "because of load_best_model_at_end" in answer.page
    for run in answer.numbers["runs"]:
        assert run["value"] == min(value for _, value in run["curve"])
    assert not any(answer.folder.rglob("checkpoint-*"))


def test_rates_that_diverge(tmp_path, capsys):
    """The first rate diverges, so half of it is tried; with a new seed the best one does, so the next best is taken."""
    text = f"""
    args = arguments(learning_rate=0.04, max_steps=4)
    net = Net()
    trainer = Trainer(net, args, {DATA})
    limit = 0.006 if args.seed == 1 else 0.012
    if args.learning_rate > limit:
        for param in net.parameters():
            param.data.mul_(float("nan"))
    trainer.train()
    """
    answer = compare(capsys, script(tmp_path, text), *TWO, "--seeds", "2")
    assert answer.code == 0, answer.error
    assert "the script's own rate, seed 42: diverged; trying half of its rate" in answer.out
    assert answer.numbers["runs"][0]["rate"] == 0.005  # 0.01 was the best of the search, and diverged with seed 1
    assert all(run["value"] is not None for run in answer.numbers["runs"])
    assert "a neighbouring rate diverged" in answer.page
    rows = {row["rate"]: row["values"] for row in answer.numbers["search"]["adamw_torch"]}
    assert rows[0.04] == rows[0.02] == rows[0.01] == [] and len(rows[0.005]) == 3


def test_failure_after_training_counts(tmp_path, capsys):
    """A script that would upload at its end does not, and what it says of that is told."""
    text = f"""
    import huggingface_hub
    trainer = Trainer(Net(), arguments(), {DATA})
    trainer.train()
    trainer.push_to_hub()
    session = huggingface_hub.get_session()
    os.environ.pop("HF_HUB_OFFLINE", None)
    try:
        session.post("http://127.0.0.1:9/api/models/me/mine/commit/main", json={{}})
    except RuntimeError as error:
        print(error)
    raise ValueError("no token")
    """
    answer = compare(capsys, script(tmp_path, text), *QUICK)
    assert answer.code == 0, answer.error
    assert "the script would have uploaded to the Hub; nothing was" in answer.page
    assert "the script failed after training: ValueError: no token" in answer.page
    assert "uploads nothing" in next(answer.folder.glob("runs/*/*/log.txt")).read_text()


def test_settings_that_change_nothing(tmp_path, capsys):
    """transformers ignores the name, and the arm would be compared with itself."""
    path = script(tmp_path, PLAIN)
    words = ["--no_search", "--seeds", "1", "--optim"]
    answer = compare(capsys, path, *words, "adamw_torch:beta1=0.8", "adamw_torch")
    assert answer.code == 2 and "beta1=0.8 changes nothing in adamw_torch; correct its name" in answer.error
    answer = compare(capsys, path, *words, "sgd:momentum=0.9,nesterov=true", "sgd", folder="known")
    assert answer.code == 0, answer.error


def test_script_starts_at_its_own_rate(tmp_path, capsys):
    """Also where the baseline, whose first run tells what the script has, starts at another."""
    text = f"Trainer(Net(), arguments(optim='sgd', learning_rate=1.5), {DATA}).train()\n"
    arms = ["--optim", "adamw_torch:learning_rate=0.04", "script", "--search_seeds", "42", "--seeds", "1"]
    answer = compare(capsys, script(tmp_path, text), *arms, "--max_runs", "7")
    assert answer.code == 0 and "the script's own learning rate is 1.5" in answer.page, answer.error
    rates = {row["rate"] for row in answer.numbers["search"]["script"]}
    assert len(rates) >= 3 and rates <= {1.5 * 2.0**power for power in range(-3, 4)}


def test_arguments_that_check_themselves(tmp_path, capsys):
    """They make other types of some values; --set is not undone by that, and --set load_best_model_at_end saves."""
    path = script(tmp_path, PLAIN)
    words = ['accelerator_config={"split_batches": true}', "load_best_model_at_end=true", "lr_scheduler_type=cosine"]
    words += ["eval_strategy=steps", "eval_steps=2", "save_steps=2"]
    answer = compare(capsys, path, *QUICK, "--set", *words)
    assert answer.code == 0, answer.error
    for one in answer.results():
        args = one["training"]["arguments"]
        assert args["accelerator_config"]["split_batches"] and args["lr_scheduler_type"] == "cosine"
        assert one["notes"] == []
    assert answer.numbers["metric"]["best"]


def test_script_arm_and_settings_of_arms(tmp_path, capsys):
    """`script` trains what the script trains; settings after a colon reach TrainingArguments or the optimizer."""
    text = f"Trainer(Net(), arguments(optim='sgd', learning_rate=0.05), {DATA}).train()\n"
    arms = ["script", "adamw_torch:adam_beta1=0.8,learning_rate=0.01", "mars_m:clip_threshold=none,learning_rate=0.02"]
    answer = compare(capsys, script(tmp_path, text), "--optim", *arms, "--no_search", "--seeds", "1")
    assert answer.code == 0, answer.error
    rows = [one["training"] for one in answer.results()]
    found = {(row["optimizer"], row["arguments"]["learning_rate"], row["arguments"]["adam_beta1"]) for row in rows}
    assert found == {("SGD", 0.05, 0.9), ("AdamW", 0.01, 0.8), ("Mars", 0.02, 0.948683)}
    (of_mars,) = answer.results("mars_m*")
    assert "clip_threshold=None" in of_mars["order"]["arm"]["optim_args"]
    assert "no verdict**, because nobody searched the rates" in json.dumps(answer.numbers["verdicts"])


def test_interrupted_comparison_goes_on(tmp_path, capsys):
    """--max_runs stops it anywhere; a run that was half done begins again, and the result is that of one piece."""
    path = script(tmp_path, PLAIN)
    words = [*TWO, "--search_seeds", "42", "--seeds", "2"]
    whole = compare(capsys, path, *words, folder="whole")
    part = compare(capsys, path, *words, "--max_runs", "3")
    assert part.code == 0 and len(list(part.results())) == 3 and "the search has not ended" in part.page
    assert "No verdict yet: no arm has finished its new seeds." in part.page
    assert part.out.endswith("; runs are missing, and the same command goes on\n") and whole.out.endswith("whole\n")
    half = next(part.folder.glob("runs/*/*/result.json"))
    state = json.loads(half.read_text())
    half.write_text(json.dumps({**state, "state": "running", "training": {}}))
    (half.parent / "output").mkdir()
    (half.parent / "output" / "left").write_text("over")
    ended = compare(capsys, path, *words)
    assert "8 to 14 more runs of " in ended.out.splitlines()[1]  # two are done
    assert ended.code == 0 and not any(part.folder.rglob("left")) and " shown |" in ended.page
    values = [
        [(run["arm"], run["rate"], run["seed"], run["value"]) for run in one.numbers["runs"]] for one in (whole, ended)
    ]
    assert values[0] == values[1]


def test_full_disk_ends_in_one_line(tmp_path, capsys, monkeypatch):
    """For a run, whose result.json stays whole, and for the page; then the comparison goes on."""
    full = """
    if os.environ.get("FULL"):
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
    """
    path = script(tmp_path, full + PLAIN)
    monkeypatch.setenv("FULL", "1")
    answer = compare(capsys, path, *QUICK)
    assert answer.code == 2 and "adamw_torch, seed 1: " in answer.error.splitlines()[-1]
    assert next(answer.results())["state"] == "running"
    monkeypatch.delenv("FULL")

    def write_nothing(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(page.files, "write_text", write_nothing)
        answer = compare(capsys, path, *QUICK)
    assert answer.code == 2 and "No space left on device" in answer.error.splitlines()[-1]
    assert compare(capsys, path, *QUICK).code == 0


def test_arm_against_itself_and_one_that_hurts(tmp_path, capsys):
    """No difference is shown between names of one optimizer; one that does not move is shown to be worse."""
    text = f"""
    net, args = Net(), arguments()
    if args.optim == "sgd":
        net.inner[2].bias.data.fill_(1.0)
        args.warmup_steps = 10**6
    Trainer(net, args, {DATA}).train()
    """
    arms = ["--optim", "adamw_torch", "adamw_torch_fused", "sgd", "--search_seeds", "42", "--max_runs", "60"]
    answer = compare(capsys, script(tmp_path, text), *arms)
    same, worse = answer.numbers["verdicts"]
    assert same.startswith("**adamw_torch_fused: no difference shown**") and worse.startswith("**sgd HURTS**")
