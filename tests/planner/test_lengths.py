"""Lengths: bytes as real messages have them."""

from math import sqrt

import numpy as np
import pytest

import keyhole as kh
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import PrivateTable
from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.delivery.enclave import messages as sealed
from keyhole.delivery.enclave.messages import NONCE_BYTES, Evidence
from keyhole.delivery.paths import Top, path_bytes, top_bytes, top_of
from keyhole.delivery.pir import one_server, two_server
from keyhole.delivery.pir.database import Database, PirParams
from keyhole.delivery.relay.client import BlindClient, TableShape, slice_handler
from keyhole.delivery.relay.gateway import Gateway
from keyhole.delivery.relay.ohttp import GatewayKey
from keyhole.planner.prices import price_of
from keyhole.pricing import Workload
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import DIGEST, asked, vector_file

ROUND = f"1234-{DIGEST}"
SHAPES = [(1, 1, 1), (10, 10, 3), (300, 7, 40), (3_000, 120, 17), (5_000, 99, 8)]  # K, m, bytes


def records_of(num_keys, slice_bytes):
    return np.random.default_rng(0).integers(0, 256, (num_keys, slice_bytes), np.uint8)


def table_of(num_keys, m, slice_bytes):
    return PrivateTable.of(ROUND, bytes(32), records_of(num_keys, slice_bytes), m)


def keys_of(num_keys, count):
    return np.random.default_rng(1).permutation(num_keys)[:count].astype(np.int64)


def sizes(messages):
    return sum(map(len, messages))


