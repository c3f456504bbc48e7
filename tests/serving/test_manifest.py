"""The manifest: a layout survives it, and what does not add up is refused."""

import json
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.delivery.records import Coding, RecordField, Records
from keyhole.errors import InputError
from keyhole.serving.manifest import (
    decode_manifest,
    describe_round,
    encode_manifest,
    name_round,
    table_info,
)
from tests.helpers import LAYOUTS, zeros

KINDS = ["plain", "half", "uint8", "uint4"]


def manifest_of(layout, coding=None, **changes):
    tables = [
        table_info(Records.of_part(part, coding or Coding()), layout, place)
        for place, part in enumerate(layout.parts)
    ]
    return describe_round(layout, tables, number=3, step=2, settings={"seed": 7}, **changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_comes_out_of_its_manifest(name, kind):
    layout = LAYOUTS[name]
    manifest = manifest_of(layout, Coding(kind, 9))
    found = decode_manifest(encode_manifest(manifest))
    assert found == manifest
    assert found.layout.parts == layout.parts
    assert found.layout.spaces == layout.spaces
    assert found.layout.structure == layout.structure
    for table, part in zip(found.tables, layout.parts, strict=True):
        assert table.records == Records.of_part(part, Coding(kind, 9))


def test_named_tuples_come_back_as_tuples():
    pair = namedtuple("pair", "w b")
    layout = kh.Layout.of(pair(*zeros(w=(7, 3), b=(3,)).values()))
    found = decode_manifest(encode_manifest(manifest_of(layout)))
    assert found.layout.structure == ("0", "1")


def test_tables_of_select_functions_have_no_layout():
    records = Records("topic", 5, (RecordField("v", (2, 3), np.dtype("f2")),))
    manifest = describe_round(None, [table_info(records)], 0, 0, {})
    found = decode_manifest(encode_manifest(manifest))
    assert found.layout is None
    assert found.tables[0].records == records


def test_a_round_is_named_after_its_number_and_content():
    one = encode_manifest(manifest_of(LAYOUTS["rows"]))
    other = encode_manifest(manifest_of(LAYOUTS["columns"]))
    assert name_round(one, 3) == name_round(one, 3)
    assert len({name_round(one, 3), name_round(other, 3), name_round(one, 4)}) == 3


def _change(path, value):
    def change(content):
        *way, last = path
        for step in way:
            content = content[step]
        content[last] = value

    return change


SEGMENT = {"first": 0, "count": 7, "sums_sha256": "00"}


@pytest.mark.parametrize(
    "change",
    [
        _change(["version"], 2),
        _change(["number"], -1),
        _change(["number"], "3"),
        _change(["surprise"], 1),
        _change(["tables"], []),
        _change(["tables", 0, "num_keys"], 8),
        _change(["tables", 0, "record_bytes"], 13),
        _change(["tables", 0, "coding"], "zip"),
        _change(["tables", 0, "name"], "other"),
        _change(["tables", 0, "factors"], ["other"]),
        _change(["tables", 0, "fields", 0, "dtype"], "O"),
        _change(["tables", 0, "fields", 0, "dtype"], "nonsense"),
        _change(
            ["tables", 0, "fields", 0], {"path": "w", "dtype": "|O", "shape": [7], "axes": [0]}
        ),
        _change(["tables", 0, "fields", 0, "shape"], [-7, 3]),
        _change(["tables", 0, "fields", 0, "axes"], [5]),
        _change(["tables", 0, "fields", 0, "path"], "elsewhere"),
        _change(["tables", 0, "segments"], [{**SEGMENT, "count": 6}]),
        _change(["tables", 0, "segments"], [{**SEGMENT, "first": 1}]),
        _change(["tables", 0, "segments"], [{**SEGMENT, "count": 0}, SEGMENT]),
        _change(["spaces", 0, "num_keys"], 0),
        _change(["spaces"], []),
        _change(["structure"], {"dict": [["w", "nowhere"]]}),
        _change(["structure"], {"set": []}),
        _change(["structure"], 3),
    ],
)
def test_what_does_not_add_up_is_refused(change):
    content = json.loads(encode_manifest(manifest_of(LAYOUTS["rows"])))
    change(content)
    with pytest.raises(InputError, match="not the manifest of a round"):
        decode_manifest(json.dumps(content).encode())


def test_segments_that_hold_every_key_are_accepted():
    content = json.loads(encode_manifest(manifest_of(LAYOUTS["rows"])))
    content["tables"][0]["segments"] = [SEGMENT]
    assert decode_manifest(json.dumps(content).encode()).tables[0].segments[0].count == 7


@given(st.binary(max_size=60))
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(InputError):
        decode_manifest(data)
