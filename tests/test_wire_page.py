"""docs/wire.md: its examples, constants, routes and names are those of the code."""

import json
import re
import struct
from hashlib import blake2b, sha256
from math import isqrt

import numpy as np
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyhole import errors
from keyhole.crypto.cuckoo import Placement, batch_shape
from keyhole.crypto.dpf import Domain
from keyhole.crypto.merkle import Tree, hash_leaves, prove
from keyhole.delivery import all_deliveries
from keyhole.delivery.base import PrivateTable
from keyhole.delivery.enclave.messages import EnclaveParams
from keyhole.delivery.pir import two_server
from keyhole.delivery.pir.database import Database, PirParams
from keyhole.delivery.pir.messages import seal
from keyhole.delivery.pir.two_server import Batch
from keyhole.delivery.popular import popular_of
from keyhole.experiments.specs import spec_of
from keyhole.primitives.coding import mix
from keyhole.rounds.fields import VERSION
from keyhole.rounds.spec import ClientSpec, DeviceSpec, KeySpec
from keyhole.service import relay
from keyhole.service.access import TokenClaims
from keyhole.service.app import SliceRoutes, UpdateRoutes
from keyhole.service.private import QueryRoutes
from keyhole.wire.http import REFUSAL
from keyhole.wire.manifest import (
    FieldInfo,
    Manifest,
    SegmentInfo,
    SpaceInfo,
    TableInfo,
    digest_of,
)
from keyhole.wire.messages import Ask, encode_query, encode_update
from keyhole.wire.private import name_table
from tests.helpers import LAYOUTS, ROOT
from tests.service.small_service import random_model

PAGE = (ROOT / "docs" / "wire.md").read_text()


def test_the_example_of_a_query_is_what_is_sent():
    (example,) = re.findall(r"^    (4b485132 .*)$", PAGE, re.M)
    assert bytes.fromhex(example) == encode_query([Ask(1, np.array([5, 2, 5]))])


def test_the_head_of_an_update_is_that_of_the_page():
    table = PAGE.split("## Update\n")[1].split("| for each key space")[0]
    widths = [int(width) for width in re.findall(r"^\| (\d+) \|", table, re.M)]
    name = round_named(b"manifest")
    layout = LAYOUTS["rows"]
    keys = {"row": layout.spaces[0].keys([])}
    update = layout.select(random_model(layout), keys)
    head = encode_update(layout, update, keys, digest_of(name))[: sum(widths)]
    assert head == b"KHU2" + struct.pack("<HH", 1, 1) + sha256(b"manifest").digest()
    assert f"`{head[:4].decode()}`" in table


def round_named(encoded):
    """The identifier of a round with this manifest."""
    return f"0-{sha256(encoded).hexdigest()}"


def root_by_the_page(records):
    """The root of a table, from what the page says of leaves and nodes."""
    leaf, node = (word.ljust(32, b"\0") for word in (b"keyhole leaf", b"keyhole node"))
    level = [blake3(record, key=leaf).digest() for record in records]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        rest = level[-1:] if len(level) % 2 else []
        level = [blake3(one + other, key=node).digest() for one, other in pairs] + rest
    return level[0]


@pytest.mark.parametrize("count", [1, 2, 5, 8, 11])
def test_roots_follow_from_the_page_alone(count):
    records = np.arange(7 * count, dtype=np.uint8).reshape(count, 7)
    assert root_by_the_page([r.tobytes() for r in records]) == Tree.of(hash_leaves(records)).root


def test_the_example_of_a_proof_is_what_is_sent():
    (nodes,) = re.findall(r"proof for keys 2 and 5 of 7 is: nodes (.*)\.", PAGE)
    tree = Tree.of(hash_leaves(np.zeros((7, 1), np.uint8)))
    named = [tree.level(int(level))[int(at)] for level, at in re.findall(r"(\d)/(\d)", nodes)]
    np.testing.assert_array_equal(prove(tree, np.array([2, 5])), named)


def test_every_route_is_on_the_page():
    served = [
        *SliceRoutes(None, None).routes(),
        *UpdateRoutes(None, None, None, None).routes(),
        *QueryRoutes(None, None, None, None).routes(),
    ]
    named = {"round": "id", "table": "t", "place": "i", "key": "key", "scheme": "scheme"}
    for route in served:
        shown = re.sub(r"\{(\w+)\}", lambda m: f"{{{named[m[1]]}}}", route.pattern)
        assert re.search(rf"{re.escape(shown)}(\s|$)", PAGE, re.M), route.pattern


