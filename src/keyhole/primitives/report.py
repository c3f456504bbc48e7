"""Report: what a client brings out of a round beside its update, and its state in bytes.

    state  "KHS1", bytes of the head, head, arrays one after the other, CRC-32 of all before
    head   JSON: the tree with null for each array, and of each array its type and shape

All numbers are little-endian. A state is packed where the client has trained, so that it travels
and is stored as it is, and nothing that a client does to its arrays later changes it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan, prod
from typing import Any
from zlib import crc32

import numpy as np

from keyhole.arrays import Tree
from keyhole.errors import InputError, StorageError
from keyhole.tree import flatten, unflatten

_MAGIC, _COUNT = b"KHS1", struct.Struct("<I")

METRIC_NAME = r"\A(?=.{1,64}\Z)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*\Z"
"""What a metric may be called. Names end up in records, on screens and in the files of trackers,
and over a service they come from devices: no part of one is empty or begins with a dot."""


LARGEST_WEIGHT = 2.0**64
"""What a weight may be where a run sets no bound: those of all clients add up to a number."""


@dataclass(frozen=True, repr=False)
class Report:
    """What a client's train function may return in place of the update alone.

    Args:
        update: start minus end, shaped as the slices.
        weight: how much the update counts where means are weighted by examples; None lets the
            library count the client's examples.
        metrics: name -> number, such as the loss before training. They are recorded as means over
            clients; one that is NaN or infinite is left out. Names have at most 64 characters:
            letters, digits, `_`, `.`, `-`, and `/` between parts.
        state: nested dicts and lists of arrays, which the client gets back when it next takes part;
            None keeps what it had. It is kept if the round makes a step in which the update counts.

    >>> Report({"w": np.ones(2)}, weight=20, metrics={"loss": 0.5})
    Report(weight 20, loss, no state)
    """

    update: Tree
    weight: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Tree | None = None

    def __repr__(self) -> str:
        """Updates and states may be private."""
        held = "no state" if self.state is None else "a state"
        return f"Report(weight {self.weight}, {', '.join(self.metrics) or 'no metrics'}, {held})"

    @staticmethod
    def of(brought: Any) -> Report:
        """Returns what a train function has brought as a report; a bare tree is the update."""
        return brought if isinstance(brought, Report) else Report(brought)

    @property
    def beside(self) -> Report | None:
        """What it says beside the update, None where that is nothing."""
        tells = self.weight is not None or self.metrics or self.state is not None
        return replace(self, update=None) if tells else None

    def checked(self, who: str, max_state_bytes: int) -> Report:
        """Returns it with plain numbers and the state packed.

        Args:
            who: whose it is, for errors, such as "client 3 in round 5".

        Raises:
            InputError: a weight or a metric is no number, a name is not allowed, or the state is
                too large or no tree of arrays.
        """
        weight = None if self.weight is None else _weight_number(self.weight, who)
        if not isinstance(self.metrics, Mapping):
            raise InputError(
                f"the metrics of {who} have no names: got a {type(self.metrics).__name__}; "
                'expected a dict of name and number; report metrics={"loss": value}'
            )
        metrics = {
            _metric_name(n, who): _metric_number(n, value, who) for n, value in self.metrics.items()
        }
        if self.state is None or isinstance(self.state, PackedState):
            return Report(self.update, weight, metrics, self.state)
        state = pack_state(self.state, who)
        if len(state) > max_state_bytes:
            raise InputError(
                f"the state of {who} is too large: got {len(state)} bytes; expected at most "
                f"{max_state_bytes}; keep less in it, or raise max_state_bytes"
            )
        return Report(self.update, weight, metrics, state)


def _weight_number(weight: Any, who: str) -> float:
    number = _number(weight)
    if number is None or not 0 <= number <= LARGEST_WEIGHT:
        raise InputError(
            f"the weight of {who} is no weight: got {_shown(weight, number)}; expected one number "
            f"from 0 to {LARGEST_WEIGHT:.3g}, such as the number of its examples; report "
            "weight=len(examples)"
        )
    return number


def _metric_name(name: object, who: str) -> str:
    if not re.match(METRIC_NAME, str(name)):
        raise InputError(
            f"a metric of {who} has an invalid name: got {str(name)[:80]!r}; expected 1 to 64 "
            "letters, digits, _, . or -, and / between parts, none of which starts with . or -; "
            'rename it, such as "train/loss"'
        )
    return str(name)


def _metric_number(name: object, value: Any, who: str) -> float:
    number = _number(value)
    if number is None:
        raise InputError(
            f"metric {name!r} of {who} is no number: got {_shown(value, number)}; expected one "
            "number for all its examples; report a float, such as a mean"
        )
    return number


def _number(value: Any) -> float | None:
    """A number as a float; None for what is none, and for an array of one."""
    if isinstance(value, str | bytes) or getattr(value, "shape", ()) != ():
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shown(value: Any, number: float | None) -> str:
    shape = getattr(value, "shape", None)
    held = f"an array of shape {shape}" if shape else f"a {type(value).__name__}"
    return held if number is None else f"{number:g}"


class PackedState(bytes):
    """A client's state as `pack_state` has written it."""


