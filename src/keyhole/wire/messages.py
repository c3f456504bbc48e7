"""Encodes and decodes messages: query, answer and update of a device, and JSON about a sum.

`docs/wire.md` describes every byte. All numbers are little-endian. A message begins with four bytes
that name it and its version. What arrives is checked before it is used, and what is said about it
counts keys and never shows one. What trainer, aggregators and devices say of a sum besides shares
is JSON, read strictly.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree
from keyhole.crypto.merkle import HASH_BYTES, HashArray
from keyhole.delivery.records import RecordArray
from keyhole.errors import (
    DamageError,
    InputError,
    KeyholeError,
    KeySpaceError,
    MalformedError,
    RequestError,
    StaleError,
    TooLargeError,
    worded,
)
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import Layout
from keyhole.primitives.report import LARGEST_WEIGHT, METRIC_NAME, Report
from keyhole.server.inputs import InputBound

MAX_BLOCKS = 64
"""Tables that one query may ask for."""

Names = NDArray[np.uint64]
"""Short names of records, shape (m,): the first eight bytes of their leaves."""

MAX_REPORT = 4096
"""Bytes of what a device says beside its update."""

_QUERY, _UPDATE, _REPORT = b"KHQ2", b"KHU2", b"KHR1"
_REPORT_HEAD = struct.Struct("<4sI")  # name and version, bytes of JSON
_HEAD = struct.Struct("<4sHH")  # name and version, two counts
_UPDATE_HEAD = struct.Struct("<4sHH32s")  # the same, and the digest of the manifest
_BLOCK = struct.Struct("<HBBI")  # table, bytes of a key, flags, keys
_HAS_NAMES, _NO_PROOF = 1, 2  # flags
_COUNT, _CHECK = struct.Struct("<I"), struct.Struct("<I")
_I4, _I8, _U8, _F4 = (np.dtype(name) for name in ("<i4", "<i8", "<u8", "<f4"))


@dataclass(frozen=True)
class Ask:
    """What a device asks of one table."""

    table: int  # its place in the manifest
    keys: KeyArray  # (m,) int64; order and repeats are kept
    # of the records that the device holds already, one for each key; None holds nothing
    names: Names | None = None
    # False where the proof has arrived, and records of it are missing
    wants_proof: bool = True

    def __repr__(self) -> str:
        """Keys may be private: printing shows how many there are."""
        return f"Ask(table {self.table}, {len(self.keys)} keys)"


@dataclass(frozen=True)
class Answer:
    """What a device receives of one table."""

    proof: HashArray | None  # (p, 32); None where its end is missing, and all that comes behind
    records: RecordArray  # those that were sent, in the order of the keys
    # (m,) which of the keys they belong to; the device holds the others already
    is_sent: NDArray[np.bool_]


def names_of(leaves: HashArray) -> Names:
    """Returns what a device calls records that it holds, given their leaves."""
    return np.ascontiguousarray(leaves[:, :8]).view(_U8)[:, 0]


def encode_query(asks: Sequence[Ask]) -> bytes:
    """Returns the body of a query; keys below 2^31 take four bytes each, else all take eight."""
    pieces = [_HEAD.pack(_QUERY, len(asks), 0)]
    for ask in asks:
        width = 8 if len(ask.keys) and ask.keys.view(np.uint64).max() >= 2**31 else 4
        flags = _HAS_NAMES * (ask.names is not None) | _NO_PROOF * (not ask.wants_proof)
        pieces.append(_BLOCK.pack(ask.table, width, flags, len(ask.keys)))
        pieces.append(ask.keys.astype(f"<i{width}").tobytes())
        if ask.names is not None:
            pieces.append(ask.names.astype("<u8").tobytes())
    return b"".join(pieces)


def max_query_bytes(max_keys: int) -> int:
    """Returns the length of the longest query of this many keys: eight bytes each, and as many of
    names."""
    return _HEAD.size + MAX_BLOCKS * _BLOCK.size + 16 * max_keys


def decode_query(body: bytes | bytearray, num_keys: Sequence[int], max_keys: int) -> list[Ask]:
    """Returns what a query asks for; `num_keys` is K of each table of the round."""
    name, blocks, zero = _unpack(_HEAD, body, 0)
    if name != _QUERY or zero or not blocks <= MAX_BLOCKS:
        raise _malformed("its head")
    asks, at, total = [], _HEAD.size, 0
    for _ in range(blocks):
        table, width, flags, count = _unpack(_BLOCK, body, at)
        at += _BLOCK.size
        total += count
        if total > max_keys:
            raise TooLargeError(
                f"too many keys in one query: got {total}; expected {max_keys}; split it"
            )
        if table >= len(num_keys) or width not in (4, 8) or flags > _HAS_NAMES | _NO_PROOF:
            raise _malformed("the head of a block")
        keys = _array(body, at, count, _I4 if width == 4 else _I8).astype(np.int64)
        at += count * width
        names = _array(body, at, count, _U8) if flags & _HAS_NAMES else None
        at += 0 if names is None else 8 * count
        _check_range(keys, num_keys[table])
        asks.append(Ask(table, keys, names, not flags & _NO_PROOF))
    if at != len(body):
        raise _malformed("bytes behind its end")
    return asks


def unchanged(ask: Ask, leaves: HashArray) -> NDArray[np.bool_] | None:
    """Returns which of the records asked for the device holds already; None if it holds nothing."""
    return None if ask.names is None else ask.names == names_of(leaves)


def sent_mask(is_sent: NDArray[np.bool_]) -> bytes:
    """Returns the bits that precede the records of a block that was asked for with names."""
    return np.packbits(is_sent, bitorder="little").tobytes()


def max_answer_bytes(
    asks: Sequence[Ask], record_bytes: Mapping[int, int], nodes: Sequence[int]
) -> int:
    """Returns the length of the longest answer: proofs of this many nodes, bits before records, and
    all records."""
    return HASH_BYTES * sum(nodes) + sum(
        len(ask.keys) * record_bytes[ask.table] + _mask_bytes(ask) for ask in asks
    )


def decode_answer(
    body: bytes | memoryview,
    asks: Sequence[Ask],
    record_bytes: Mapping[int, int] | Sequence[int],
    nodes: Sequence[int],
    *,
    is_cut: bool = False,
) -> list[Answer]:
    """Returns the proofs and records of an answer; whether they are right, the root tells.

    Args:
        nodes: how many the proof before each block has; it follows from its keys.
        is_cut: whether the end is missing. What has arrived whole is returned: the answers may be
            fewer than the asks, and `is_sent` of the last one shorter than its keys.
    """
    answers, at = [], 0
    for ask, count in zip(asks, nodes, strict=True):
        answer, used = _decode_block(memoryview(body)[at:], ask, record_bytes[ask.table], count)
        answers.append(answer)
        at += used
        if answer.proof is None or len(answer.is_sent) < len(ask.keys):
            if not is_cut:
                raise _cut_short(len(body))
            return answers
    if at != len(body):
        raise _cut_short(len(body))
    return answers


def _decode_block(body: memoryview, ask: Ask, length: int, nodes: int) -> tuple[Answer, int]:
    """What arrived whole of one block, and how many bytes that is."""
    start = nodes * HASH_BYTES
    mask = start + _mask_bytes(ask)
    none = np.empty((0, length), np.uint8), np.empty(0, bool)
    if len(body) < start:
        return Answer(None, *none), 0
    proof = np.frombuffer(body[:start], np.uint8).reshape(nodes, HASH_BYTES)
    if len(body) < mask:
        return Answer(proof, *none), 0
    is_sent = np.ones(len(ask.keys), bool)
    if ask.names is not None:
        bits = np.frombuffer(body[start:mask], np.uint8)
        is_sent = np.unpackbits(bits, count=len(ask.keys), bitorder="little").astype(bool)
    sent = np.flatnonzero(is_sent)
    count = min(len(sent), (len(body) - mask) // length) if length else len(sent)
    used = mask + count * length
    records = np.frombuffer(body[mask:used], np.uint8).reshape(count, length)
    # Keys before the first record that is missing are settled: sent, or held by the device.
    settled = int(sent[count]) if count < len(sent) else len(ask.keys)
    return Answer(proof, records, is_sent[:settled]), used


def _mask_bytes(ask: Ask) -> int:
    """The bits before a block that say which of its records follow."""
    return 0 if ask.names is None else -(-len(ask.keys) // 8)


def encode_update(layout: Layout, update: Tree, keys: Mapping[str, Keys], manifest: bytes) -> bytes:
    """Returns the body of an update, which is shaped as the sub-model that `keys` select.

    Args:
        manifest: the digest of the one that it was made from, 32 bytes (`digest_of`).
    """
    layout.check(update, keys)
    leaves = tree.flatten(update)
    pieces = [_UPDATE_HEAD.pack(_UPDATE, len(layout.spaces), len(layout.parts), manifest)]
    for space in layout.spaces:
        z = keys[space.name].array
        pieces += [_COUNT.pack(len(z)), z.astype("<i8").tobytes()]
    pieces += [np.ascontiguousarray(part.to_rows(leaves), "<f4").tobytes() for part in layout.parts]
    body = b"".join(pieces)
    return body + _CHECK.pack(crc32(body))


def max_update_bytes(layout: Layout, max_keys: int) -> int:
    """Returns the length of the longest update of this many keys of each key space, with what a
    device says beside it."""
    numbers = layout.client_size(**{space.name: max_keys for space in layout.spaces})
    keys = len(layout.spaces) * (_COUNT.size + _I8.itemsize * max_keys)
    report = _REPORT_HEAD.size + MAX_REPORT + _CHECK.size
    return report + _UPDATE_HEAD.size + keys + _F4.itemsize * numbers + _CHECK.size


def decode_update(
    body: bytes, layout: Layout, max_keys: int, manifest: bytes
) -> tuple[Tree, dict[str, Keys]]:
    """Returns an update and its keys.

    Raises:
        StaleError: it was made from another manifest than the one of this digest.
        RequestError: it is no update of this layout.
    """
    name, spaces, parts, made_from = _unpack(_UPDATE_HEAD, body, 0)
    if (name, spaces, parts) != (_UPDATE, len(layout.spaces), len(layout.parts)):
        raise _malformed("its head, which belongs to another model")
    if len(body) < _UPDATE_HEAD.size + _CHECK.size or (
        crc32(body[:-4]) != _unpack(_CHECK, body[-4:], 0)[0]
    ):
        raise _malformed("its checksum")
    if made_from != manifest:
        raise StaleError(
            "the update was made for another manifest: got the digest of another round or run; "
            "expected that of the manifest of this round; nothing of it was taken; train on the "
            "slices of this round and send again"
        )
    keys, at = {}, _UPDATE_HEAD.size
    for space in layout.spaces:
        (count,) = _unpack(_COUNT, body, at)
        if count > max_keys:
            raise TooLargeError(
                f"too many keys in one update: got {count}; expected {max_keys}; choose fewer"
            )
        array = _array(body, at + _COUNT.size, count, _I8).astype(np.int64)
        _check_range(array, space.num_keys)
        keys[space.name] = Keys(KeySpace(space.name, space.num_keys), array)
        at += _COUNT.size + 8 * count
    leaves: dict[str, Array] = {}
    for part in layout.parts:
        counts = [len(keys[factor.name]) for factor in part.product.factors]
        rows = int(np.prod(counts, dtype=object)) if counts else 1
        data = _array(body, at, rows * part.slice_size, _F4).astype(np.float32)
        leaves |= part.from_rows(data.reshape(rows, part.slice_size), counts)
        at += data.nbytes
    if at + _CHECK.size != len(body):
        raise _malformed("bytes behind its end")
    return tree.unflatten(layout.structure, leaves), keys


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device says beside its update; null for a metric that is no finite number."""

    weight: float | None = None
    metrics: dict[Annotated[str, msgspec.Meta(pattern=METRIC_NAME)], float | None] = {}


