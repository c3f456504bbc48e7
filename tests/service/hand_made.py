"""A rounds directory written by hand, as docs/wire.md describes it: no publisher is needed."""

import json

import numpy as np
from msgspec.structs import replace

from keyhole.crypto.merkle import Tree, hash_leaves
from keyhole.delivery.records import RecordField, Records
from keyhole.wire.manifest import (
    SegmentInfo,
    describe_round,
    encode_manifest,
    name_round,
    table_info,
)


def write_round(directory, number, *, num_keys=60, width=8, per_segment=25, make_current=True):
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
            path = building / f"table-{place}" / f"seg-{segment}.bin"
            path.write_bytes(block.tobytes())
            segments.append(SegmentInfo(first, len(block)))
        tree = Tree.of(hash_leaves(data))
        (building / f"table-{place}" / "tree.bin").write_bytes(tree.nodes.tobytes())
        tables.append(replace(table_info(records), root=tree.root.hex(), segments=tuple(segments)))
    encoded = encode_manifest(describe_round(None, tables, number, number, {}))
    (building / "manifest.json").write_bytes(encoded)
    name = name_round(encoded, number)
    building.rename(directory / "rounds" / name)
    if make_current:
        current = {"round": name, "number": number, "phase": "open"}
        (directory / "current.json").write_text(json.dumps(current))
    return name


def content_of(directory, name):
    """Relative path -> bytes of all files of a round."""
    folder = directory / "rounds" / name
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
