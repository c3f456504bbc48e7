"""Downloads a table as it lies at the service, resumed where it was cut, and checks it."""

from __future__ import annotations

from functools import partial
from hashlib import sha256

import numpy as np

from keyhole.delivery.records import RecordArray
from keyhole.device.fetch import FetchTraffic, KnownRound
from keyhole.errors import DamageError, NotFoundError
from keyhole.server.checksums import sum_records
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import refuse_longer

_SUM_BYTES = 8


def download_table(
    client: HttpClient,
    known: KnownRound,
    table: int,
    *,
    token: str | None,
    max_bytes: int,
    traffic: FetchTraffic,
) -> RecordArray:
    """Returns all records of a table, (K, record_bytes)."""
    info = known.manifest.tables[table]
    if not info.segments:
        raise NotFoundError(
            f"table {info.name!r} cannot be downloaded: got a table that is computed on demand; "
            "expected a table of segments; ask for slices of it, with fetch_slices"
        )
    download = partial(download_segment, token=token, max_bytes=max_bytes, traffic=traffic)
    pieces = [download(client, known, table, place) for place in range(len(info.segments))]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def download_segment(
    client: HttpClient,
    known: KnownRound,
    table: int,
    place: int,
    *,
    token: str | None,
    max_bytes: int,
    traffic: FetchTraffic,
) -> RecordArray:
    """Returns the records of one segment, (count, record_bytes).

    Its sums are held to the manifest, its records to the sums, and to their SHA-256 where the
    manifest has it.
    """
    info, segment = known.manifest.tables[table], known.segment(table, place)
    refuse_longer("a segment", segment.count * max(info.record_bytes, _SUM_BYTES), max_bytes)
    path = f"/v1/rounds/{known.id}/tables/{table}/segments/{place}"

    def check_sums(body: memoryview) -> None:
        if sha256(body).hexdigest() != segment.sums_sha256:
            raise _damaged(known, "sums that the manifest does not vouch for")

    limit = segment.count * _SUM_BYTES
    body = client.get(f"{path}/sums", token=token, limit=limit, check=check_sums).body
    sums = np.frombuffer(body, "<u8")

    def check_records(body: memoryview) -> None:
        records = np.frombuffer(body, np.uint8)
        if len(records) != segment.count * info.record_bytes or len(sums) != segment.count:
            raise _damaged(known, "a segment of another length")
        if not np.array_equal(sum_records(records.reshape(segment.count, info.record_bytes)), sums):
            raise _damaged(known, "records that do not fit their sums")
        if segment.sha256 is not None and sha256(body).hexdigest() != segment.sha256:
            raise _damaged(known, "records that the manifest does not vouch for")

    limit = segment.count * info.record_bytes
    records = client.get(path, token=token, limit=limit, check=check_records).body
    traffic.requests += 2
    traffic.bytes_down += len(body) + len(records)
    return np.frombuffer(records, np.uint8).reshape(segment.count, info.record_bytes)


def _damaged(known: KnownRound, what: str) -> DamageError:
    return DamageError(
        f"a segment of round {known.id} was damaged: got {what}; expected the segment that was "
        "published; fetch it again; if it happens every time, the service's files are damaged"
    )