def encode_report(report: Report) -> bytes:
    """Returns what precedes an update whose device says more; nothing where it does not."""
    if report.weight is None and not report.metrics:
        return b""
    told = {name: value if isfinite(value) else None for name, value in report.metrics.items()}
    text = msgspec.json.encode(_Told(report.weight, told))
    if len(text) > MAX_REPORT:
        raise InputError(
            f"the metrics of a client are too many to be sent: got {len(text)} bytes; expected "
            f"{MAX_REPORT} or fewer; report fewer of them, or shorter names"
        )
    body = _REPORT_HEAD.pack(_REPORT, len(text)) + text
    return body + _CHECK.pack(crc32(body))


def split_report(body: bytes, bound: InputBound) -> tuple[Report | None, bytes]:
    """Returns what a device says beside its update, None for nothing, and the update's own bytes.

    Raises:
        RequestError: it is no report, or has not the weight that the round asks for.
    """
    report, rest = None, body
    if body[: len(_REPORT)] == _REPORT:
        _, size = _unpack(_REPORT_HEAD, body, 0)
        end = _REPORT_HEAD.size + size
        if size > MAX_REPORT or _unpack(_CHECK, body, end)[0] != crc32(body[:end]):
            raise _malformed("the checksum or the length of its report")
        try:
            told = msgspec.json.decode(body[_REPORT_HEAD.size : end], type=_Told)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed("its report, or the name of a metric") from error
        metrics = {name: nan if value is None else value for name, value in told.metrics.items()}
        report, rest = Report(None, told.weight, metrics), bytes(body[end + _CHECK.size :])
    weight = None if report is None else report.weight
    if (weight is None) != (bound.max_weight is None) or not _is_weight(weight, bound):
        raise _malformed("its weight, which is not one of this round")
    return report, rest


