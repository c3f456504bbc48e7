"""Records what happened in a round, in one line of JSON.

A record holds nothing that differs between two runs of the same seed: no times, no host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from keyhole.errors import InputError
from keyhole.files import replacing, storage_errors, write_all
from keyhole.primitives.report import MetricOfClients
from keyhole.rounds.fields import typed
from keyhole.rounds.machine import Why
from keyhole.server.inputs import HeldBy

_OUTCOMES = {  # lists of a record -> what became of these clients
    "late": "late",
    "stale": "too old",
    "refused": "refused",
    "empty": "without examples",
    "lost_before": "did not come",
    "lost_after": "broke off",
}


@dataclass(frozen=True)
class RoundRecord:
    """One round.

    Args:
        round: t, from 0.
        step: server steps made after this round; a skipped round makes none.
        clients: those whose part in the run ended in this round, in order.
        closed: why no more were waited for: enough updates, nobody left, or no more time.
        lost_before: those lost before their slices arrived.
        lost_after: those lost after.
        late: those that had not answered when the round had enough.
        refused: those whose update held NaN, infinity, or numbers too large to add up, or was above
            the max norm where such updates are refused.
        empty: those whose keys met none of their examples: they had nothing to train on.
        stale: those whose update was too old to count.
        bytes_down: bytes that each client received, in the order of `clients`.
        bytes_up: bytes that each client sent: keys to select with, keys and update to add up.
        select_calls: slices that were computed for the deliveries of this round.
        cache_hits: slices that were asked for in them and found computed.
        distinct_keys: different keys that `clients` received slices of.
        client_sizes: numbers in the sub-model of each client, in the order of `clients`; 0 where
            none arrived.
        are_maxima: whether bytes and sizes are not counted: nobody but the devices knows their
            keys, and these are public numbers that hold for every client which answered, the
            lengths to which its messages are padded or the max there could be.
        unplaced_keys: keys that clients chose and trained without, and keys whose update was not
            added: a private message had no place for them, and to send another would show.
        dropped_rows: rows that somebody sent and too few for them to be opened, where a secure sum
            drops such rows; with noise on counts, about as many.
        seen_by: party -> what it learned of the clients' keys while slices were delivered.
        seen_in_sum: party -> what it learned of updates and their keys while they were added up.
        privacy: epsilon and delta that the run has spent so far, for whom and by which account.
        not_opened: why a secure sum could not be opened, and the round made no step.
        staleness: of each update that was added, in steps; all zero unless rounds are asynchronous.
        above_norm: how many updates were above the max norm, and so refused or clipped.
        outliers: how many of those added were longer than the alarm's multiple of the median norm.
        input_bound: how the bound on updates was held: "checked" by who added them up, "proved" to
            them, "unproved" where honest devices alone keep it; "none" where there is none.
        incidents: what went wrong beside the clients, such as a worker that was lost and whose work
            was done again.
        metrics: name -> value, where the round was evaluated.
        total_weight: of all updates that were added, where means are weighted by examples.
        client_metrics: name -> what clients reported under it, with mean and deciles; the mean
            alone where a secure sum hides the numbers of single clients.
    """

    round: int
    step: int
    clients: list[int]
    closed: Why = "goal"
    lost_before: list[int] = field(default_factory=list)
    lost_after: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    bytes_down: list[int] = field(default_factory=list)
    bytes_up: list[int] = field(default_factory=list)
    select_calls: int = 0
    cache_hits: int = 0
    distinct_keys: int = 0
    client_sizes: list[int] = field(default_factory=list)
    are_maxima: bool = False
    unplaced_keys: int = 0
    dropped_rows: int = 0
    seen_by: Mapping[str, str] = field(default_factory=dict)
    seen_in_sum: Mapping[str, str] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    not_opened: str | None = None
    staleness: list[int] = field(default_factory=list)
    above_norm: int = 0
    outliers: int = 0
    input_bound: HeldBy | Literal["none"] = "none"
    incidents: list[str] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    total_weight: float | None = None
    client_metrics: Mapping[str, MetricOfClients] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics, and the means of what clients reported, each as `client_NAME`."""
        told = {f"client_{name}": found.mean for name, found in self.client_metrics.items()}
        return told | dict(self.metrics)

    @property
    def is_skipped(self) -> bool:
        """Whether the round made no step: nobody was left, or the sum could not be opened. With
        privacy, a sum of nobody is released too: that nobody came must not show."""
        return not self.staleness and (not self.privacy or self.not_opened is not None)

    @property
    def is_refused(self) -> bool:
        """Whether clients answered and the update of none could be used."""
        return bool(self.refused) and not (self.staleness or self.late or self.stale)

    @property
    def is_keyless(self) -> bool:
        """Whether clients answered and all of them had nothing to train on, since none of them had
        chosen a key; unknown where keys are hidden."""
        used = self.staleness or self.late or self.stale or self.refused
        return bool(self.empty) and not (used or self.distinct_keys or self.are_maxima)

    @property
    def told(self) -> str:
        """How the round ended, in one line of counts.

        >>> RoundRecord(round=3, step=1, clients=[4, 7, 9], staleness=[0, 0], late=[9]).told
        'round 3 closed (goal): 2 of 3 updates count, 1 late'
        >>> RoundRecord(round=4, step=1, clients=[4], closed="time", lost_before=[4]).told
        'round 4 closed empty (time): 0 of 1 updates count, 1 did not come; the model stays'
        """
        counts = {what: len(getattr(self, name)) for name, what in _OUTCOMES.items()}
        rest = "".join(f", {count} {what}" for what, count in counts.items() if count)
        empty, stays = (" empty", "; the model stays") if self.is_skipped else ("", "")
        rest += f", not opened: {self.not_opened}" if self.not_opened else ""
        return (
            f"round {self.round} closed{empty} ({self.closed}): {len(self.staleness)} of "
            f"{len(self.clients)} updates count{rest}{stays}"
        )

    @property
    def trouble(self) -> str:
        """How many updates could not be used, and why; empty where there is none of that.

        >>> RoundRecord(round=0, step=0, clients=[4, 7], refused=[7]).trouble
        '1 of 2 updates refused: not finite or too large'
        """
        count = len(self.clients)
        found = []
        if self.refused:
            found.append(f"{len(self.refused)} of {count} updates refused: not finite or too large")
        if self.empty:
            found.append(f"{len(self.empty)} of {count} clients have no example with their keys")
        return "; ".join(found)


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns metrics as JSON can hold them: it has no NaN and no infinity, which become null.

    >>> metrics_to_json({"loss": math.nan, "accuracy": 0.5})
    {'loss': None, 'accuracy': 0.5}
    """
    return {name: _to_json(value) for name, value in metrics.items()}


def metrics_from_json(told: Mapping[str, float | None]) -> dict[str, float]:
    """Returns metrics of which null, where one was not finite, is NaN."""
    return {name: _from_json(value) for name, value in told.items()}


def _to_json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _from_json(value: float | None) -> float:
    return math.nan if value is None else value


def encode_records(records: Iterable[RoundRecord]) -> bytes:
    """Returns one line of JSON for each record."""
    return b"".join(json.dumps(_told(r), sort_keys=True).encode() + b"\n" for r in records)


_ONLY_IF_TOLD = "total_weight", "client_metrics", "are_maxima"


def _told(record: RoundRecord) -> dict[str, Any]:
    """The fields of a record; those of a few runs where they say something."""
    told = vars(record) | {"metrics": metrics_to_json(record.metrics)}
    told["client_metrics"] = {
        name: {"mean": _to_json(found.mean), "deciles": [_to_json(d) for d in found.deciles]}
        for name, found in record.client_metrics.items()
    }
    return {name: value for name, value in told.items() if value or name not in _ONLY_IF_TOLD}


def _numbers_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line in which null is NaN."""
    of_clients = {
        name: {
            "mean": _from_json(found["mean"]),
            "deciles": [_from_json(d) for d in found.get("deciles", [])],
        }
        for name, found in told.get("client_metrics", {}).items()
    }
    metrics = metrics_from_json(told.get("metrics", {}))
    return {"metrics": metrics, "client_metrics": of_clients}


