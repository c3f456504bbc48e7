"""Measures a model on devices, whose examples nobody else has: a round that trains nothing.

Devices fetch slices as they do to train, measure their sub-model on their own examples, and send a
few numbers in place of an update (`keyhole.wire.settings`), in the clear or in shares as updates
of the run go. Who may open the sum learns the means over the devices, weighted by their examples;
in the clear, each device's numbers as well.

It waits for devices, and then for their answers, as long as the run says that rounds wait, or a
minute: then those who are there measure, and where nobody is, the metrics are missing.

Promises of differential privacy do not cover what is measured: such runs are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import about_of
from keyhole.errors import InputError
from keyhole.logs import tell
from keyhole.rounds.clients import Clients
from keyhole.rounds.cohorts import CohortSpec
from keyhole.rounds.loop import Rounds, Run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.server.state import ServerState
from keyhole.service.directory import read_current
from keyhole.service.inbox import Asks, Waiting
from keyhole.service.served import Served
from keyhole.service.status import counted
from keyhole.wire.settings import HELD_OUT_SHARE, Evaluates

_MAX_EXAMPLES = 1024  # of a device that count, where the run bounds none
_PURPOSE = b"evaluation"
_SECONDS = 60.0  # that it waits where the run says nothing


@dataclass(frozen=True)
class DeviceEvaluation:
    """Measures the states of a run on devices.

    Args:
        served: what makes the run's rounds.
        clients: as the run knows them.
        parts: of the run.
        names: of the metrics.
        count: devices that measure a state.
        seconds: that it waits for devices, and then for their answers.
    """

    served: Served
    clients: Clients
    parts: RunParts
    names: Sequence[str]
    count: int
    seconds: float = _SECONDS

    def __post_init__(self) -> None:
        if self.parts.privacy is not None or not self.names or self.served.lobby is None:
            raise InputError(
                f"devices cannot measure this run: got {len(self.names)} metrics"
                f"{', and privacy' * (self.parts.privacy is not None)}; expected metrics of a "
                "kh.Task, devices that check in, and no promise that what is measured would break; "
                "leave --evaluators out, or name metrics in the task"
            )

    def __call__(self, state: ServerState) -> Mapping[str, float]:
        """Returns the mean of each metric over the devices of a cohort of its own, weighted by
        examples, and the share of these that devices hold out; none where nobody could tell."""
        served, lobby = self.served, self.served.lobby
        current = read_current(served.publisher.directory)
        assert lobby is not None
        assert current is not None  # a round has been made
        t, parts = served.numbering.round_of(current.round), self._parts()
        cohorts = parts.cohorts
        seconds, needed = self.seconds, cohorts.needed
        until = served.clock() + seconds

        def show(here: int) -> None:
            left = max(0.0, until - served.clock())
            served.on_arrival(
                Waiting(t, here, needed, [], seconds=left, is_drawn=False, measures=True)
            )

        at_least = max(1, about_of(parts.aggregate).min_clients or 0)
        names = lobby.evaluators(t, cohorts, parts.draws, show, seconds=seconds, at_least=at_least)
        if not names:
            few = f"fewer than {at_least} devices" if at_least > 1 else "no device"
            return _missing(t, f"{few} came in {seconds:,.0f} s")
        if len(names) < needed:
            text = f"round {t}: {len(names)} of {counted(needed, 'device')} measure the model: no "
            text += f"more came in {seconds:,.0f} s"
            tell("trainer", "evaluation short", text, "warning", round=t, goal=needed)
        bound = self.parts.max_weight
        told_of = [*self.names, HELD_OUT_SHARE]
        asked = Evaluates(told_of, int(bound) if bound < inf else _MAX_EXAMPLES)
        told = {**served.settings(t, parts, self.clients.users), **asked.settings()}
        sums = replace(parts, keys_per_client={}, norms=None)
        asks = Asks(asked.layout, sums, told, _PURPOSE, self.clients.frozen_state, seconds)
        gathered, _ = served.carry_out(t, state, names, asks)
        rows = gathered.summed.rows
        found = {} if rows is None else asked.means(rows[0].rows[0])
        if not found.keys() & set(self.names):
            return _missing(t, f"none of {counted(len(names), 'device')} could tell")
        return found

    def _parts(self) -> RunParts:
        """How numbers are added up: as updates are, but for what holds of updates alone."""
        parts = self.served.drawing(self.parts)
        usual, is_clear = aggregation_names()[0], about_of(parts.aggregate).is_in_clear
        return replace(
            parts,
            cohorts=Cohorts(UNCOUNTED, self.count, "check-in"),
            over="nothing",
            max_weight=inf,
            max_update_norm=inf,
            aggregate=aggregation_named(usual) if is_clear else parts.aggregate,
        )


def _missing(t: int, why: str) -> Mapping[str, float]:
    """No metrics, and a warning of that."""
    text = f"round {t}: the model is not measured and its metrics are missing: {why}"
    tell("trainer", "evaluation empty", text, "warning", round=t)
    return {}


def evaluation_by(
    kind: Rounds | None, run: Run, names: Sequence[str], cohort: CohortSpec
) -> DeviceEvaluation:
    """Returns what measures the states of a run on devices, which check in for its rounds."""
    assert isinstance(kind, Served)  # check-in sampling, which no other rounds have
    seconds = cohort.seconds or _SECONDS
    return DeviceEvaluation(kind, run.clients, run.parts, names, cohort.evaluators, seconds)
