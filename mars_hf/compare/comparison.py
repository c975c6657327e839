"""What of a comparison is done, and what runs next: both follow from the results in its folder, from nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mars_hf.compare import runs, search
from mars_hf.compare.differences import FinishedRun
from mars_hf.compare.metric import TRAINING_LOSS, Metric, find_metric
from mars_hf.compare.order import Order
from mars_hf.compare.plan import Arm, Plan, Script, arguments_of_arm, words
from mars_hf.compare.runs import Run
from mars_hf.compare.search import Place


@dataclass
class Comparison:
    """A comparison and its state.

    Args:
        plan: arms and seeds.
        template: order of all runs: the script, its arguments, how it is started.
        output: folder of the runs.
        asked_metric: name of a metric; None: the script's.
        greater_is_better: of it.
    """

    plan: Plan
    template: Order
    output: Path
    asked_metric: str | None = None
    greater_is_better: bool = False
    script: Script | None = None  # after the first run
    metric: Metric | None = None  # after the first run that did not diverge
    about: list[str] = field(default_factory=list)  # lines about them
    _results: dict[str, dict[Place, dict[int, float]]] = field(default_factory=dict)  # of arms, since the last run

    def __post_init__(self) -> None:
        """Look at the runs that are there."""
        self.refresh()

    # --- the first run ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the runs anew; call it when one has ended.

        Settings are those of the first run, and the metric is that of the first which did not diverge.

        Raises:
            ValueError: the script has no such metric, or diverges at all rates.
        """
        self._results = {}
        while self.metric is None:
            run = self.first_run()
            if not run.is_finished:
                return
            training = run.result["training"]
            self.script = self.script or Script.of_training(training)
            if run.result["state"] == "complete":
                self.metric, line = find_metric(training, self.asked_metric, self.greater_is_better)
                self.about = [line, self._about_training(training, self.script), *run.result["notes"]]
            elif not self.searches:
                raise ValueError(f"{run.arm.name} diverges at its first rate, and without a search no other is tried")

    def first_run(self) -> Run:
        """Return the baseline's run at the script's own rate, or at the highest part of it that does not diverge."""
        for power in range(0, -search.FARTHEST - 1, -1):
            run = self.run(self.plan.baseline, (power,) * len(self.plan.rates), self._search_seeds[0])
            if run.result.get("state") != "diverged" or self.script is None:
                return run
        raise ValueError(f"{self.plan.baseline.name} diverges at all rates down to {run.rate:g}")

    def _about_training(self, training: Mapping[str, Any], script: Script) -> str:
        return (
            f"{training['trainer']} trains {training['trainable']:,} of {training['parameters']:,} parameters for "
            f"{training['steps']} steps of {training['samples_per_step']} samples; {self.plan.baseline.name} is "
            f"{training['optimizer']}, and the script's own learning rate is {script.learning_rate:g}"
        )

    # --- what runs next -----------------------------------------------------------------------------------------------

    def missing(self) -> Iterator[Run]:
        """Yield the runs that can start now, the most useful first."""
        if self.metric is None:
            yield self.first_run()
            return
        arms = [arm for arm in self.plan.arms if self.has_begun(arm)]
        for arm in arms:
            for place, seed in self._wanted(arm):
                yield self.run(arm, place, seed)
        for seed, arm in itertools.product(self.plan.seeds, arms):
            run = self.final_run(arm, seed)
            if run is not None and not run.is_finished:
                yield run

    @property
    def searches(self) -> bool:
        """Return whether rates are searched."""
        return bool(self.plan.search_seeds)

    @property
    def _search_seeds(self) -> tuple[int, ...]:
        return tuple(self.plan.search_seeds or self.plan.seeds[:1])

    def has_begun(self, arm: Arm) -> bool:
        """Return whether an arm has where to start: the others start at the baseline's best."""
        return arm is self.plan.baseline or self.is_searched(self.plan.baseline)

    def is_searched(self, arm: Arm) -> bool:
        """Return whether an arm's best rate is known."""
        return not self._wanted(arm)

    def _wanted(self, arm: Arm) -> list[tuple[Place, int]]:
        plan = self.plan
        if plan.grid:
            places = [(power,) * len(plan.rates) for power in plan.grid]
            return search.missing(self.results(arm), places, plan.search_seeds)
        return search.wanted(self.results(arm), plan.search_seeds, len(plan.rates)) if self.searches else []

    def results(self, arm: Arm) -> dict[Place, dict[int, float]]:
        """Return the metric of an arm's finished runs by place and seed, lower is better; NaN if one diverged."""
        assert self.metric is not None
        if arm.name not in self._results:
            found: dict[Place, dict[int, float]] = {}
            powers = range(-search.FARTHEST, search.FARTHEST + 1)
            places = itertools.product(powers, repeat=len(self.plan.rates))
            for place, seed in itertools.product(places, {*self._search_seeds, *self.plan.seeds}):
                run = self.run(arm, place, seed)
                if run.is_finished:
                    found.setdefault(place, {})[seed] = self.metric.sign * run.finished(self.metric).value
            self._results[arm.name] = found
        return self._results[arm.name]

    def count_finished(self) -> int:
        """Return how many runs are there."""
        arms = self.plan.arms if self.metric is not None else []
        return sum(len(by_seed) for arm in arms for by_seed in self.results(arm).values())

    def best(self, arm: Arm) -> Place | None:
        """Return the best place of an arm so far; None if all diverged."""
        first = (0,) * len(self.plan.rates)
        return search.best(self.results(arm), self._search_seeds) if self.searches else first

    def final_run(self, arm: Arm, seed: int) -> Run | None:
        """Return the run of an arm at its best rate with a seed of the comparison; None where the search goes on."""
        best = self.best(arm) if self.is_searched(arm) else None
        return None if best is None else self.run(arm, best, seed)

    # --- a run --------------------------------------------------------------------------------------------------------

    def run(self, arm: Arm, place: Place, seed: int) -> Run:
        """Return the run of an arm at a place with a seed."""
        best = None if arm is self.plan.baseline else self._best_rate_of_baseline()
        of_arm = arguments_of_arm(arm, self.plan, 2.0 ** place[0], self.script, best)
        known = math.nan if self.script is None else self.script.learning_rate
        rate = of_arm.get("learning_rate", known)
        others = [search.rounded(first * 2.0**power) for first, power in zip(arm.first[1:], place[1:], strict=False)]
        name = "-".join([f"{of_arm['learning_rate']:g}" if "learning_rate" in of_arm else "own", *map(str, others)])
        order = replace(
            self.template,
            folder=str(self.output / "runs" / runs.folder_name(arm.name) / f"rate-{name}-seed-{seed}"),
            arguments=[*self.template.arguments, *words(self._flags(arm, rate, others, seed))],
            shared={**self.plan.set, "seed": seed, "data_seed": seed},
            arm=of_arm,
            with_mars=arm.rule is not None,  # others keep transformers' Trainer
            is_searched=self.searches,
            evaluates=self.asked_metric != TRAINING_LOSS,
        )
        return Run(arm, rate, seed, order)

    def _flags(self, arm: Arm, rate: float, others: list[float], seed: int) -> Mapping[str, Any]:
        """Return the arm's own flags of the script's command line."""
        parts = {"rate": f"{rate:g}", "twice": f"{2 * rate:g}", "eighth": f"{rate / 8:g}"}
        flags = {**self.plan.arguments, **arm.arguments, **dict(zip(self.plan.rates[1:], others, strict=False))}
        flags |= self.plan.further if seed in self.plan.seeds else {}
        return {name: value.format(**parts) if isinstance(value, str) else value for name, value in flags.items()}

    def _best_rate_of_baseline(self) -> float | None:
        """Return the rate at which the others start, not rounded; None before the first run."""
        if self.script is None or self.metric is None:
            return None
        base = self.plan.baseline
        place = self.best(base) or (0,)
        return (base.first[0] if base.first else self.script.learning_rate) * 2.0 ** place[0]

    # --- for the page -------------------------------------------------------------------------------------------------

    def searched(self, arm: Arm) -> dict[float, list[float]]:
        """Return the metric by rate and seed of the search; empty lists where a run diverged."""
        if not self.searches or not self.has_begun(arm):
            return {}
        assert self.metric is not None
        found = {}
        for place, by_seed in sorted(self.results(arm).items()):
            values = [self.metric.sign * by_seed[seed] for seed in self._search_seeds if seed in by_seed]
            has_diverged = not all(map(math.isfinite, by_seed.values()))
            found[self.run(arm, place, self._search_seeds[0]).rate] = [] if has_diverged else values
        return found

    def best_runs(self) -> dict[str, Run]:
        """Return a run at the best rate of each arm whose search has ended."""
        arms = [arm for arm in self.plan.arms if self.has_begun(arm)]
        return {arm.name: run for arm in arms if (run := self.final_run(arm, self.plan.seeds[0])) is not None}

    def final_runs(self) -> list[Run]:
        """Return the finished runs with the seeds of the comparison that the baseline has, too."""
        arms = [arm for arm in self.plan.arms if self.has_begun(arm)]
        found = [self.final_run(arm, seed) for arm, seed in itertools.product(arms, self.plan.seeds)]
        finished = [run for run in found if run is not None and run.is_finished]
        seeds = {run.seed for run in finished if run.arm is self.plan.baseline}
        return [run for run in finished if run.seed in seeds]

    def compared(self) -> list[FinishedRun]:
        """Return the results of `final_runs`."""
        assert self.metric is not None
        return [run.finished(self.metric) for run in self.final_runs()]

    def remarks(self) -> list[str]:
        """Return what a reader of the results should know of the search, of missing runs and of the script."""
        lines = [line for arm in self.plan.arms if (line := self._about_search(arm))]
        final = self.final_runs()
        wanted = len(self.plan.seeds) * len(self.plan.arms)
        if len(final) < wanted:
            lines.append(f"{len(final)} of {wanted} runs with the seeds of the comparison are there.")
        seeds = ", ".join(map(str, self._search_seeds))
        chosen = f"Rates were chosen with seeds {seeds}, others than those compared."
        lines.append(chosen if self.searches else "Rates were not searched: a rule may look bad because its rate is.")
        notes = itertools.chain.from_iterable(run.result["notes"] for run in final)
        return list(dict.fromkeys([*self.about, *lines, *notes]))

    def _about_search(self, arm: Arm) -> str:
        """Return what is special about the search of an arm; "" if nothing is."""
        if not self.has_begun(arm) or not self.is_searched(arm):
            return f"{arm.name}: the search has not ended."
        best = self.best(arm)
        if best is None:
            return f"{arm.name}: diverged at all rates."
        why = search.edge(self.results(arm), best, self.plan.grid) if self.searches else ""
        return why and f"{arm.name}: its best rate lies at an edge: {why}."
