"""A rounds directory written by hand, as docs/wire.md describes it: no publisher is needed."""

import json
from hashlib import sha256

import numpy as np

from keyhole.delivery.records import RecordField, Records
from keyhole.server.checksums import sum_records
from keyhole.wire.manifest import (
    SegmentInfo,
    describe_round,
    encode_manifest,
    name_round,
    table_info,
)


def write_round(
    directory, number, *, num_keys=60, width=8, per_segment=25, strong=False, make_current=True
):
    """Writes one round of random records, two tables; returns its name."""
    rng = np.random.default_rng(number)
    building = directory / "rounds" / ".hand-made"
    tables = []
    for place, (name, keys, size) in enumerate([("word", num_keys, width), ("everyone", 1, 3)]):
        records = Records(name, keys, (RecordField("w", (size,), np.dtype("f4")),))
        data = rng.integers(0, 256, (keys, records.record_bytes), dtype=np.uint8)
        segments = []
        (building / f"table-{place}").mkdir(parents=True)
        for segment, first in enumerate(range(0, keys, per_segment)):
            block = data[first : first + per_segment]
            sums = sum_records(block).astype("<u8").tobytes()
            stem = building / f"table-{place}" / f"seg-{segment}"
            stem.with_suffix(".bin").write_bytes(block.tobytes())
            stem.with_suffix(".sum").write_bytes(sums)
            digest = sha256(block.tobytes()).hexdigest() if strong else None
            segments.append(SegmentInfo(first, len(block), sha256(sums).hexdigest(), digest))
        tables.append(replaced(table_info(records), tuple(segments)))
    encoded = encode_manifest(describe_round(None, tables, number, number, {}))
    (building / "manifest.json").write_bytes(encoded)
    name = name_round(encoded, number)
    building.rename(directory / "rounds" / name)
    if make_current:
        current = {"round": name, "number": number, "phase": "open"}
        (directory / "current.json").write_text(json.dumps(current))
    return name


def replaced(info, segments):
    """The table with segments."""
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    return type(info)(**{**fields, "segments": segments})


def content_of(directory, name):
    """Relative path -> bytes of all files of a round."""
    folder = directory / "rounds" / name
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
