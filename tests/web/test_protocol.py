"""The device in JavaScript says the bytes that Python says: docs/wire.md, read twice."""

import asyncio
from contextlib import contextmanager
from hashlib import blake2b
from zlib import crc32

import numpy as np
import pytest
from blake3 import blake3

from keyhole.crypto.cuckoo import Placement, batch_shape, place
from keyhole.crypto.dpf import (
    Domain,
    decode_corrections,
    encode_corrections,
    expand,
    share_from_roots,
)
from keyhole.crypto.merkle import Tree, hash_leaves
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import PrivateTable
from keyhole.delivery.paths import top_of
from keyhole.delivery.pir import two_server
from keyhole.delivery.pir.database import Database
from keyhole.delivery.records import Coding
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.primitives.report import Report
from keyhole.server.inputs import InputBound
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.answers import answer_query
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import (
    Ask,
    decode_update,
    encode_query,
    encode_report,
    encode_update,
    split_report,
)
from keyhole.wire.signing import SigningKey
from tests.service.small_service import Service, random_model
from tests.web.node import Node, RefusedError, needs_node

pytestmark = needs_node

WORDS, TAGS = 300, 3
WORD = KeySpace("word", WORDS)
LAYOUT = Layout.of(
    {"kernel": np.zeros((WORDS, TAGS), np.float32), "bias": np.zeros(TAGS, np.float32)},
    Cut(WORD, {"kernel": 0}),
)
MODEL = random_model(LAYOUT)


@pytest.fixture(scope="module")
def node():
    with Node() as process:
        yield process


@contextmanager
def a_round(directory, coding="plain", **settings):
    """A published round of a tag model: its manifest as it is served, and its tables."""
    service = Service(directory)
    with service.publisher:
        state = ServerState.dense(LAYOUT, MODEL, SGD(lr=1.0))
        made = service.publish_state(state, coding=Coding(coding, 7), settings=settings).published
        with service.rounds.hold(made.id) as held:
            yield held
    service.rounds.close()


@pytest.mark.parametrize("length", [0, 1, 64, 65, 1024, 1025, 2000, 5000])
def test_hashes_are_those_of_python(node, length):
    data = bytes(np.random.default_rng(length).integers(0, 256, length, np.uint8))
    key = b"keyhole leaf".ljust(32, b"\0")
    assert node.call("blake3", "keyhole leaf", data) == blake3(data, key=key).digest()
    assert node.call("crc32", data) == crc32(data)
    short = data[:128]
    expected = blake2b(short, digest_size=16, person=b"keyhole-tree").digest()
    assert node.call("blake2b", short, 16, "keyhole-tree") == expected


def test_a_query_in_the_clear_has_the_bytes_of_python(node):
    expected = encode_query([Ask(1, np.array([5, 2, 5])), Ask(0, np.array([0]))])
    asks = [{"place": 1, "keys": [5, 2, 5]}, {"place": 0, "keys": [0]}]
    assert node.call("encodeQuery", asks) == expected


@pytest.mark.parametrize("coding", ["plain", "half", "uint8", "uint4"])
def test_slices_decode_to_the_numbers_of_python(node, tmp_path, coding):
    keys = np.array([7, 2, 299, 7, 0])
    with a_round(tmp_path, coding) as held:
        asks = [Ask(0, np.array([0])), Ask(1, keys)]

        async def gather(table, keys, out):
            return await table.fetch(keys, out)

        body, _ = asyncio.run(answer_query(asks, held.tables, gather))
        shown = [{"place": 0, "keys": [0]}, {"place": 1, "keys": keys.tolist()}]
        bias, rows = node.call("decodeAnswer", held.id, held.encoded, shown, bytes(body))
        decoded = held.manifest.tables[1].records.decode(
            asyncio.run(held.tables[1].fetch(keys)).records
        )
        np.testing.assert_array_equal(bias[0], MODEL["bias"])
        np.testing.assert_array_equal(np.stack(rows), decoded["kernel"])
        altered = bytearray(body)
        altered[-1] ^= 1
        with pytest.raises(RefusedError, match="not those of the round") as raised:
            node.call("decodeAnswer", held.id, held.encoded, shown, bytes(altered))
        assert raised.value.kind == "DamageError"


