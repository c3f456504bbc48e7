"""Describes the round of a service, a trainer or an aggregator by what it shows at an address.

The address of metrics shows counts of the round; that of devices its number and phase alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from keyhole.errors import KeyholeError, ServiceError
from keyhole.experiments.watch.folder import Told
from keyhole.service.status import RoundStatus
from keyhole.service.telling import statuses_from
from keyhole.wire.assignment import Phase
from keyhole.wire.http import HttpClient
from keyhole.wire.manifest import number_of
from keyhole.wire.sockets import Retry

_METRICS, _CURRENT = "/metrics", "/v1/rounds/current"
_LIMIT = 4 << 20  # bytes of an answer
_KEPT = 500  # rounds that are remembered


@dataclass
class ServiceWatch:
    """A service that is watched.

    Args:
        url: of its metrics, ending in `/metrics`, or of the service itself.
        ca: PEM file of the authorities to trust there.
        insecure: whether to speak plain http beyond this machine.
    """

    url: str
    ca: Path | None = None
    insecure: bool = False
    now: Callable[[], float] = time.time
    _seen: dict[tuple[str, int], RoundStatus] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._is_metrics = self.url.rstrip("/").endswith(_METRICS)
        base = self.url.rstrip("/").removesuffix(_METRICS)
        retry = Retry(attempts=1)
        self._client = HttpClient(base, ca=self.ca, retry=retry, insecure=self.insecure)

    def statuses(self) -> dict[str, RoundStatus]:
        """Returns how rounds there stand, by the names of their runs.

        Raises:
            ServiceError: nobody answers there, or with something else.
        """
        path = _METRICS if self._is_metrics else _CURRENT
        try:
            got = self._client.exchange("GET", path, headers={}, token=None, limit=_LIMIT)
        finally:
            self._client.close()  # between two looks nothing stays open
        if got.problem:
            raise self._odd(got.problem)
        try:
            text = bytes(got.body).decode()
            return statuses_from(text) if self._is_metrics else _of_current(json.loads(text))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._odd("an answer of another kind") from error

    def overview(self) -> Told:
        """Returns how rounds stand, as `RunFolder.overview` does; with those seen before."""
        told: Told = {
            "folder": self._client.place,
            "runs": [],
            "rounds": [],
            "troubles": [],
            "unread": 0,
        }
        try:
            statuses = self.statuses()
        except KeyholeError as error:
            return told | {"troubles": [str(error)], "now": self.now(), "seen": self._history()}
        self._seen |= {(run, status.number): status for run, status in statuses.items()}
        self._seen = dict(list(self._seen.items())[-_KEPT:])
        for run, status in statuses.items():
            name = f"{self._client.place}/runs/{run}" if run else self._client.place
            told["rounds"].append({"name": name, "told": status.told} | msgspec.to_builtins(status))
        return told | {"now": self.now(), "seen": self._history()}

    def _history(self) -> list[dict[str, Any]]:
        names = ("number", "updates", "goal", "cohort", "checked_in", "refused", "seconds_open")
        return [
            {"run": run} | {name: getattr(each, name) for name in names}
            for (run, _), each in self._seen.items()
        ]

    def _odd(self, got: str) -> ServiceError:
        return ServiceError(
            f"no status at {self._client.place}: got {got}; expected the address of a service, or "
            "the one that it prints behind `metrics at`; check that it runs, and the URL"
        )


def _of_current(told: dict[str, Any]) -> dict[str, RoundStatus]:
    """What devices are told of the current round of one run."""
    phase: Phase = "open" if told["phase"] == "open" else "closed"
    round_id, number = str(told["round"]), int(told["number"])
    if number_of(round_id) != number:
        raise ValueError(f"round {number} of another name")
    return {"": RoundStatus(round_id, number, phase, None, None, None, 0, None, None)}
