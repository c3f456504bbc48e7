"""What has happened in an asynchronous round that is under way, and the step that comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from keyhole import tree
from keyhole.delivery.cost import Cost
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import Over, sum_updates
from keyhole.server.updates import RowUpdate
from keyhole.training.buffering import Buffering
from keyhole.training.record import RoundRecord
from keyhole.training.round import record_visits
from keyhole.training.stream_machine import CountIn, LeaveOut, WhyStep
from keyhole.training.visit import Visit
from keyhole.types import Tree

__all__ = ["Tally"]


@dataclass
class Tally:
    """Clients that have ended, in their order, and which of their updates count."""

    ended: list[Visit] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    _stale: list[int] = field(default_factory=list)
    _added: list[tuple[Visit, int]] = field(default_factory=list)

    def busy(self, at_work: Iterable[int]) -> set[int]:
        """Who cannot start in this round: those at work, and those who had their part in it."""
        return {*at_work, *(visit.client for visit in self.ended)}

    def end(self, visit: Visit, command: CountIn | LeaveOut) -> None:
        """A client has ended, and its update counts or does not."""
        self.ended.append(visit)
        if isinstance(command, CountIn):
            self._added.append((visit, command.staleness))
        elif command.is_stale:
            self._stale.append(visit.client)

    def close(
        self, t: int, step: int, why: WhyStep, layout: Layout, buffering: Buffering, over: Over
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """The sum, each update weighed by its age, or None where the goal was not reached; and the
        record.

        Args:
            t: the round.
            step: how many steps the server has made.
            why: the round closed.
            layout: of the model.
            buffering: how the rounds go.
            over: what sums are divided by.
        """
        is_step = why == "goal"
        record = RoundRecord(
            round=t,
            step=step + is_step,
            closed=why,
            stale=self._stale,
            staleness=[age for _, age in self._added] if is_step else [],
            incidents=self.incidents,
            **record_visits(self.ended, self.costs),
        )
        if not is_step:
            return None, record
        updates = [_scale(visit.update, buffering.weight(age)) for visit, age in self._added]
        keys = [visit.keys for visit, _ in self._added]
        return sum_updates(layout, updates, keys, over), record


def _scale(update: Tree, weight: float) -> Tree:
    if weight == 1:
        return update
    return tree.map_leaves(lambda leaf: leaf * np.asarray(weight, leaf.dtype), update)