def pack_state(state: Tree, who: str) -> PackedState:
    """Returns a client's state as bytes; raises InputError where it is no tree of arrays."""
    try:
        arrays = {path: np.asarray(leaf) for path, leaf in flatten(state).items()}
        wrong = [f"{p!r} of {a.dtype}" for p, a in arrays.items() if a.dtype.kind not in "biufc"]
        if wrong:
            raise TypeError(wrong[0])
        kinds = {p: [a.dtype.newbyteorder("<").str, list(a.shape)] for p, a in arrays.items()}
        empty = unflatten(state, dict.fromkeys(arrays))
        head = json.dumps([empty, kinds])
        if json.loads(head)[0] != empty:
            raise TypeError("a tuple, or a dict whose keys are no text")
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the state of {who} is no tree of arrays: got {error}; expected dicts with names, "
            "lists and arrays of numbers; convert what else it holds to arrays"
        ) from error
    body = [_MAGIC, _COUNT.pack(len(head.encode())), head.encode()]
    body += [a.astype(a.dtype.newbyteorder("<"), order="C").tobytes() for a in arrays.values()]
    packed = b"".join(body)
    return PackedState(packed + _COUNT.pack(crc32(packed)))


def unpack_state(packed: bytes, who: str) -> Tree:
    """Returns the state that was packed, in arrays of its own.

    Raises:
        StorageError: the bytes are not those of a state.
    """
    start = len(_MAGIC) + _COUNT.size
    if (
        packed[: len(_MAGIC)] != _MAGIC
        or len(packed) < start + _COUNT.size
        or (_COUNT.unpack(packed[-_COUNT.size :])[0] != crc32(packed[: -_COUNT.size]))
    ):
        raise StorageError(
            f"the state of {who} is damaged: got {len(packed)} bytes with another checksum; "
            "expected the bytes that were written; restore the file, or start a new run"
        )
    at = start + _COUNT.unpack_from(packed, len(_MAGIC))[0]
    empty, kinds = json.loads(packed[start:at])
    leaves = {}
    for path, (dtype, shape) in kinds.items():
        array = np.frombuffer(packed, dtype, prod(shape), at)
        leaves[path] = array.astype(array.dtype.newbyteorder("="), copy=True).reshape(shape)
        at += array.nbytes
    return _fill(empty, leaves, "")


def _fill(node: Any, leaves: Mapping[str, Any], path: str) -> Tree:
    """The tree with arrays in the places of null; None of the caller's own stays None."""
    if isinstance(node, dict):
        return {n: _fill(each, leaves, f"{path}/{n}" if path else n) for n, each in node.items()}
    if isinstance(node, list):
        inner = enumerate(node)
        return [_fill(each, leaves, f"{path}/{i}" if path else str(i)) for i, each in inner]
    return leaves.get(path or ".")


@dataclass(frozen=True)
class MetricOfClients:
    """What clients reported under one name.

    Args:
        mean: over the clients whose updates count, weighted as these are; NaN, in JSON null, where
            their numbers are too large to have one.
        deciles: the nine numbers that part clients into ten groups of equal size; none where a
            secure sum hides the numbers of single clients.
    """

    mean: float
    deciles: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Reported:
    """What the clients of a round reported together.

    Args:
        weight: of all updates that were added, None where they are not weighted.
        metrics: name -> mean and deciles.
    """

    weight: float | None = None
    metrics: Mapping[str, MetricOfClients] = field(default_factory=dict)


def summarize(reports: Sequence[Report], is_weighted: bool) -> Reported:
    """Returns what clients reported together; one without a weight counts as 1.

    >>> found = summarize([Report(None, 1, {"loss": 2.0}), Report(None, 3, {"loss": 4.0})], True)
    >>> found.weight, found.metrics["loss"].mean
    (4.0, 3.5)
    """
    weights = [1.0 if each.weight is None else each.weight for each in reports]
    metrics = {}
    for name in metric_names(reports):
        pairs = zip(reports, weights, strict=True)
        told = [(each.metrics[name], w) for each, w in pairs if isfinite(each.metrics[name])]
        weight = sum(w for _, w in told)
        if weight > 0:
            with np.errstate(over="ignore", invalid="ignore"):
                deciles = np.quantile([value for value, _ in told], np.arange(1, 10) / 10)
            mean = sum(value * w for value, w in told) / weight
            metrics[name] = MetricOfClients(_or_nan(mean), [_or_nan(d) for d in deciles.tolist()])
    return Reported(float(sum(weights)) if is_weighted else None, metrics)


def _or_nan(number: float) -> float:
    return number if isfinite(number) else nan


def metric_names(reports: Iterable[Report]) -> list[str]:
    """Returns the names that all clients report, sorted: those of the first."""
    return sorted(next(iter(reports), Report(None)).metrics)