def decode_records(data: bytes) -> list[RoundRecord]:
    """Returns the records of `encode_records`; an unfinished last line is left out."""
    lines = data.split(b"\n")[:-1]
    try:
        told = [json.loads(line) for line in lines]
        read = [RoundRecord(**each | _numbers_of(each)) for each in told]
        return [typed(RoundRecord, vars(record)) for record in read]
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise InputError(
            f"a line is not the record of a round: got {error!s}; expected JSON lines as "
            "training writes them; point at the records.jsonl of a run, made by this version of "
            "keyhole"
        ) from error


def read_records(path: Path | str) -> list[RoundRecord]:
    """Returns the records of a file, none if there is no such file."""
    path = Path(path)
    with storage_errors(path, "read"):
        data = path.read_bytes() if path.exists() else b""
    return decode_records(data)


def append_records(path: Path, records: Iterable[RoundRecord]) -> None:
    """Writes records behind those of a file."""
    with path.open("ab") as file:
        file.write(encode_records(records))


def write_records(path: Path, records: Iterable[RoundRecord]) -> None:
    """Writes a file of records; it is replaced whole or not at all."""
    with replacing(path) as descriptor:
        write_all(descriptor, [encode_records(records)])


def scalars_of(record: RoundRecord) -> dict[str, float]:
    """Returns what trackers draw of a record."""
    return {
        **{f"metrics/{name}": value for name, value in record.metrics.items()},
        **{f"clients/{name}": found.mean for name, found in record.client_metrics.items()},
        "cohort/asked": len(record.clients),
        "cohort/added": len(record.staleness),
        "cohort/refused": len(record.refused),
        "cohort/above_norm": record.above_norm,
        "cohort/outliers": record.outliers,
        "cohort/empty": len(record.empty),
        "cost/bytes_down": sum(record.bytes_down),
        "cost/bytes_up": sum(record.bytes_up),
        "cost/select_calls": record.select_calls,
        "cost/distinct_keys": record.distinct_keys,
        "staleness/mean": sum(record.staleness) / max(1, len(record.staleness)),
    }