def _is_weight(weight: float | None, bound: InputBound) -> bool:
    """Whether a weight is a share of the max weight, or a weight where there is none."""
    return weight is None or 0 <= weight <= (LARGEST_WEIGHT if bound.max_weight == inf else 1.0)


def _unpack(form: struct.Struct, body: bytes | bytearray, at: int) -> tuple[Any, ...]:
    try:
        return form.unpack_from(body, at)
    except struct.error as error:
        raise _malformed("its length") from error


def _array(body: bytes | bytearray, at: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """`count` numbers at a place of a body that may be shorter."""
    if at + count * dtype.itemsize > len(body):
        raise _malformed("its length")
    return np.frombuffer(body, dtype, count, at)


def _check_range(keys: KeyArray, num_keys: int) -> None:
    from keyhole.server.rows import all_within

    if not all_within(keys, num_keys - 1):
        # As unsigned numbers, negative keys lie above every key space.
        outside = int(np.sum(keys.view(np.uint64) >= num_keys))
        raise KeySpaceError(
            f"keys lie outside their table: got {outside} of {len(keys)} keys; expected "
            f"0..{num_keys - 1}; make them with the key space of the manifest"
        )


def _malformed(what: str) -> RequestError:
    return RequestError(
        f"the message cannot be read: got wrong: {what}; expected a message as docs/wire.md "
        "describes it; send one of this version and this round"
    )


def _cut_short(length: int) -> DamageError:
    return DamageError(
        f"the answer does not fit the query: got {length} bytes; expected the records asked for, "
        "and nothing else; ask again"
    )


SumPhase: TypeAlias = Literal["open", "closing", "ready", "failed"]
"""The phase of a sum at one aggregator: takes shares; takes no more, compares and adds up; its
share can be fetched; nothing will ever be given out."""


class SumOpening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer opens a sum."""

    party: int  # which aggregator the trainer takes this one for
    terms: bytes  # of the sum, encoded; base64 in JSON
    cohort: list[str]  # all devices that are asked, in an order that both aggregators are told


class Failure(msgspec.Struct, frozen=True):
    """Why nothing was given out: an error without its class."""

    kind: str
    wrong: str
    got: str
    allowed: str
    fix: str

    @staticmethod
    def of(error: KeyholeError) -> Failure:
        """Returns the facts of an error."""
        return Failure(type(error).__name__, error.wrong, error.got, error.allowed, error.fix)

    def __str__(self) -> str:
        return worded(self.wrong, self.got, self.allowed, self.fix)


class SumStatus(msgspec.Struct, frozen=True):
    """How a sum stands at one aggregator."""

    phase: SumPhase
    devices: list[str]  # whose share is here; once it is ready, whose updates are in the sum
    waiting: str = ""  # what a closing sum waits for; empty while it waits for nothing
    failure: Failure | None = None  # why nothing is given out


class SharePlace(msgspec.Struct, frozen=True):
    """What an aggregator says that would take a device's share."""

    party: int  # which of the two it is


class Summaries(msgspec.Struct, frozen=True):
    """The sums of one trainer that an aggregator remembers."""

    rounds: list[str]


T = TypeVar("T")


def read_message(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Returns a message; raises MalformedError where it is none of its kind."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(
            f"a message about a sum that makes no sense: got {len(data)} bytes; expected messages "
            "as docs/wire.md describes them; check that both sides are of one version"
        ) from error


def peer_name(party: int) -> str:
    """Returns what an aggregator is called by the other one."""
    return f"aggregator-{party}"