def test_a_manifest_is_read_or_refused(node, tmp_path):
    with a_round(tmp_path) as held:
        assert node.call("readManifest", held.id, held.encoded) == "read"
        with pytest.raises(RefusedError, match="damaged on its way"):
            node.call("readManifest", held.id, held.encoded.replace(b"word", b"wort"))
        renamed = f"9{held.id[held.id.index('-') :]}"
        with pytest.raises(RefusedError, match="under another number"):
            node.call("readManifest", renamed, held.encoded)


def test_a_manifest_that_the_trainer_did_not_sign_is_refused(node, tmp_path):
    trainer, other = SigningKey.fresh(), SigningKey.fresh()
    with a_round(tmp_path) as held:
        signature = trainer.sign(held.id).hex()
        shown = held.id, held.encoded
        assert node.call("checkSignature", *shown, trainer.public.raw.hex(), signature) == "signed"
        for key, given in ((other, signature), (trainer, None), (trainer, "00" * 64)):
            with pytest.raises(RefusedError, match="not signed by the trainer") as raised:
                node.call("checkSignature", *shown, key.public.raw.hex(), given)
            assert raised.value.kind == "ViolationError"


@pytest.mark.parametrize("numbers", [{}, {"max_update_norm": 0.5}, {"max_weight": 40.0}])
def test_an_update_has_the_bytes_of_python(node, tmp_path, numbers):
    keys, rng = {"word": WORD.keys([9, 4, 200])}, np.random.default_rng(1)
    update = {
        "bias": rng.standard_normal(TAGS).astype(np.float32),
        "kernel": rng.standard_normal((3, TAGS)).astype(np.float32),
    }
    bound = InputBound(numbers.get("max_update_norm", np.inf), max_weight=numbers.get("max_weight"))
    with a_round(tmp_path, **numbers) as held:
        ready = bound.ready(Report(update, 10.0, {"loss": 0.25}), keys, "a device")
        model = held.manifest.layout
        digest = digest_of(held.id)
        expected = encode_report(ready) + encode_update(model, ready.update, keys, digest)
        args = [9, 4, 200], update["bias"], list(update["kernel"]), 0.25, 10
        made = node.call("encodeUpdate", held.id, held.encoded, *args)
    if not numbers:
        assert made == expected
    report, rest = split_report(made, bound)
    found, named = decode_update(rest, model, 100, digest)
    assert report.metrics == {"loss": 0.25}
    assert report.weight == ready.weight
    assert named["word"].array.tolist() == [9, 4, 200]
    for name, array in ready.update.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-6)
    assert not bound.take(found, named, report.weight).is_above


@pytest.mark.parametrize("num_points", [1, 7, 24, 231, 2308, 10**6])
def test_the_shape_of_a_point_function_is_that_of_python(node, num_points):
    shape, domain = node.call("shapeOf", num_points), Domain(num_points)
    assert (shape["depth"], shape["leafBytes"]) == (domain.depth, domain.leaf_bytes)


@pytest.mark.parametrize(("num_points", "count"), [(1, 1), (13, 3), (231, 4), (3001, 2)])
def test_point_functions_are_shared_and_expanded_as_in_python(node, num_points, count):
    domain, nonce, roots = Domain(num_points), bytes(range(16)), [bytes(16), b"\1" * 16]
    points = np.random.default_rng(0).integers(0, num_points, count)
    shape = {"numPoints": num_points, "depth": domain.depth, "leafBytes": domain.leaf_bytes}
    made = node.call("sharePoints", points.tolist(), shape, nonce, roots)
    assert made == encode_corrections(share_from_roots(points, domain, nonce, tuple(roots))[0])
    wide, shares = np.zeros((count, num_points), bool), []
    wide[np.arange(count), points] = True
    for party in (0, 1):
        theirs = expand(decode_corrections(made, count, domain, party, roots[party]), domain, nonce)
        args = made, count, shape, party, roots[party], nonce
        assert node.call("expandPoints", *args) == [row.tobytes() for row in theirs]
        shares.append(np.unpackbits(theirs, axis=1, bitorder="little")[:, :num_points])
    np.testing.assert_array_equal(shares[0] ^ shares[1], wide)


