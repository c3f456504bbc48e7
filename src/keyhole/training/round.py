"""Synchronous rounds: Algorithm 2 with dropouts, over-selection, budgets and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from keyhole.delivery.cost import Cost
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import PLAIN_SUM_SEEN_BY, BlockSum
from keyhole.server.state import ServerState
from keyhole.server.updates import RowUpdate
from keyhole.training.aggregation.contract import Adding, Contribution, Summed, withheld
from keyhole.training.clients import Clients
from keyhole.training.cohort import Cohorts, sample_cohort
from keyhole.training.plan import Plan
from keyhole.training.private_sum import PrivateSum
from keyhole.training.record import RoundRecord
from keyhole.training.round_machine import Terms
from keyhole.training.visit import Executor, Visit, Visited, in_process, visit_clients
from keyhole.types import KeyArray

__all__ = [
    "Synchronous",
    "add_up",
    "check_budget",
    "record_round",
    "record_visits",
    "run_round",
    "terms_of",
]


def run_round(
    t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor = in_process
) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
    """Runs round t up to the server step, which it leaves to the caller.

    Args:
        t: the round, from 0.
        state: what the server holds; read only.
        clients: the population.
        plan: of the run.
        execute: where clients train; the result does not depend on it.

    Returns:
        The mean update, or None if nobody was left; and the record, whose `step` counts the step
        that the caller is about to make.
    """
    check_budget(t, state, plan)
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)
    visited = visit_clients(
        t, asked, state, clients, plan, execute, terms_of(plan.cohorts, asked), plan.is_in_clear
    )
    summed = add_up(t, visited.visits, state.layout, plan, visited.blocks)
    return summed.rows, record_round(t, state, plan, visited, summed)


def check_budget(t: int, state: ServerState, plan: Plan) -> None:
    """Raises BudgetError where round t would spend more privacy than there is."""
    account = plan.account(state.layout)
    if account is not None:
        account.check(t)


def terms_of(cohorts: Cohorts, asked: Sequence[int], seconds: float = inf) -> Terms:
    """When a round with these clients closes: all of them are waited for unless more were asked
    than the round needs."""
    goal = min(cohorts.size, len(asked)) if cohorts.over_selection > 1 else len(asked)
    return Terms(goal, cohorts.least, seconds)


def add_up(
    t: int,
    visits: Sequence[Visit],
    layout: Layout,
    plan: Plan,
    blocks: tuple[BlockSum, ...] | None = None,
) -> Summed:
    """Hands what clients brought to the plan's aggregation; too few make no sum."""
    sent = sum(visit.fate == "sent" for visit in visits)
    if sent < plan.cohorts.least:
        return withheld(sent, plan.cohorts.least, {})
    contributions = [Contribution(v.client, v.fate, v.keys, v.update) for v in visits]
    place = plan.seed, plan.trial, t
    aggregate = plan.aggregate
    if plan.privacy is not None:
        aggregate = PrivateSum(aggregate, plan.privacy, plan.cohorts)
    return aggregate(
        Adding(layout, contributions, plan.over, plan.keys_per_client, place, blocks=blocks)
    )


def record_round(
    t: int, state: ServerState, plan: Plan, visited: Visited, summed: Summed
) -> RoundRecord:
    """The record of a synchronous round whose sum is about to be applied, if there is one."""
    visits = [
        replace(
            visit,
            bytes_down=visit.bytes_down + summed.bytes_down.get(visit.client, 0),
            update_bytes=summed.bytes_up.get(visit.client, 0),
        )
        for visit in visited.visits
    ]
    has_step = summed.rows is not None
    added = sum(visit.fate == "sent" for visit in visits) if has_step else 0
    account, asked = plan.account(state.layout), tuple(visit.client for visit in visits)
    return RoundRecord(
        round=t,
        step=state.steps + has_step,
        staleness=[0] * added,
        closed=visited.closed,
        incidents=visited.incidents,
        **record_visits(visits, [visited.cost], summed),
        not_opened=summed.error,
        privacy={} if account is None else account.describe(t, asked, added),
    )


class Synchronous:
    """Synchronous rounds of a run: nothing is under way between them."""

    def next(
        self, t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Runs round t; see `run_round`."""
        return run_round(t, state, clients, plan, execute)

    def dump(self) -> bytes:
        """Nothing to store between rounds."""
        return b""

    def load(self, data: bytes, layout: Layout) -> None:
        """Nothing to restore."""


def _count_distinct(visits: Sequence[Visit]) -> int:
    """How many different keys reached a client, over all key spaces."""
    reached: dict[str, list[KeyArray]] = {}
    for visit in visits:
        if visit.fate != "lost_before":
            for name, z in visit.keys.items():
                reached.setdefault(name, []).append(z.array)
    return sum(len(np.unique(np.concatenate(arrays))) for arrays in reached.values())


def record_visits(
    visits: Sequence[Visit],
    costs: Sequence[Cost],
    summed: Summed | None = None,
) -> dict[str, Any]:
    """What visits, deliveries and a sum (None for a plain one) put into the record of a round."""

    def those(fate: str) -> list[int]:
        return [visit.client for visit in visits if visit.fate == fate]

    return {
        "clients": [visit.client for visit in visits],
        "lost_before": those("lost_before"),
        "lost_after": those("lost_after"),
        "late": those("late"),
        "refused": those("refused"),
        "bytes_down": [visit.bytes_down for visit in visits],
        "bytes_up": [visit.bytes_up + visit.update_bytes for visit in visits],
        "client_sizes": [visit.size for visit in visits],
        "select_calls": sum(cost.select_calls for cost in costs),
        "cache_hits": sum(cost.cache_hits for cost in costs),
        "distinct_keys": _count_distinct(visits),
        "unplaced_keys": sum(visit.unplaced_keys for visit in visits)
        + (0 if summed is None else summed.unplaced_keys),
        "seen_by": {p: str(learned) for p, learned in costs[-1].seen_by.items()} if costs else {},
        "seen_in_sum": dict(PLAIN_SUM_SEEN_BY if summed is None else summed.seen_by),
    }
