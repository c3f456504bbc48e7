"""Reads and writes what the settings of a manifest say: of updates, how long one may be, how it is
weighted, and whether it goes in shares to two aggregators; tables of keys that choices read; and
what devices send in a round that measures the model in place of training it.

In such a round an update is a few numbers that everyone sends, and no key: the weight of a device's
examples, and of each metric its product with that weight and the weight again. They are added up as
updates are, in the clear or in shares, so a party that may open the sum learns the weighted means.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from math import inf, nan
from typing import Annotated

import msgspec
import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError, RequestError
from keyhole.keys.choice import KeyTable, KeyUsers
from keyhole.primitives.layout import Layout
from keyhole.primitives.report import METRIC_NAME
from keyhole.server.inputs import UNBOUND, InputBound

_MaxByName = dict[
    Annotated[str, msgspec.Meta(pattern=METRIC_NAME)], Annotated[float, msgspec.Meta(gt=0)]
]
_MAX_NORM, _ABOVE_NORM, _MAX_WEIGHT = "max_update_norm", "above_norm", "max_weight"


def bound_settings(bound: InputBound) -> dict[str, object]:
    """Returns what the settings of a manifest say about how long an update may be, and how it is
    weighted: `max_weight` is null where weights have no bound, and absent where updates count
    alike."""
    told: dict[str, object] = {}
    if bound.is_bound:
        told = {_MAX_NORM: bound.max_norm, _ABOVE_NORM: bound.above}
    if bound.max_weight is not None:
        told[_MAX_WEIGHT] = bound.max_weight if bound.max_weight < inf else None
    return told


def bound_of(settings: Mapping[str, object]) -> InputBound:
    """Returns how long an update may be in a round whose manifest has these settings.

    Raises:
        InputError: they say no norm that an update could have.
    """
    limit, above = settings.get(_MAX_NORM, inf), settings.get(_ABOVE_NORM, UNBOUND.above)
    weight = None
    if _MAX_WEIGHT in settings:
        weight = inf if settings[_MAX_WEIGHT] is None else _number(settings[_MAX_WEIGHT])
    evaluates = evaluates_of(settings)
    allows = UNBOUND.allows if evaluates is None else evaluates.allows
    return InputBound(_number(limit), above, max_weight=weight, allows=allows)  # type: ignore[arg-type]


def _number(value: object) -> float:
    """A number of the settings; NaN, which a bound refuses, for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else nan  # type: ignore[arg-type]


DELIVERY_SETTING, AGGREGATION_SETTING = "delivery", "aggregation"
"""Names of how slices are fetched in a round and how updates are added up."""

SUM_SETTING = "sum_terms"
WEIGHT_SETTING, METRICS_SETTING = "sum_of_weights", "sum_of_metrics"
"""Of a round with params of a sum: whether updates carry their weights in it, and which metrics."""


def sum_settings(
    params: bytes, has_weights: bool = False, metrics: Mapping[str, float] | None = None
) -> dict[str, object]:
    """Returns what the settings of a manifest say about the sum of its round."""
    told: dict[str, object] = {SUM_SETTING: b64encode(params).decode("ascii")}
    if has_weights:
        told[WEIGHT_SETTING] = True
    if metrics:
        told[METRICS_SETTING] = dict(metrics)
    return told


def carried_in(settings: Mapping[str, object]) -> tuple[bool, dict[str, float]]:
    """Returns whether updates of a round carry their weights in its sum, and which metrics.

    Raises:
        InputError: they are no names of metrics with a max each.
    """
    try:
        metrics = msgspec.convert(settings.get(METRICS_SETTING, {}), _MaxByName)
    except msgspec.ValidationError as error:
        raise InputError(
            f"the metrics that a round adds up make no sense: got {error}; expected names, and a "
            "max above 0 for each; ask the trainer for another round"
        ) from error
    return settings.get(WEIGHT_SETTING) is True, metrics


