"""Rounds over the service: published for devices, closed by the coordinator, added up as ever.

Everything that counts is in files: the published round, and each update before it is acknowledged.
A server or a trainer that is killed goes on with the same round. Where all devices answer, the
bytes of the model are those of a run in process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from keyhole.delivery.demand import Demand
from keyhole.delivery.records import PLAIN, Coding
from keyhole.delivery.ways import pregenerated_cost
from keyhole.errors import KeyholeError
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import sum_updates
from keyhole.server.state import ServerState
from keyhole.server.updates import RowUpdate, usable
from keyhole.serving.coordinator import Terms, gather, opened
from keyhole.serving.files.publishing import Publisher
from keyhole.serving.files.update_spool import UpdateSpool
from keyhole.serving.wire import decode_update
from keyhole.training.clients import Clients
from keyhole.training.cohort import sample_cohort
from keyhole.training.fate import Fate
from keyhole.training.plan import Plan
from keyhole.training.record import RoundRecord
from keyhole.training.round import record_visits
from keyhole.training.visit import Executor, Visit, visit_of

__all__ = ["Served", "device_name"]


def device_name(client: int) -> str:
    """What client number n of the population is called at the service.

    >>> device_name(7)
    'device-7'
    """
    return f"device-{client}"


@dataclass
class Served:
    """Rounds of a run whose clients are devices of the slice service.

    Args:
        publisher: of the directory that the service serves.
        spool: where the service puts updates.
        seconds: after which a round closes with the updates that are there.
        coding: of slices.
        poll: seconds between two looks at the spool.
        stop: once set, waiting ends with KeyboardInterrupt; the round goes on when the run does.
        on_arrival: called with the number of updates that are there, and that are waited for.
        clock: monotonic seconds.
    """

    publisher: Publisher
    spool: UpdateSpool
    seconds: float = inf
    coding: Coding = PLAIN
    poll: float = 0.05
    stop: threading.Event = field(default_factory=threading.Event)
    on_arrival: Callable[[int, int], None] = lambda here, goal: None
    clock: Callable[[], float] = time.monotonic

    def next(
        self, t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Publishes round t, waits for its devices, and adds up what they sent.

        Args:
            t: the round.
            state: what the server holds; read only.
            clients: the population; only its size counts, devices bring their own data.
            plan: of the run. How many drop out is up to the devices.
            execute: not used: devices train.

        Returns:
            As `run_round` does.
        """
        asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)
        published = self.publisher.publish_state(
            state,
            number=t,
            coding=self.coding,
            cohort=[device_name(client) for client in asked],
            settings=_settings(t, plan),
        )
        self.spool.begin(published.id)
        for older in self.spool.rounds():
            if older != published.id:  # its sum is in the state by now
                self.spool.remove(older)
        seen = self._wait(published.id, min(plan.cohorts.size, len(asked)))
        self.publisher.close_round()
        here = self.spool.close(published.id)
        in_order = [*seen, *sorted(set(here) - set(seen))]
        late = set(in_order[plan.cohorts.size :])
        visits = self._visits(published.id, asked, set(here), late, state.layout)
        return _summed(t, visits, state, plan, self.coding)

    def dump(self) -> bytes:
        """Nothing to store between rounds: what is under way is in files."""
        return b""

    def load(self, data: bytes, layout: Layout) -> None:
        """Nothing to restore."""

    def _wait(self, round_id: str, goal: int) -> tuple[str, ...]:
        """Looks at the spool until the round closes; returns devices in the order they were seen.

        A round that was closed before the run was killed takes no more updates.
        """
        terms, state = Terms(max(goal, 1), self.seconds), opened(self.clock())
        while goal and not self.spool.is_closed(round_id):
            state = gather(state, terms, self.spool.devices(round_id), self.clock())
            self.on_arrival(len(state.arrived), goal)
            if state.closed is not None:
                break
            if self.stop.wait(self.poll):
                raise KeyboardInterrupt
        return state.arrived

    def _visits(
        self, round_id: str, asked: Sequence[int], here: set[str], late: set[str], layout: Layout
    ) -> list[Visit]:
        """What became of each device that was asked, in order."""
        visits = []
        for client in asked:
            name = device_name(client)
            if name not in here:
                visits.append(Visit(client, "lost_before", {}, None, 0, 0, 0))
                continue
            fate: Fate = "late" if name in late else "sent"
            body = self.spool.read(round_id, name)
            try:
                update, keys = decode_update(body, layout, most_keys=2**32)
                update = usable(update)
            except KeyholeError:  # the service had checked it: a file was changed since
                visits.append(Visit(client, "refused", {}, None, 0, 0, 0))
                continue
            fate = "refused" if update is None else fate
            cost = pregenerated_cost(layout, {client: keys}, self.coding)
            visits.append(visit_of(client, fate, keys, update, layout, cost))
        return visits


def _settings(t: int, plan: Plan) -> dict[str, object]:
    """What devices are told, so that they choose and train as clients in process do."""
    return {
        "round": t,
        "seed": plan.seed,
        "trial": plan.trial,
        "keys_per_client": dict(plan.keys_per_client),
        "shared_keys": plan.shared_keys,
    }


def _summed(
    t: int, visits: Sequence[Visit], state: ServerState, plan: Plan, coding: Coding
) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
    """The mean update and the record, as `run_round` makes them."""
    sent = [visit for visit in visits if visit.fate == "sent"]
    demand: Demand = {visit.client: visit.keys for visit in visits if visit.keys}
    cost = pregenerated_cost(state.layout, demand, coding)
    record = RoundRecord(
        round=t,
        step=state.steps + bool(sent),
        staleness=[0] * len(sent),
        **record_visits(visits, [cost]),
    )
    if not sent:
        return None, record
    updates, keys = [visit.update for visit in sent], [visit.keys for visit in sent]
    return sum_updates(state.layout, updates, keys, plan.over), record