@pytest.mark.parametrize(
    "message", [Manifest, TableInfo, FieldInfo, SegmentInfo, SpaceInfo, TokenClaims]
)
def test_every_name_of_a_message_is_on_the_page(message):
    for name in message.__struct_fields__:
        assert re.search(rf"[`\"]{name}[`\"]", PAGE), name


def test_the_errors_on_the_page_exist():
    for kind in re.findall(r"\"kind\": \"(\w+)\"", PAGE):
        assert kind in errors.__all__


def test_terms_and_frames_follow_from_the_page_alone():
    records = np.arange(60, dtype=np.uint8).reshape(20, 3)
    name = blake2b(b"3-00ff/tables/1", digest_size=16, person=b"keyhole-round").digest()
    assert name == name_table("3-00ff", 1)
    model = sha256(b"manifest").digest()
    params = two_server.params_of(
        Database.of(PrivateTable.of("3-00ff/tables/1", model, records, 2))
    )
    root = root_by_the_page([record.tobytes() for record in records])
    by_page = b"KHT3\2\0\0\0" + name + model + root + struct.pack("<QQQ", 20, 3, 2)
    assert params.encode() == by_page
    about = b"\1\0\0" + name + sha256(by_page).digest()
    query, reply = b"KHP2\1" + about + b"body", b"KHP2\2" + about + b"body"
    assert seal("query", params, 1, b"body") == query + sha256(query).digest()[:16]
    check = AESGCM(b"keyhole-pir-repl").encrypt(bytes(12), b"", reply)
    assert seal("reply", params, 1, b"body") == reply + check
    assert b"KHP2\3" + bytes(67) == REFUSAL


def test_params_of_popular_keys_and_what_is_dropped_follow_from_the_page_alone():
    model, records = sha256(b"manifest").digest(), np.zeros((400, 3), np.uint8)
    popular = popular_of({"word": ("0-3+100+7-49", 0.75)}, ["word"], 400, 10)
    table = PrivateTable.of("3-00ff/tables/1", model, records, 10, popular)
    params = PirParams.of("two-server", table.public)
    names = table.name + model + table.tree.root
    ranges = struct.pack("<QQ6Q", 8, 3, 0, 3, 7, 49, 100, 100)
    whole = b"KHT3\2\0\0\0" + names + struct.pack("<QQQ", 400, 3, 10) + ranges
    assert params.encode() == whole
    round_name = blake2b(whole, digest_size=16, person=b"keyhole-popular").digest()
    names = round_name + model + table.tree.root
    assert [each.encode() for each in params.tables] == [
        b"KHT3\2\0\0\0" + names + struct.pack("<QQQ", 48, 3, 8),
        b"KHT3\2\1\0\0" + names + struct.pack("<QQQ", 400, 3, 2),
    ]
    keys = np.arange(200, 210)
    seed = np.frombuffer(model[:8], "<u8")
    drawn = mix(mix(keys.astype(np.uint64)) ^ seed).tolist()
    _, whole_asked, _ = popular.split(keys, 2, int(seed[0]))
    assert (
        keys[whole_asked].tolist() == [key for _, key in sorted(zip(drawn, keys, strict=True))][:2]
    )


@pytest.mark.parametrize("num_keys", [20, 1500, 5000])  # with and without buckets, and paths
def test_a_reply_begins_with_the_check_of_its_query_as_the_page_says(num_keys):
    records, path = np.arange(3 * num_keys).astype(np.uint8).reshape(num_keys, 3), 0
    if num_keys > 4096:
        path = 32
    database = Database.of(PrivateTable.of("3", bytes(32), records, 110))
    params = two_server.params_of(database)
    query = two_server.TwoServerClient(params).query(np.array([5])).messages()[0]
    (reply,) = two_server.servers_of(database)[0].answer([query])
    assert reply[56:72] == query[-16:]
    assert len(reply) == 56 + 16 + Batch.of(params).num_queries * (3 + path) + 16
    assert two_server.TwoServerPir().lengths(params.encode()).reply == len(reply)