def refuse_clear(settings: Mapping[str, object]) -> None:
    """Raises RequestError where the settings of a manifest have params of a sum.

    Updates of such a round travel in shares: no device sends one whole, and no service takes it.
    """
    if SUM_SETTING in settings:
        raise RequestError(
            "updates of this round are added up by two aggregators: got a device that sends its "
            "update in the clear; expected shares, sent to both; no update was taken; start the "
            "device with --aggregators"
        )


NORMS_SETTING, USERS_SETTING = "key_norms", "key_users"
_ENTRY = 12  # bytes of a key and its number
_MAX_TABLE = 4 << 20  # bytes of the tables of a round, which every device fetches with its manifest
_MAX_UNPACKED = 128 << 20  # bytes of the same, unpacked: a thousand times as many may come of few


class _Users(msgspec.Struct, frozen=True):
    clients: Annotated[int, msgspec.Meta(ge=1)]
    tables: dict[str, str]


def facts_settings(
    norms: Mapping[str, KeyTable] | None, users: KeyUsers | None
) -> dict[str, object]:
    """Returns what the settings of a manifest tell choices of keys: norms of last updates, and how
    many clients have each key.

    Raises:
        InputError: the tables are too large to go with every manifest.
    """
    told: dict[str, object] = {}
    if norms is not None:
        told[NORMS_SETTING] = {name: _packed(table) for name, table in norms.items()}
    if users is not None:
        tables = {name: _packed(table) for name, table in users.tables.items()}
        told[USERS_SETTING] = {"clients": users.clients, "tables": tables}
    size, all_tables = len(msgspec.json.encode(told)), [*(norms or {}).values()]
    all_tables += [] if users is None else users.tables.values()
    unpacked = sum(_ENTRY * len(table.keys) for table in all_tables)
    if size > _MAX_TABLE or unpacked > _MAX_UNPACKED:
        raise InputError(
            f"what a choice needs to know of keys is too large to go with a round: got {size} "
            f"bytes, {unpacked} unpacked; expected {_MAX_TABLE} or fewer, {_MAX_UNPACKED} "
            "unpacked; choose keys another way, or give devices a table with tf_idf_by"
        )
    return told


def facts_in(
    settings: Mapping[str, object],
) -> tuple[dict[str, KeyTable] | None, KeyUsers | None]:
    """Returns the norms and the users that a round tells, None where it tells none.

    Raises:
        InputError: they are no tables of keys.
    """
    norms, users = settings.get(NORMS_SETTING), settings.get(USERS_SETTING)
    try:
        by_name = msgspec.convert(norms, dict[str, str] | None)
        told = msgspec.convert(users, _Users | None)
        known, left = _unpacked_all(by_name or {}, _MAX_UNPACKED)
        tables, _ = _unpacked_all({} if told is None else told.tables, left)
        users_told = None if told is None else KeyUsers(told.clients, lambda: tables)
        return (None if by_name is None else known), users_told
    except (msgspec.ValidationError, ValueError, zlib.error) as error:
        raise InputError(
            f"what a round tells of keys makes no sense: got {error}; expected tables as "
            "docs/wire.md describes them; ask the trainer for another round"
        ) from error


def _packed(table: KeyTable) -> str:
    """Steps from key to key, uint64, then values, float32: compressed, in base64."""
    steps = np.diff(table.keys, prepend=0).astype("<u8")
    body = steps.tobytes() + table.values.astype("<f4").tobytes()
    return b64encode(zlib.compress(body, 9)).decode("ascii")


def _unpacked_all(packed: Mapping[str, str], limit: int) -> tuple[dict[str, KeyTable], int]:
    """Tables of at most `limit` bytes together, and how many of these are left."""
    found = {}
    for name, text in packed.items():
        found[name] = _unpacked(text, limit)
        limit -= _ENTRY * len(found[name].keys)
    return found, limit


