"""The sum of two servers is the plain sum in the ring, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.aggregation.two_servers import server as sum_server
from keyhole.aggregation.two_servers.client import (
    read_sparse_own,
    read_sparse_public,
    share_rows,
    split_rows,
)
from keyhole.aggregation.two_servers.params import PartParams, SumParams
from keyhole.aggregation.two_servers.server import ClientShare, SparsePart, add_clients
from keyhole.crypto import cuckoo
from keyhole.crypto.ring import add_mask
from keyhole.errors import KeySpaceError, ReplayError, ShapeError
from tests.aggregation.two_servers.sparse_sums import (
    ROUND,
    client_of,
    plain_share,
    plain_sum,
    secure_sum,
    seeded,
    servers_of,
    shares_of,
    terms_of,
    uniform_rows,
)

both_rings = pytest.mark.parametrize("bits", [16, 32])


@st.composite
def sums(draw):
    """Terms, and the keys of some clients."""
    num_keys = draw(st.integers(1, 70))
    max_keys = draw(st.integers(1, min(num_keys, 12)))
    terms = terms_of(
        num_keys,
        draw(st.integers(1, 9)),
        max_keys,
        draw(st.sampled_from([16, 32])),
        with_counts=draw(st.booleans()),
    )
    keys = st.lists(st.integers(0, num_keys - 1), unique=True, max_size=max_keys)
    return terms, draw(st.lists(keys, min_size=1, max_size=4))


@settings(max_examples=30)
@given(sums())
def test_the_sum_is_the_plain_sum_bit_for_bit(case):
    terms, keys = case
    clients = [client_of(terms, some, seed) for seed, some in enumerate(keys)]
    np.testing.assert_array_equal(secure_sum(terms, clients), plain_sum(terms, clients))


@both_rings
@pytest.mark.parametrize("party", [0, 1])
@pytest.mark.parametrize("shape", [(1, 3, 1), (23, 1, 1), (23, 5, 3), (50, 9, 7)], ids=str)
def test_a_servers_share_is_what_the_equation_says_at_every_position(bits, party, shape):
    terms = terms_of(*shape, bits=bits, with_counts=True)
    client = client_of(terms, range(min(2, shape[2])), 5)
    public, own = client.to(party)
    root, _ = read_sparse_own(terms, party, own)
    corrections = read_sparse_public(terms, public)
    total = np.zeros((terms.num_keys, terms.row), terms.dtype)
    add_clients(total, terms, party, [ClientShare(root, corrections)])
    total = total if party == 0 else -total
    np.testing.assert_array_equal(total, plain_share(terms, party, root, corrections))


@pytest.mark.parametrize(
    ("num_keys", "max_keys"), [(1, 1), (2, 1), (3, 2), (16, 1), (16, 4), (17, 1), (17, 4), (33, 9)]
)
def test_every_key_of_a_table_can_be_added_to(num_keys, max_keys):
    terms = terms_of(num_keys, 2, max_keys)
    clients = [client_of(terms, [key], key) for key in range(num_keys)]
    total = secure_sum(terms, clients)
    np.testing.assert_array_equal(total, np.concatenate([client.rows for client in clients]))


@both_rings
def test_sums_wrap_as_the_ring_does(bits):
    terms = terms_of(5, 2, 5, bits)
    limit = np.full((5, 2), 2**bits - 1, terms.dtype)
    clients = [client_of(terms, range(5), seed, limit) for seed in range(3)]
    assert (secure_sum(terms, clients) == 2**bits - 3).all()


def test_counts_say_how_many_clients_sent_each_key():
    terms = terms_of(9, 2, 3, with_counts=True)
    clients = [client_of(terms, keys, at) for at, keys in enumerate([[0, 8], [8], [], [8, 3, 0]])]
    assert secure_sum(terms, clients)[:, -1].tolist() == [2, 0, 0, 1, 0, 0, 0, 0, 3]


def test_without_counts_a_row_of_zeros_leaves_no_trace_in_the_sum():
    terms = terms_of()
    zeros = client_of(terms, [1, 2], 0, np.zeros((2, 3), np.uint32))
    assert not secure_sum(terms, [zeros, client_of(terms, [], 1)]).any()


def test_clients_that_are_lost_need_nothing():
    terms = terms_of(30, 2, 5)
    clients = [client_of(terms, range(at, at + 5), at) for at in range(6)]
    survivors = clients[::2]
    np.testing.assert_array_equal(secure_sum(terms, survivors), plain_sum(terms, survivors))


def test_keys_without_a_bucket_are_reported_and_left_out_and_all_others_are_summed():
    """Ten keys that lie in the same five buckets: half of them find no place."""
    terms = terms_of(60_000, 2, 10, with_counts=True)
    buckets = terms.placement.buckets_of(np.arange(terms.num_keys))
    near = np.isin(buckets, [*buckets[0], buckets[0, 0] + 1, buckets[0, 1] + 1]).all(axis=1)
    keys = np.flatnonzero(near)[:10]
    assert len(keys) == 10
    client = client_of(terms, keys)
    assert client.shares.is_placed.sum() == 5
    assert len(client.shares.public) == len(client_of(terms, []).shares.public)
    total = secure_sum(terms, [client])
    np.testing.assert_array_equal(total[keys, -1], client.shares.is_placed)
    np.testing.assert_array_equal(total, plain_sum(terms, [client]))


@pytest.mark.parametrize("max_keys", [1, 2, 3])
def test_up_to_three_keys_are_never_left_out(max_keys):
    terms = terms_of(7, 1, max_keys)
    for first in range(7 - max_keys):
        assert client_of(terms, range(first, first + max_keys)).shares.is_placed.all()


def test_clients_in_any_batches_tiles_and_groups_of_buckets_give_the_same_sum(monkeypatch):
    terms = terms_of(200, 5, 20, 16)
    clients = [client_of(terms, range(at, at + 20), at) for at in range(7)]
    expected = shares_of(servers_of(terms, clients))
    monkeypatch.setattr(sum_server, "_TILE", 160)
    monkeypatch.setattr(sum_server, "_NODES", 2000)
    monkeypatch.setattr(sum_server, "_MAX_NODES", 1000)
    monkeypatch.setattr(sum_server, "_MAX_WAITING", 5)
    servers = SparsePart(terms, 0), SparsePart(terms, 1)
    for party, server in enumerate(servers):
        for client in clients:
            server.add(*client.to(party))
    for share, same in zip(shares_of(servers), expected, strict=True):
        np.testing.assert_array_equal(share, same)


def test_messages_that_wait_are_added_before_they_take_too_much_memory(monkeypatch):
    terms = terms_of()
    clients = [client_of(terms, [at], at) for at in range(5)]
    monkeypatch.setattr(sum_server, "_MAX_BYTES", 2 * terms.public_bytes)
    server, waiting = SparsePart(terms, 0), []
    for client in clients:
        server.add(*client.to(0))
        waiting.append(len(server._waiting))
    assert waiting == [1, 0, 1, 0, 1]


def test_the_order_in_which_clients_arrive_does_not_matter():
    terms = terms_of()
    clients = [client_of(terms, [at, at + 1], at) for at in range(4)]
    servers = servers_of(terms, clients)[0], SparsePart(terms, 1)
    for place in (2, 0, 3, 1):
        servers[1].add(*clients[place].to(1))
    np.testing.assert_array_equal(np.add(*shares_of(servers)), plain_sum(terms, clients))


def test_fresh_shares_of_the_same_rows_have_nothing_in_common():
    terms = terms_of()
    keys, rows = np.array([3]), uniform_rows(terms, 1)
    one, other = share_rows(terms, keys, rows), share_rows(terms, keys, rows)
    assert one.public[56:72] != other.public[56:72]
    assert one.to[0][56:72] != other.to[0][56:72] != one.to[1][56:72]


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ([3, 3], KeySpaceError),
        ([20], KeySpaceError),
        ([-1], KeySpaceError),
        ([0, 1, 2, 3, 4], KeySpaceError),
        ([[1]], KeySpaceError),
        ([0.5], KeySpaceError),
    ],
)
def test_keys_that_cannot_be_shared_are_refused_and_not_named(keys, error):
    with pytest.raises(error) as raised:
        share_rows(terms_of(), np.array(keys), np.zeros((len(keys), 3), np.uint32))
    assert str(keys) not in str(raised.value)


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 3), np.uint32),
        np.zeros((2, 4), np.uint32),
        np.zeros(6, np.uint32),
        np.zeros((2, 3), np.uint16),
        np.zeros((2, 3), np.int32),
        np.full((2, 3), np.nan),
    ],
    ids=lambda rows: f"{rows.dtype}{rows.shape}",
)
def test_rows_of_another_shape_or_ring_are_refused(rows):
    with pytest.raises(ShapeError):
        share_rows(terms_of(), np.array([1, 2]), rows)


def test_printing_shows_no_keys_rows_or_secrets():
    terms = terms_of(5000, 1, 2)
    client = client_of(terms, [4321], 1, np.array([[987654321]], np.uint32))
    servers = servers_of(terms, [client])
    corrections = read_sparse_public(terms, client.shares.public)
    share = ClientShare(bytes(16), corrections)
    shown = f"{client.shares!r} {servers} {corrections!r} {share!r} {share}"
    assert not any(secret in shown for secret in ("4321", "987654321", "array", r"\x"))


@both_rings
def test_dense_vectors_add_up_from_a_seed_and_a_rest(bits):
    part = PartParams(50, 3, 50, is_sparse=False)
    terms = SumParams(ROUND, (part,), 3, 1, clip=1.0, bits=bits)
    keys, shape = np.arange(50), terms.shape(0)
    vectors = [uniform_rows(terms.sparse[0], 50, seed) for seed in range(3)]
    split = [split_rows(terms, [(keys, v)], seeded(at)) for at, v in enumerate(vectors)]
    rests = [np.frombuffer(one.own[1], terms.dtype).reshape(shape) for one in split]
    total = np.zeros_like(vectors[0])
    for one in split:
        add_mask(total, one.own[0], 1)
    np.testing.assert_array_equal(total + sum(rests), sum(vectors))
    assert all((rest != vector).mean() > 0.9 for rest, vector in zip(rests, vectors, strict=True))


def test_a_share_is_given_out_once():
    terms = terms_of()
    server, _ = servers_of(terms, [client_of(terms, [1])])
    server.take()
    for _ in range(2):
        with pytest.raises(ReplayError):
            server.take()


def test_a_sum_whose_adding_broke_off_is_not_released(monkeypatch):
    terms = terms_of()
    server, _ = servers_of(terms, [client_of(terms, [1]), client_of(terms, [2], 1)])

    def breaks_off(total, *_):
        total += 1
        raise MemoryError

    monkeypatch.setattr(sum_server, "add_clients", breaks_off)
    with pytest.raises(MemoryError):
        server.take()
    monkeypatch.undo()
    with pytest.raises(ReplayError):
        server.take()


def test_two_sums_of_one_round_would_show_what_one_client_sent():
    """Why the name of a sum is used once: nothing else stops it."""
    terms = terms_of()
    clients = [client_of(terms, [at], at) for at in range(3)]
    three, two = secure_sum(terms, clients), secure_sum(terms, clients[:2])
    np.testing.assert_array_equal(three - two, plain_sum(terms, clients[2:]))


@pytest.mark.slow
@pytest.mark.parametrize(("max_keys", "lost"), [(4, 1e-6), (16, 2e-5), (32, 1e-5), (100, 0)])
def test_as_few_clients_lose_a_key_as_the_terms_say(max_keys, lost):
    """Of 30,000: what is expected, and four standard deviations of a count that small, and one."""
    terms, clients = terms_of(1_000_000, 1, max_keys), 30_000
    keys = np.random.default_rng(max_keys).integers(0, 1_000_000, clients * max_keys)
    choices = terms.placement.buckets_of(keys).reshape(clients, max_keys, 3)
    unlucky = sum((cuckoo.place(some, terms.num_buckets) < 0).any() for some in choices)
    assert unlucky <= clients * lost + 4 * np.sqrt(clients * lost) + 1


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 32])
def test_a_sum_of_the_size_of_a_vocabulary_is_the_plain_sum(bits):
    terms = terms_of(100_000, 50, 1000, bits, with_counts=True)
    rng = np.random.default_rng(0)
    clients = [
        client_of(terms, rng.choice(terms.num_keys, 1000, replace=False), seed) for seed in range(5)
    ]
    assert all(client.shares.is_placed.all() for client in clients)
    np.testing.assert_array_equal(secure_sum(terms, clients), plain_sum(terms, clients))
