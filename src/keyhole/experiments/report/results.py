"""Holds the results of sweeps and of runs, with means, intervals and differences over trials.

A sweep is a figure or table of the paper; a line is one arm of it (one setting); a trial is one run
of an arm. An arm may be a line of several sweeps. Runs of `keyhole train` that no sweep names are
grouped by task, each a line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from keyhole.experiments.statistics import ArmTrials, Difference, Spread, differences, spread_of
from keyhole.rounds.fields import flatten
from keyhole.rounds.spec import RunSpec

Kind: TypeAlias = Literal[
    "curves", "final", "frontier", "bytes", "epsilon", "reached", "share", "grid"
]
FIGURES: tuple[Kind, ...] = get_args(Kind)
"""The kinds of figure that a sweep may ask for."""
INCOMPLETE = "* some trials are missing or unfinished: see the table"
INTERVALS = "shades and bars: 95 % interval of the mean over trials"
OVERVIEW = "overview"
"""The kind of figure that shows runs which no sweep names."""


@dataclass(frozen=True)
class Curve:
    """A number over rounds and trials.

    Args:
        rounds: how many rounds were done, ascending.
        spreads: the number after each of them; every one is over the same trials.
    """

    rounds: tuple[int, ...] = ()
    spreads: tuple[Spread, ...] = ()

    @property
    def mean(self) -> tuple[float, ...]:
        """The means, one for each of `rounds`."""
        return tuple(spread.mean for spread in self.spreads)


def mean_curve(trials: Sequence[Mapping[int, float]]) -> Curve:
    """Returns the curve over the rounds that every trial (rounds done -> value) has a value for.

    >>> mean_curve([{1: 0.0, 2: 0.2}, {1: 1.0}])
    Curve(rounds=(1,), spreads=(Spread(mean=0.5, deviation=0.7071067811865476, trials=2),))
    """
    if not trials:
        return Curve()
    rounds = tuple(sorted(set(trials[0]).intersection(*trials[1:])))
    spreads = (spread_of([trial[done] for trial in trials]) for done in rounds)
    return Curve(rounds, tuple(spread for spread in spreads if spread is not None))


def broadcast_bytes(numbers: int) -> int:
    """Returns what a client would receive and send in a round of a model of `numbers` numbers: all
    of it as float32, twice.

    >>> broadcast_bytes(1_000)
    8000
    """
    return 2 * 4 * numbers


@dataclass(frozen=True)
class Costs:
    """What a run took from its clients, and who learned what.

    Args:
        bytes_down: what a client received in a round, on average over clients and rounds.
        bytes_up: what it sent.
        epsilon: that the run has spent, infinite without a bound; None without privacy.
        seen_by: party -> what it learned of keys while slices were delivered.
        seen_in_sum: party -> what it learned while updates were added up.
    """

    bytes_down: float
    bytes_up: float
    epsilon: float | None
    seen_by: Mapping[str, str] = field(hash=False)
    seen_in_sum: Mapping[str, str] = field(hash=False)

    @property
    def kilobytes(self) -> float:
        """Of a client in a round, both directions."""
        return (self.bytes_down + self.bytes_up) / 1000


@dataclass(frozen=True)
class TrialResult:
    """The end of a finished trial: rounds that were run, wall time, metrics on the test data; and
    which model was best and why it ended early, as one line that may be empty."""

    rounds: int
    seconds: float
    metrics: Mapping[str, float]
    told: str = ""


@dataclass(frozen=True)
class Trial:
    """One run of an arm.

    Args:
        run: `run.json`, which holds it beside versions and facts about data.
        relative_size: numbers in the largest sub-model over numbers in the server's model.
        broadcast_bytes: what a client would receive and send in a round of the whole model.
        split: on which the run was evaluated while it trained, or what of their examples devices
            measured it with; empty if it does not say.
        curves: metric -> rounds done -> value on that split.
        costs: None before the first round.
        result: None while the trial is unfinished.
    """

    number: int
    spec: RunSpec
    run: Mapping[str, Any]
    rounds_done: int
    relative_size: float
    broadcast_bytes: int
    split: str
    curves: Mapping[str, Mapping[int, float]]
    costs: Costs | None
    result: TrialResult | None

    @property
    def tested_on(self) -> str:
        """What its result was measured on."""
        return self.split if self.spec.cohort.evaluators else "test"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Rates, cohort, batch and rounds, by their names in the record."""
        told = self.spec.describe()
        parts = {name: told[name] for name in ("evaluate_every", "cohort", "client", "server")}
        # A run may have gone on for more rounds than it was set up with.
        return {"rounds": self.rounds, **flatten(parts)}

    @property
    def rounds_planned(self) -> int:
        """How many it runs in all; those that it made, where it ended early."""
        if self.result is not None and self.result.rounds < self.spec.rounds:
            return self.result.rounds
        return max(self.spec.rounds, self.rounds_done)

    @property
    def rounds(self) -> int:
        """How many it ran, or will run."""
        return self.result.rounds if self.result is not None else self.rounds_planned

    @property
    def start(self) -> str | None:
        """What its model started from, None for a new one."""
        found = self.run.get("titles", {}).get("start")
        return None if found is None else str(found)

    def title(self, part: Literal["delivery", "aggregation"]) -> str:
        """What the run's delivery or aggregation calls itself."""
        titles = self.run.get("titles", {})
        usual = {"delivery": self.spec.delivery, "aggregation": self.spec.aggregation.name}
        return str(titles.get(part) or usual[part] or "")