def pir_traffic(way, num_keys, m, slice_bytes):
    """Down and up of one client, from messages that servers answered and the client opened."""
    table, hint = table_of(num_keys, m, slice_bytes), b""
    database = Database.of(table)
    if way == "pir-one-server":
        server = one_server.server_of(database)
        servers, hint = [server], server.hint
        asker = one_server.OneServerClient(PirParams.decode(server.params), hint)
    else:
        servers = two_server.servers_of(database)
        asker = two_server.TwoServerClient(two_server.params_of(database))
    keys, sent_top = keys_of(num_keys, max(1, m // 2)), top_of(table.tree)
    question = asker.query(keys)
    sent = question.messages()
    replies = [server.answer([one])[0] for server, one in zip(servers, sent, strict=True)]
    top = Top.of(num_keys, table.tree.root, sent_top)
    assert question.decode(replies).checked(top, keys).is_found.all()
    return len(hint) + len(sent_top) + sizes(replies), sizes(sent)


@pytest.mark.parametrize(("num_keys", "m", "slice_bytes"), SHAPES)
@pytest.mark.parametrize("way", ["pir", "pir-one-server"])
def test_retrieval_is_priced_as_long_as_its_messages_are(way, num_keys, m, slice_bytes):
    priced = price_of(way, Workload(num_keys, m, slice_bytes, cohort=1))
    assert (priced.bytes_down, priced.bytes_up) == pir_traffic(way, num_keys, m, slice_bytes)


@pytest.mark.parametrize(("num_keys", "m", "slice_bytes"), SHAPES)
def test_a_relay_is_priced_as_long_as_its_messages_are(num_keys, m, slice_bytes):
    key, table = GatewayKey.fresh(), table_of(num_keys, m, slice_bytes)
    gateway = Gateway([key], slice_handler(ROUND, [table.rows()]))
    client = BlindClient(key.config, ROUND, [TableShape(0, num_keys, table.row_bytes, m)])
    keys, top = keys_of(num_keys, m), top_of(table.tree)
    question = client.query([keys])
    sent = question.messages()
    replies = gateway.answer_many(sent)
    (found,) = question.decode(replies)
    assert found.checked(Top.of(num_keys, table.tree.root, top), keys).is_found.all()
    priced = price_of("relay", Workload(num_keys, m, slice_bytes, cohort=1))
    assert (priced.bytes_down, priced.bytes_up) == (sizes(replies) + len(top), sizes(sent))


@pytest.mark.parametrize(("num_keys", "m", "slice_bytes"), SHAPES)
def test_an_enclave_is_priced_as_long_as_its_messages_are(num_keys, m, slice_bytes):
    """With evidence as long as a genuine TDX quote and its collateral."""
    table = table_of(num_keys, m, slice_bytes)
    params = sealed.EnclaveParams.of(table.public)
    private, nonce = PrivateKey.fresh(), bytes(NONCE_BYTES)
    asked, _ = params.assign(keys_of(num_keys, m))
    request, _ = sealed.seal_request(private.public, params, nonce, asked)
    _, context = sealed.open_request(private, params, request)
    reply = sealed.seal_reply(context, params, nonce, table.rows()[asked], Prg.fresh())
    quote = vector_file("tdx_quote.bin").read_bytes()
    collateral = vector_file("tdx_collateral.json").read_bytes()
    evidence = Evidence("tdx", quote, collateral, private.public, params.digest).encode()
    priced = price_of("enclave", Workload(num_keys, m, slice_bytes, cohort=1))
    assert priced.bytes_down == len(evidence) + len(reply) + len(top_of(table.tree))
    assert priced.bytes_up == len(nonce) + len(request)


@pytest.mark.parametrize(
    ("name", "way"),
    [("broadcast", Broadcast()), ("on-demand", OnDemand()), ("pregenerated", Pregenerated())],
)
@pytest.mark.parametrize("count", [3, 20])
def test_clear_ways_are_priced_as_they_deliver(name, way, count):
    row = kh.KeySpace("row", 20)
    model = {"w": np.ones((20, 3), np.float32), "b": np.zeros(2, np.float32)}
    state = ServerState.dense(kh.Layout.of(model, kh.Cut(row, {"w": 0})), model, SGD(1.0))
    wanted = [row.keys(range(count)), row.keys(range(20 - count, 20))]
    cost = way.deliver(state, asked(state.layout, wanted)).cost
    need = Workload(20, count, 12, 2, distinct=min(20, 2 * count), broadcast_bytes=8)
    price = price_of(name, need)
    # Proofs are priced for keys that are drawn evenly; these lie together.
    nodes = [4, 2] if (name, count) == ("pregenerated", 3) else [0, 0]  # found by hand
    for down, proof in zip(cost.bytes_down.values(), nodes, strict=True):
        assert down == price.bytes_down - price.proof_bytes + 32 * proof
    assert set(cost.bytes_up.values()) == {price.bytes_up}
    assert dict(cost.leaks) == dict(price.about.leaks)
    if name != "broadcast":  # there, clients select at home
        assert cost.select_calls == price.slices_generated


# Section B3 of the notes that this project began with, by prototypes without paths and frames. Ours
# sends a path with every row, the top, and stash queries; of 1,000 keys on, fewer queries.
PROTOTYPE_MEGABYTES = [  # K, m, relay, two servers
    (10_000, 100, 0.22, 0.54),
    (10_000, 1_000, 2.2, 5.3),
    (100_000, 100, 0.22, 0.55),
    (100_000, 1_000, 2.2, 5.4),
    (100_000, 10_000, 21.6, 53),
    (1_000_000, 1_000, 2.2, 5.5),
    (1_000_000, 10_000, 21.6, 54),
]


@pytest.mark.parametrize(("num_keys", "m", "relay", "two"), PROTOTYPE_MEGABYTES)
def test_bytes_are_those_of_the_prototypes(num_keys, m, relay, two):
    """Names of rounds had 16 hex digits there and have 64 now."""
    need = Workload(num_keys, m, 2_000, 50)
    path, top = path_bytes(num_keys), top_bytes(num_keys) / 1e6
    relay += m * (path + 48) / 1e6 + top
    queries = 1.09 * m + 2.1 * sqrt(m)  # at each of both servers; 1.3 m there
    two = two * queries / (1.3 * m) + 2 * queries * path / 1e6 + top
    assert price_of("relay", need).bytes_total / 1e6 == pytest.approx(relay, rel=0.03)
    assert price_of("pir", need).bytes_total / 1e6 == pytest.approx(two, rel=0.03)
    more = 1 + path / 2_000
    most = (2.1 * queries / m + 0.02) * more
    assert price_of("pir", need).bytes_total <= most * need.asked_bytes + 1e6 * top