def _unpacked(text: str, limit: int) -> KeyTable:
    unpack = zlib.decompressobj()
    body = unpack.decompress(b64decode(text, validate=True), max(1, limit))
    count, rest = divmod(len(body), _ENTRY)
    if rest or not unpack.eof:
        raise ValueError(f"a table of {len(body)} bytes or more")
    keys = np.cumsum(np.frombuffer(body, "<u8", count)).astype(np.int64)
    if count and (keys[0] < 0 or (np.diff(keys) <= 0).any()):
        raise ValueError("keys that do not rise")
    return KeyTable(keys, np.frombuffer(body, "<f4", count, 8 * count).astype(np.float64))


EVALUATION_SETTING = "evaluation"
HELD_OUT_SHARE = "held_out_share"
"""What every device is asked beside the metrics of a run: 1 where it measures with examples that it
does not train on, 0 where it trains on them; the mean says what the metrics are worth."""
_TOLD = "told"
_MAX_METRICS = 64
_LARGEST = float(np.finfo(np.float32).max)  # a metric beyond it could not be sent


class Evaluates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured in a round.

    Attributes:
        metrics: their names, in the order in which they are sent.
        max_examples: a device with more examples counts as if it had this many.
    """

    metrics: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=METRIC_NAME)]],
        msgspec.Meta(min_length=1, max_length=_MAX_METRICS),
    ]
    max_examples: Annotated[int, msgspec.Meta(ge=1)]

    @property
    def layout(self) -> Layout:
        """That of what is sent."""
        return Layout.of({_TOLD: np.zeros(1 + 2 * len(self.metrics), np.float32)})

    def settings(self) -> dict[str, object]:
        """Returns what the settings of a manifest say of it."""
        return {EVALUATION_SETTING: msgspec.to_builtins(self)}

    def numbers(self, measured: Mapping[str, float], examples: int, is_held: bool = False) -> Tree:
        """Returns what a device sends that has measured this on that number of examples, which it
        holds out or trains on; a metric that is missing, not finite or beyond float32 does not
        count."""
        weight = min(examples, self.max_examples) / self.max_examples
        measured = {**measured, HELD_OUT_SHARE: float(is_held)} if measured else {}
        told = [weight]
        for name in self.metrics:
            value = measured.get(name, np.nan)
            told += [weight * value, weight] if abs(value) <= _LARGEST else [0.0, 0.0]
        return {_TOLD: np.array(told, np.float32)}

    def allows(self, told: Tree) -> bool:
        """Returns whether a device can have sent this: a share of the max examples, which counts
        in full or not at all for each metric. Metrics may be any number."""
        weight, pairs = told[_TOLD][0], told[_TOLD][1:].reshape(-1, 2)
        is_none = pairs[:, 1] == 0
        counts = (pairs[:, 1] == weight) | (is_none & (pairs[:, 0] == 0))
        return bool(0 <= weight <= 1 and counts.all())

    def means(self, total: Array) -> dict[str, float]:
        """Returns what the numbers of all devices, added up, come to: the mean of each metric that
        anybody could tell, weighted by examples."""
        sums = np.asarray(total, np.float64)[1:].reshape(-1, 2)
        pairs = zip(self.metrics, sums.tolist(), strict=True)
        return {name: product / weight for name, (product, weight) in pairs if weight > 0}


def evaluates_of(settings: Mapping[str, object]) -> Evaluates | None:
    """Returns what a round with these settings measures; None where it trains.

    Raises:
        InputError: the settings say something else.
    """
    if EVALUATION_SETTING not in settings:
        return None
    try:
        return msgspec.convert(settings[EVALUATION_SETTING], Evaluates)
    except msgspec.ValidationError as error:
        raise InputError(
            f"what a round measures cannot be read: got {error}; expected names of metrics and "
            "max_examples, as docs/wire.md describes them; check that both sides are of one version"
        ) from error


def sent_layout(settings: Mapping[str, object], layout: Layout | None) -> Layout | None:
    """Returns the layout of what devices send in a round, whose model has `layout`."""
    evaluates = evaluates_of(settings)
    return layout if evaluates is None else evaluates.layout