@pytest.mark.parametrize(("num_keys", "max_keys"), [(1000, 20), (5000, 40), (2000, 110)])
def test_keys_lie_in_the_buckets_of_python(node, num_keys, max_keys):
    shape = batch_shape(max_keys, num_keys)
    told = node.call("batchShape", max_keys, num_keys)
    assert told == {"buckets": shape.num_buckets, "stash": shape.stash}
    if not shape.num_buckets:
        return
    placement = Placement(num_keys, shape.num_buckets)
    keys = np.random.default_rng(0).choice(num_keys, 30, replace=False)
    found = node.call("placesOf", num_keys, shape.num_buckets, keys.tolist())
    buckets, positions = placement.places_of(keys)
    assert found["size"] == placement.bucket_size
    assert [[one["bucket"] for one in three] for three in found["places"]] == buckets.tolist()
    assert [[one["position"] for one in three] for three in found["places"]] == positions.tolist()
    assert found["back"] == [[key] * 3 for key in keys.tolist()]
    matched = node.call("matchBuckets", buckets.tolist())
    assert matched == place(buckets, shape.num_buckets).tolist()


@pytest.mark.parametrize(("num_keys", "max_keys"), [(40, 3), (1500, 110), (5000, 40)])
def test_a_private_query_has_the_bytes_of_python_and_is_answered(node, num_keys, max_keys):
    """With buckets and without, with paths in the rows (K = 5,000) and without."""
    records = np.random.default_rng(0).integers(0, 256, (num_keys, 12), np.uint8)
    table = PrivateTable.of("3-00ff/tables/1", bytes(32), records, max_keys)
    database = Database.of(table)
    params, wanted = two_server.params_of(database), np.array([1, 3, num_keys - 1])
    stream = Prg(b"a stream of sixt").bytes(1 << 16)
    query = two_server.TwoServerClient(params).query(wanted, Prg(b"a stream of sixt"))
    top = top_of(Tree.of(hash_leaves(records)))
    asked = node.call("ask", params.encode(), top, wanted.tolist(), stream)
    assert asked["messages"] == list(query.messages())
    servers = two_server.servers_of(database)
    replies = [server.answer([m])[0] for server, m in zip(servers, asked["messages"], strict=True)]
    assert [len(reply) for reply in replies] == [asked["replyBytes"]] * 2
    found = dict(map(tuple, node.call("open", asked["number"], replies)))
    assert found == {key: records[key].tobytes() for key in wanted.tolist()}
    with pytest.raises(RefusedError, match="did not answer the query"):
        node.call("open", asked["number"], replies[::-1])


def test_a_wrong_row_is_left_out_in_silence(node):
    records = np.random.default_rng(0).integers(0, 256, (50, 12), np.uint8)
    right = Database.of(PrivateTable.of("3", bytes(32), records, 3))
    rows = right.rows.copy()
    rows[9, 0] ^= 1  # at both servers: the root of the round is all that tells
    params = two_server.params_of(right).encode()
    top = top_of(Tree.of(hash_leaves(records)))
    asked = node.call("ask", params, top, [4, 9], None)
    servers = two_server.servers_of(Database(right.public, rows))
    replies = [server.answer([m])[0] for server, m in zip(servers, asked["messages"], strict=True)]
    assert node.call("open", asked["number"], replies) == [[4, records[4].tobytes()]]


def test_params_are_those_that_a_server_states(node, tmp_path):
    with a_round(tmp_path, keys_per_client={"word": 20}) as held:
        records = asyncio.run(held.tables[1].fetch(np.arange(WORDS))).records
        table = PrivateTable.of(f"{held.id}/tables/1", digest_of(held.id), records, 20)
        expected = two_server.params_of(Database.of(table)).encode()
        assert node.call("paramsOf", held.id, held.encoded, 1) == expected
