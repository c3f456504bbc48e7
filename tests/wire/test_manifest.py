"""The manifest: a layout survives it, and what does not add up is refused."""

import json
from collections import namedtuple
from functools import reduce
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.delivery.records import Coding, RecordField, Records
from keyhole.errors import InputError
from keyhole.wire.manifest import (
    MAX_BYTES,
    decode_manifest,
    describe_round,
    digest_of,
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
    assert digest_of(name_round(one, 3)) == sha256(one).digest()


@pytest.mark.parametrize("name", ["3", "3-" + 16 * "0", "3-" + 65 * "0", "03-" + 64 * "0"])
def test_no_digest_is_taken_from_what_is_no_round(name):
    with pytest.raises(InputError, match="64 hex digits"):
        digest_of(name)


def _change(path, value):
    def change(content):
        *way, last = path
        for step in way:
            content = content[step]
        content[last] = value

    return change


SEGMENT, ROOT = {"first": 0, "count": 7}, 64 * "0"


@pytest.mark.parametrize(
    "change",
    [
        _change(["version"], 1),
        _change(["number"], -1),
        _change(["number"], "3"),
        _change(["number"], 10**18),
        _change(["step"], -1),
        _change(["surprise"], 1),
        _change(["tables"], []),
        _change(["tables", 0, "num_keys"], 8),
        _change(["tables", 0, "record_bytes"], 13),
        _change(["tables", 0, "coding"], "zip"),
        _change(["tables", 0, "name"], "other"),
        _change(["tables", 0, "factors"], ["other"]),
        _change(["tables", 0, "fields", 0, "dtype"], "O"),
        _change(["tables", 0, "fields", 0, "dtype"], "nonsense"),
        _change(["tables", 0, "fields", 0, "dtype"], ">f4"),
        _change(["tables", 0, "fields", 0, "dtype"], "float32"),
        _change(["tables", 0, "fields", 0, "dtype"], "<f16"),
        _change(
            ["tables", 0, "fields", 0], {"path": "w", "dtype": "|O", "shape": [7], "axes": [0]}
        ),
        _change(["tables", 0, "fields", 0, "shape"], [-7, 3]),
        _change(["tables", 0, "fields", 0, "shape"], [7, 2**63]),
        _change(["tables", 0, "fields", 0, "shape"], [7, 0, 2**64]),
        _change(["tables", 0, "fields", 0, "shape"], [7, 3, *[1] * 70]),
        _change(["tables", 0, "fields", 0, "axes"], [5]),
        _change(["tables", 0, "fields", 0, "axes"], None),
        _change(["tables", 0, "fields", 0, "path"], "elsewhere"),
        _change(["tables", 0, "segments"], [SEGMENT]),
        _change(["tables", 0, "root"], ROOT),
        *(
            lambda content, root=root, segments=segments: content["tables"][0].update(
                root=root, segments=segments
            )
            for root, segments in (
                (ROOT, [{**SEGMENT, "count": 6}]),
                (ROOT, [{**SEGMENT, "first": 1}]),
                (ROOT, [{**SEGMENT, "count": 0}, SEGMENT]),
                (ROOT[1:], [SEGMENT]),
                (ROOT.replace("0", "A"), [SEGMENT]),
            )
        ),
        _change(["spaces", 0, "num_keys"], 0),
        _change(["spaces"], []),
        _change(["structure"], {"dict": [["w", "nowhere"]]}),
        _change(["structure"], {"set": []}),
        _change(["structure"], 3),
        _change(["structure"], None),
    ],
)
def test_what_does_not_add_up_is_refused(change):
    content = json.loads(encode_manifest(manifest_of(LAYOUTS["rows"])))
    change(content)
    with pytest.raises(InputError, match="not the manifest of a round"):
        decode_manifest(json.dumps(content).encode())


@pytest.mark.parametrize(
    "structure",
    [
        None,
        "w",
        {"tuple": ["w", "w"]},
        {"list": "w"},
        {"list": ["w"]},
        {"dict": [["v", "w"]]},
        {"dict": [["w", "w"], ["w", "w"]]},
        {"dict": [["w", "w"], ["v", "w"]]},
        reduce(lambda node, _: {"list": [node]}, range(100), "w"),
    ],
)
def test_a_structure_of_other_paths_is_refused(structure):
    content = json.loads(encode_manifest(manifest_of(kh.Layout.of(zeros(w=(7, 3))))))
    assert content["structure"] == {"dict": [["w", "w"]]}
    decode_manifest(json.dumps(content).encode())
    content["structure"] = structure
    with pytest.raises(InputError, match="not the manifest of a round"):
        decode_manifest(json.dumps(content).encode())


def test_an_axis_counted_from_the_end_is_refused():
    cut = kh.Cut(kh.KeySpace("row", 7), {"w": 0})
    content = json.loads(encode_manifest(manifest_of(kh.Layout.of(zeros(w=(7,)), cut))))
    content["tables"][0]["fields"][0]["axes"] = [-1]
    content["tables"][0]["record_bytes"] *= 7  # as if nothing were cut: so it adds up
    with pytest.raises(InputError, match="not the manifest of a round"):
        decode_manifest(json.dumps(content).encode())


FUNCTION = {"path": ".", "dtype": "<f4", "shape": [2], "axes": None}


@pytest.mark.parametrize(
    "change",
    [
        _change(["tables", 0, "num_keys"], -3),
        _change(["tables", 0, "num_keys"], 0),
        _change(["tables", 0, "num_keys"], 2**61),
        _change(["tables", 0, "fields"], [FUNCTION, FUNCTION]),
        _change(["tables", 0, "fields", 0, "axes"], [0]),
        _change(["tables", 0, "factors"], ["topic"]),
        _change(["spaces"], [{"name": "topic", "num_keys": 4}]),
        _change(["structure"], "v"),
    ],
)
def test_what_does_not_add_up_without_a_layout_is_refused(change):
    records = Records("topic", 4, (RecordField(".", (2,), np.dtype("f4")),))
    content = json.loads(encode_manifest(describe_round(None, [table_info(records)], 0, 0, {})))
    decode_manifest(json.dumps(content).encode())
    change(content)
    if len(content["tables"][0]["fields"]) == 2:
        content["tables"][0]["record_bytes"] *= 2
    with pytest.raises(InputError, match="not the manifest of a round"):
        decode_manifest(json.dumps(content).encode())


@pytest.mark.parametrize("name", ["settings", "structure", "surprise"])
def test_brackets_without_end_are_refused(name):
    text = encode_manifest(manifest_of(LAYOUTS["rows"])).decode()
    deep = f'{{\n "{name}": {{"a": {"[" * 5000}{"]" * 5000}}},'
    with pytest.raises(InputError, match="not the manifest of a round"):
        decode_manifest(text.replace("{", deep, 1).encode())


def test_a_manifest_that_nobody_would_fetch_is_refused():
    data = encode_manifest(manifest_of(LAYOUTS["rows"]))
    assert decode_manifest(data.ljust(MAX_BYTES)).number == 3
    with pytest.raises(InputError, match="more than"):
        decode_manifest(data.ljust(MAX_BYTES + 1))


def test_a_refused_layout_is_told_in_four_facts():
    content = json.loads(encode_manifest(manifest_of(LAYOUTS["rows"])))
    content["spaces"][0]["num_keys"] = 0
    with pytest.raises(InputError) as caught:
        decode_manifest(json.dumps(content).encode())
    assert str(caught.value).count("expected") == 1


def test_segments_that_hold_every_key_are_accepted():
    content = json.loads(encode_manifest(manifest_of(LAYOUTS["rows"])))
    content["tables"][0] |= {"root": ROOT, "segments": [SEGMENT]}
    assert decode_manifest(json.dumps(content).encode()).tables[0].segments[0].count == 7


@given(st.binary(max_size=60))
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(InputError):
        decode_manifest(data)
