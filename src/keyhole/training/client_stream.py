"""The stream of clients that asynchronous rounds start: cohort after cohort, without end."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from keyhole.training.cohort import sample_cohort
from keyhole.training.plan import Plan

__all__ = ["ClientStream"]


@dataclass
class ClientStream:
    """Who starts next; a function of the plan and of who could not start.

    Args:
        plan: of the run.
        drawn: how many of the stream have been drawn before.
    """

    plan: Plan
    drawn: int = 0

    def take(self, count: int, busy: AbstractSet[int]) -> list[int]:
        """Returns the next clients that can start; fewer than `count` if no more are left.

        Args:
            count: how many are to start.
            busy: clients that are passed over, since they are at work or had their part in this
                round: a client takes part in a round once.
        """
        found: list[int] = []
        passed_over = set(busy)
        cohorts, seed, trial = self.plan.cohorts, self.plan.seed, self.plan.trial
        while len(found) < count and len(passed_over) < cohorts.population:
            t, place = divmod(self.drawn, cohorts.asked)
            for client in sample_cohort(cohorts, seed, trial, t)[place:]:
                if len(found) == count:
                    break
                self.drawn += 1
                if client not in passed_over:
                    passed_over.add(client)
                    found.append(client)
        return found
