"""Fetches the frozen leaves of a model: each row once for as long as its table stays the same.

A device keeps rows under the root of their table, on its disk where it has a cache there. A row
that it has under the root of the round is not asked for again. One whose keys are its own affair
downloads whole tables, once; the service learns from either how much a device had before.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, KeyArray
from keyhole.crypto.merkle import hash_leaves
from keyhole.delivery.records import RecordArray, Records
from keyhole.device.device import Assignment, Device
from keyhole.device.fetch import FetchTraffic, Submodel
from keyhole.errors import StorageError


def with_frozen(device: Device, round: Assignment | str, fetched: Submodel) -> Submodel:
    """Returns a sub-model with the frozen leaves of its keys, where the round has some: whole
    tables are downloaded unless the service was told the keys."""
    known, traffic = device.known(round), fetched.traffic
    if known.frozen_layout is None:
        return fetched
    leaves: dict[str, Array] = {}
    for place, part in enumerate(known.frozen_layout.parts, known.trained):
        keys = part.keys_of(fetched.keys).array
        records = _records_of(device, round, place, keys, fetched.is_told, traffic)
        counts = [len(fetched.keys[factor.name]) for factor in part.product.factors]
        leaves |= part.from_rows(known.records[place].decode_rows(records), counts)
    frozen = tree.unflatten(known.frozen_layout.structure, leaves)
    return replace(fetched, frozen=frozen)


def _records_of(
    device: Device,
    round: Assignment | str,
    place: int,
    keys: KeyArray,
    is_told: bool,
    traffic: FetchTraffic,
) -> RecordArray:
    """The records of one table, of which only those that the device lacks are sent."""
    info = device.known(round).manifest.tables[place]
    # Of one root there is one content: what is kept under it was held to it when it came.
    named = replace(info.records, name=info.root)
    distinct, places = np.unique(keys, return_inverse=True)
    held = device.frozen.find(named, distinct)
    is_held = np.zeros(len(distinct), bool) if held is None else held.is_held
    if is_held.all():
        return np.empty((0, info.record_bytes), np.uint8) if held is None else held.records[places]
    if not is_told:
        every = np.arange(info.num_keys)
        whole = device.fetch_table(round, place, traffic)
        _keep(device, named, every, whole)
        return whole[keys]
    missing = distinct[~is_held]
    (found,) = device.fetch_records(round, [(place, missing)], traffic)
    _keep(device, named, missing, found.records)
    records = np.empty((len(distinct), info.record_bytes), np.uint8)
    records[~is_held] = found.records
    if held is not None:
        records[is_held] = held.records[is_held]
    return records[places]


def _keep(device: Device, named: Records, keys: KeyArray, records: RecordArray) -> None:
    with suppress(StorageError):  # a full disk keeps nobody from taking part
        device.frozen.keep([(named, keys, records, hash_leaves(records))])