@dataclass(frozen=True, eq=False)
class Series:
    """One arm of a sweep, or one run.

    Args:
        panel: which part of the figure it belongs to.
        x: where it stands on the figure's x axis, if it has one.
        trials: that were begun, by number.
    """

    panel: str
    label: str
    x: float | None
    arm: str
    metric: str
    trials: tuple[Trial, ...] = ()

    @property
    def finished(self) -> tuple[Trial, ...]:
        """The trials that have a result."""
        return tuple(trial for trial in self.trials if trial.result is not None)

    @property
    def unfinished(self) -> tuple[Trial, ...]:
        """The trials that were begun and have none."""
        return tuple(trial for trial in self.trials if trial.result is None)

    @cached_property
    def curve(self) -> Curve:
        """The metric over rounds: of the finished trials, or of all while none is finished."""
        return self.curve_of(self.metric)

    def curve_of(self, metric: str) -> Curve:
        """Returns the same for any metric."""
        used = self.finished or self.trials
        return mean_curve([trial.curves.get(metric, {}) for trial in used])

    @property
    def results(self) -> list[TrialResult]:
        """Those of the finished trials."""
        return [trial.result for trial in self.trials if trial.result is not None]

    @cached_property
    def test(self) -> Spread | None:
        """The test metric of the finished trials."""
        return self.test_of(self.metric)

    def test_of(self, metric: str) -> Spread | None:
        """Returns the same for any metric, over the finished trials that have it."""
        return spread_of([r.metrics[metric] for r in self.results if metric in r.metrics])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics on the test split that some trial has, the main one first."""
        known = {name for result in self.results for name in result.metrics}
        return tuple(sorted(known, key=lambda name: (name != self.metric, name)))

    @property
    def arm_trials(self) -> ArmTrials:
        """The finished trials, as differences are taken between arms."""
        met = {str((trial.spec.seed, trial.run.get("dataset"))) for trial in self.trials}
        found = {t.number: t.result.metrics for t in self.trials if t.result is not None}
        return ArmTrials(met, found)

    @property
    def last(self) -> Spread | None:
        """The last point of the curve."""
        return self.curve.spreads[-1] if self.curve.spreads else None

    @property
    def relative_size(self) -> float | None:
        """Of the largest sub-model of any trial; None before the first."""
        return max((trial.relative_size for trial in self.trials), default=None)

    @property
    def costs(self) -> Costs | None:
        """Of the first trial that has made a round: trials of an arm cost nearly the same."""
        return next((trial.costs for trial in self.trials if trial.costs is not None), None)

    @property
    def differing(self) -> tuple[str, ...]:
        """The settings in which the trials are not alike, which makes their mean doubtful."""
        names = dict.fromkeys(name for trial in self.trials for name in trial.settings)
        kinds = {name: {repr(trial.settings.get(name)) for trial in self.trials} for name in names}
        return tuple(name for name, values in kinds.items() if len(values) > 1)

    @property
    def minutes(self) -> float | None:
        """Per finished trial, on average."""
        times = [result.seconds for result in self.results]
        return sum(times) / len(times) / 60 if times else None


@dataclass(frozen=True)
class SweepResults:
    """A figure or table of the paper, as we ran it, or the runs of a task that no sweep names.

    Args:
        scale: small or paper; empty for runs.
        figures: kinds out of `FIGURES`, or `OVERVIEW`.
        trials: of each line: the number that was asked for, if it is known, or the largest seen.
    """

    name: str
    title: str
    scale: str
    data: str
    metric: str
    figures: tuple[str, ...]
    x_label: str
    lines: tuple[Series, ...] = field(repr=False)
    trials: int

    @cached_property
    def panels(self) -> Mapping[str, tuple[Series, ...]]:
        """Panel -> its lines, in the order in which they first appear."""
        names = dict.fromkeys(line.panel for line in self.lines)
        panels = {name: tuple(line for line in self.lines if line.panel == name) for name in names}
        return MappingProxyType(panels)

    def reference(self, panel: str) -> Series | None:
        """Returns the line that the others of a panel are measured against: of those with a
        result, the first whose clients hold the largest model. A grid of rates has none."""
        lines = [line for line in self.panels[panel] if line.finished]
        if not lines or self.figures == ("grid",):
            return None
        return max(lines, key=lambda line: line.relative_size or 0.0)

    def differences(self, line: Series) -> dict[str, Difference]:
        """Returns metric -> what a line has more than the reference of its panel, trial by trial;
        nothing of that line itself."""
        first = self.reference(line.panel)
        if first is None or first is line:
            return {}
        return differences(first.arm_trials, line.arm_trials)

    def share_left(self, line: Series) -> Spread | None:
        """Returns the test metric of a line over the mean of its panel's reference."""
        first = self.reference(line.panel)
        if first is None or first.test is None or line.test is None or not first.test.mean:
            return None
        return line.test.over(first.test.mean)

    @property
    def is_sweep(self) -> bool:
        """Whether a sweep asked for the lines, rather than `keyhole train` one by one."""
        return OVERVIEW not in self.figures

    @property
    def split(self) -> str:
        """On which the curves were measured; empty if the runs do not say or do not agree."""
        splits = {trial.split for line in self.lines for trial in line.trials}
        return splits.pop() if len(splits) == 1 else ""

    @property
    def tested_on(self) -> str:
        """On which results were measured; empty if the runs do not agree."""
        splits = {trial.tested_on for line in self.lines for trial in line.trials}
        return "test" if not splits else splits.pop() if len(splits) == 1 else ""

    def is_complete(self, line: Series) -> bool:
        """Whether every trial of a line is there and finished."""
        asked = self.trials if self.is_sweep else 1
        return len(line.finished) >= max(1, asked) and not line.unfinished

    def starred(self, name: str, *lines: Series) -> str:
        """Returns the name of these lines, with a star if one of them is not complete."""
        return name if all(map(self.is_complete, lines)) else f"{name} *"

    @property
    def star_note(self) -> str:
        """What a star means, where there is one."""
        return "" if all(map(self.is_complete, self.lines)) else INCOMPLETE

    @property
    def note(self) -> str:
        """What bands, bars and stars mean, where there are any."""
        has_interval = any(len(line.finished or line.trials) > 1 for line in self.lines)
        return join_notes(INTERVALS if has_interval else "", self.star_note)


def join_notes(*notes: str) -> str:
    """Returns notes on a figure, one below the other; empty ones are left out."""
    return "\n".join(note for note in notes if note)
