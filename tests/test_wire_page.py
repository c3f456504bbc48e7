"""docs/wire.md: its examples, constants, routes and names are those of the code."""

import re

import numpy as np
import pytest

from keyhole import errors
from keyhole.server.record_sums import sum_records
from keyhole.serving.manifest import FieldInfo, Manifest, SegmentInfo, SpaceInfo, TableInfo
from keyhole.serving.service.access import Claims
from keyhole.serving.service.slice_routes import SliceRoutes
from keyhole.serving.service.update_routes import UpdateRoutes
from keyhole.serving.wire import Ask, encode_query
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "wire.md").read_text()
MASK = 2**64 - 1


def test_the_example_of_a_query_is_what_is_sent():
    (example,) = re.findall(r"^    (4b485131 .*)$", PAGE, re.M)
    assert bytes.fromhex(example) == encode_query([Ask(1, np.array([5, 2, 5]))])


def mix(z):
    """As the page has it."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def sum_by_the_page(record):
    def constant(i):
        return mix(0x6B6579686F6C6531 + (i + 1) * 0x9E3779B97F4A7C15 & MASK)

    record += bytes(-len(record) % 4)
    words = [1, *(int.from_bytes(record[i : i + 4], "little") for i in range(0, len(record), 4))]
    a = sum(constant(2 * i) * w for i, w in enumerate(words)) & MASK
    b = sum(constant(2 * i + 1) * w for i, w in enumerate(words)) & MASK
    return (a >> 32) * 2**32 + (b >> 32)


@pytest.mark.parametrize("record", [b"", b"\1", b"keyhole", bytes(range(256))])
def test_sums_follow_from_the_page_alone(record):
    assert sum_by_the_page(record) == sum_records(np.frombuffer(record, np.uint8)[None])[0]


def test_the_constants_of_sums_are_on_the_page():
    for number in ("0x6b6579686f6c6531", "0x9e3779b97f4a7c15", "0xbf58476d1ce4e5b9"):
        assert number in PAGE
    assert f"{sum_by_the_page(b''):#x}" in PAGE


def test_every_route_is_on_the_page():
    served = [*SliceRoutes(None, None).routes(), *UpdateRoutes(None, None, None, None).routes()]
    named = {"round": "id", "table": "t", "place": "i", "key": "key"}
    for route in served:
        shown = re.sub(r"\{(\w+)\}", lambda m: f"{{{named[m[1]]}}}", route.pattern)
        assert re.search(rf"{re.escape(shown)}(\s|$)", PAGE, re.M), route.pattern


@pytest.mark.parametrize(
    "message", [Manifest, TableInfo, FieldInfo, SegmentInfo, SpaceInfo, Claims]
)
def test_every_name_of_a_message_is_on_the_page(message):
    for name in message.__struct_fields__:
        assert re.search(rf"[`\"]{name}[`\"]", PAGE), name


def test_the_errors_on_the_page_exist():
    for kind in re.findall(r"\"kind\": \"(\w+)\"", PAGE):
        assert kind in errors.__all__