@pytest.mark.parametrize("num_points", [1, 24, 231, 2308, 23256, 10**6])
def test_the_shape_of_a_point_function_is_that_of_the_page(num_points):
    pairs = [(d, -(-num_points // (8 << d))) for d in range(21)]
    assert min(pairs, key=lambda pair: 65 * pair[0] + 4 * pair[1]) == (
        Domain(num_points).depth,
        Domain(num_points).leaf_bytes,
    )


def test_a_two_server_query_is_as_long_as_the_page_says():
    records = np.zeros((1500, 9), np.uint8)
    params = two_server.params_of(Database.of(PrivateTable.of("3", bytes(32), records, 110)))
    batch = Batch.of(params)

    def corrections(n, domain):
        d, leaf = domain.depth, domain.leaf_bytes
        return -(-2 * d * n // 8) + 16 * n * d + n * leaf

    shape = batch.shape
    body = 32 + corrections(shape.num_buckets, batch.bucket)
    body += corrections(shape.stash, batch.table)
    assert shape.num_buckets > 0
    assert two_server.TwoServerPir().lengths(params.encode()).query == 72 + body


def test_what_the_page_says_of_relays_and_enclaves_is_there():
    for name in (relay.RELAY_PATH, relay.RELAY_KEYS_PATH, relay.GATEWAY_PATH):
        assert name in PAGE
    assert len(EnclaveParams(bytes(16), bytes(32), bytes(32), 1, 1, 1).encode()) == 112


def test_what_a_device_is_told_of_training_is_on_the_page():
    told = DeviceSpec.__struct_fields__ + ClientSpec.__struct_fields__ + KeySpec.__struct_fields__
    for name in told:
        assert re.search(rf"[`\"]{name}[`\"]", PAGE), name
    assert re.search(rf"^\| `version` \| {VERSION} \|$", PAGE, re.M)
    for name in [each.about.name for each in all_deliveries()]:
        assert f"`{name}`" in PAGE
    own, shipped = (
        spec_of("so_tag").changed({"task": task}).for_devices()["task"]
        for task in ({"name": "films:TASK", "identity": "films 1"}, "so_tag")
    )
    assert shipped == "so_tag"
    assert f"of any other task `{{{', '.join(map(json.dumps, own))}}}`" in PAGE


@pytest.mark.parametrize(
    ("max_keys", "num_keys"), [(32, 10**6), (40, 3000), (40, 5000), (1000, 10**5)]
)
def test_buckets_follow_from_the_page_alone(max_keys, num_keys):
    """The permutations, in the letters of the page."""
    shape = batch_shape(max_keys, num_keys)
    if max_keys <= 32 or max_keys * num_keys <= 131_072:
        assert (shape.num_buckets, shape.stash) == (0, max_keys)
        return
    few, many = (
        -(-13 * max_keys // 10) + 2,
        -(-(109 * max_keys + isqrt(44_100 * max_keys)) // 100) - 1,
    )
    assert (shape.num_buckets, shape.stash) == ((few, 2) if max_keys < 100 else (many, 1))
    buckets, keys = shape.num_buckets, [0, 7, num_keys - 1]
    placement = Placement(num_keys, buckets)
    borders = [i * buckets // 3 for i in range(4)]
    for k, row, columns in zip(keys, *placement.places_of(np.array(keys)), strict=True):
        for i in range(3):
            rank, count = permuted(k, i, num_keys, buckets), borders[i + 1] - borders[i]
            assert (borders[i] + rank % count, rank // count) == (row[i], columns[i])


def permuted(k, i, num_keys, buckets):
    """pi_i(k), as the page describes it."""
    a = next(a for a in range(num_keys) if a * a >= num_keys)
    sides = a, -(-num_keys // a)
    facts = struct.pack("<QQQ", num_keys, 3, buckets)
    digest = blake2b(facts, digest_size=8, person=b"keyhole-cuckoo").digest()
    s = int.from_bytes(digest, "little")
    while True:
        pair = [k % a, k // a]
        for t in range(8):
            h = mixed(pair[1 - t % 2] ^ mixed(mixed(8 * i + t) ^ s)) >> 32
            pair[t % 2] = (pair[t % 2] + (h * sides[t % 2] >> 32)) % sides[t % 2]
        k = a * pair[1] + pair[0]
        if k < num_keys:
            return k


def mixed(x):
    """SplitMix64's finalizer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31
