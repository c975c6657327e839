"""What of a comparison is done, and what runs next: both follow from the results in its folder, from nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from mars_hf.compare import search
from mars_hf.compare.differences import FinishedRun
from mars_hf.compare.metric import TRAINING_LOSS, Metric, find_metric
from mars_hf.compare.order import Order
from mars_hf.compare.plan import Arm, Plan, Script, arguments_of_arm, rounded, words
from mars_hf.compare.runs import Run
from mars_hf.compare.search import Place
from mars_hf.compare.verdict import Findings, count


class State(NamedTuple):
    """What is known of an arm."""

    arm: Arm
    finished: dict[Place, dict[int, FinishedRun]]  # by seed
    wanted: list[tuple[Place, int]]  # places and seeds that its search lacks
    best: Place | None  # None while the search goes on, and if all diverged
    edge: str = ""  # why a better place may lie beyond

    @property
    def about(self) -> str:
        """Return what is special about its search; "" if nothing is."""
        if self.wanted:
            return "the search has not ended"
        if self.best is None:
            return "diverged at all rates"
        return self.edge and f"its best rate lies at an edge: {self.edge}"

    @property
    def final(self) -> dict[int, FinishedRun]:
        """Return the finished runs at the best place by seed."""
        return {} if self.best is None else self.finished.get(self.best, {})


@dataclass
class Comparison:
    """A comparison and its state."""

    plan: Plan
    template: Order  # of all runs: the script, its arguments, how it is started
    output: Path  # folder of the runs
    asked_metric: str | None = None  # None: the script's
    greater_is_better: bool = False

    # The first run tells what the script has: the baseline's at the script's own rate, or at the highest part of it
    # that does not diverge. Before that, there is no metric.
    first: Run = field(init=False)
    script: Script | None = field(default=None, init=False)
    metric: Metric | None = field(default=None, init=False)
    about: list[str] = field(default_factory=list, init=False)  # lines about them
    states: list[State] = field(default_factory=list, init=False)  # of the baseline; of all when its search has ended
    _start: float | None = field(default=None, init=False)  # the baseline's best rate, where the others start

    def __post_init__(self) -> None:
        """Look at the runs that are there."""
        self.refresh()

    def refresh(self) -> None:
        """Look at the runs anew; call it when one has ended.

        Raises:
            ValueError: the script has no such metric, or diverges at all rates.
        """
        if self.metric is None:
            self._follow_first_run()
        if self.metric is None:
            return
        base, *others = self.plan.arms
        self.states = [self._state(base, self.metric)]
        if not self.states[0].wanted:
            (power, *_), script = self.states[0].best or (0,), self.script
            first = base.first[0] if base.first or script is None else script.learning_rate
            self._start = first * 2.0**power
            self.states += [self._state(arm, self.metric) for arm in others]

    def _follow_first_run(self) -> None:
        base, seed = self.plan.baseline, (*self.plan.search_seeds, *self.plan.seeds)[0]
        for power in range(0, -search.FARTHEST - 1, -1):
            self.first = self.run(base, (power,) * len(self.plan.rates), seed)
            if not self.first.is_finished:
                return
            result, training = self.first.result, self.first.result["training"]
            self.script = self.script or Script.of_training(training, result.get("own_rate"))
            if result["state"] == "complete":
                self.metric, line = find_metric(training, self.asked_metric, self.greater_is_better)
                about = (
                    f"{training['trainer']} trains {training['trainable']:,} of {training['parameters']:,} parameters "
                    f"for {training['steps']} steps of {training['samples_per_step']} samples; {base.name} is "
                    f"{training['optimizer']}, and the script's own learning rate is {self.script.learning_rate:g}"
                )
                self.about = [line, about, *result["notes"]]
                return
            if not self.plan.search_seeds:
                raise ValueError(f"{base.name} diverges at its first rate, and without a search no other is tried")
        raise ValueError(f"{base.name} diverges at all rates down to {self.first.order.arm['learning_rate']:g}")

    def _state(self, arm: Arm, metric: Metric) -> State:
        plan, finished = self.plan, {}
        powers = range(-search.FARTHEST, search.FARTHEST + 1)
        for place in itertools.product(powers, repeat=len(plan.rates)):
            runs = [self.run(arm, place, seed) for seed in {*plan.search_seeds, *plan.seeds}]
            if by_seed := {run.seed: done for run in runs if (done := run.finished(metric)) is not None}:
                finished[place] = by_seed
        if not plan.search_seeds:
            return State(arm, finished, [], (0,) * len(plan.rates))
        values = {
            place: {seed: metric.sign * run.value for seed, run in by_seed.items()}
            for place, by_seed in finished.items()
        }
        wanted = search.wanted(values, plan.search_seeds, len(plan.rates))
        if plan.grid:
            places = [(power,) * len(plan.rates) for power in plan.grid]
            wanted = search.missing(values, places, plan.search_seeds)
        best = None if wanted else search.best(values, plan.search_seeds)
        return State(arm, finished, wanted, best, "" if best is None else search.edge(values, best, plan.grid))

    # --- what runs next -----------------------------------------------------------------------------------------------

    def missing(self) -> Iterator[Run]:
        """Yield the runs that can start now, the most useful first."""
        if self.metric is None:
            yield self.first
        for state in self.states:
            for place, seed in state.wanted:
                yield self.run(state.arm, place, seed)
        for seed, state in itertools.product(self.plan.seeds, self.states):
            if state.best is not None and seed not in state.final:
                yield self.run(state.arm, state.best, seed)

    def count_finished(self) -> int:
        """Return how many runs are there."""
        return sum(len(by_seed) for state in self.states for by_seed in state.finished.values())

    def run(self, arm: Arm, place: Place, seed: int) -> Run:
        """Return the run of an arm at a place with a seed."""
        start = None if arm is self.plan.baseline else self._start
        of_arm = arguments_of_arm(arm, self.plan, 2.0 ** place[0], self.script, start)
        own = math.nan if self.script is None else self.script.learning_rate
        rate = of_arm.get("learning_rate", own)
        others = [rounded(first * 2.0**power) for first, power in zip(arm.first[1:], place[1:], strict=False)]
        given = {word.partition("=")[0] for word in self.template.arguments}  # they override those of the plan
        flags = {name: value for name, value in self.plan.arguments.items() if f"--{name}" not in given}
        flags |= {**arm.arguments, **dict(zip(self.plan.rates[1:], others, strict=False))}
        flags |= self.plan.further if seed in self.plan.seeds else {}
        for name, value in flags.items():
            if isinstance(value, str):
                flags[name] = value.replace("{rate}", f"{rate:g}").replace("{twice}", f"{2 * rate:g}")
        name = "-".join([f"{rate:g}" if "learning_rate" in of_arm else "own", *map(str, others)])
        # Arms whose names differ in punctuation have folders of their own.
        folder = self.output / "runs" / quote(arm.name, safe="=,") / f"rate-{name}-seed-{seed}"
        order = replace(
            self.template,
            folder=str(folder),
            arguments=[*self.template.arguments, *words(flags)],
            shared={**self.plan.set, "seed": seed, "data_seed": seed},
            arm=of_arm,
            with_mars=arm.rule is not None,  # others keep transformers' Trainer
            evaluates=self.asked_metric != TRAINING_LOSS,
        )
        return Run(arm.name, seed, order)

    # --- for the page -------------------------------------------------------------------------------------------------

    def findings(self, has_speeds: bool) -> Findings:
        """Return what is known so far; speeds of runs that shared a device mean nothing."""
        assert self.metric is not None
        plan, (first, *others) = self.plan, (arm.name for arm in self.plan.arms)
        script, steps = Path(self.template.script).name, self.first.result["training"]["steps"]
        seeds = count(len(plan.seeds), "new seed")
        runs = [state.final[seed] for state in self.states for seed in plan.seeds if seed in state.final]
        searched = self.states if plan.search_seeds else []
        return Findings(
            title=f"{', '.join(others)} against {first} on {script}, {steps} steps, {seeds}",
            metric=self.metric,
            baseline=first,
            runs=runs if has_speeds else [run._replace(seconds_per_step=math.nan) for run in runs],
            search={state.arm.name: self._searched(state) for state in searched},
            best={state.arm.name: next(iter(state.final.values())).rate for state in searched if state.final},
            pairs=plan.pairs,
        )

    def _searched(self, state: State) -> dict[float, list[float]]:
        """Return the metric by rate and seed of the search, at the best of further rates that are searched."""
        found = {}
        for place, by_seed in state.finished.items():
            runs = [by_seed[seed] for seed in self.plan.search_seeds if seed in by_seed]
            if runs and (state.best is None or place[1:] == state.best[1:]):
                has_diverged = any(math.isnan(run.value) for run in by_seed.values())
                found[runs[0].rate] = [] if has_diverged else [run.value for run in runs]
        return found

    def remarks(self) -> list[str]:
        """Return what a reader of the results should know of the search, of missing runs and of the script."""
        plan, known = self.plan, {state.arm.name: state.about for state in self.states}
        abouts = {arm.name: known.get(arm.name, "the search has not ended") for arm in plan.arms}
        lines = [f"{name}: {about}." for name, about in abouts.items() if about]
        final = [self.run(state.arm, state.best, seed) for state in self.states if state.best for seed in state.final]
        final = [run for run in final if run.seed in plan.seeds]
        wanted = len(plan.seeds) * len(plan.arms)
        if len(final) < wanted:
            lines.append(f"{len(final)} of {wanted} runs with the seeds of the comparison are there.")
        seeds = ", ".join(map(str, plan.search_seeds))
        chosen = f"Rates were chosen with other seeds than those compared: {seeds}."
        lines.append(chosen if seeds else "Rates were not searched: a rule may look bad because its rate is.")
        notes = itertools.chain.from_iterable(run.result["notes"] for run in final)
        return list(dict.fromkeys([*self.about, *lines, *notes]))
