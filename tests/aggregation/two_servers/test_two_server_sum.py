"""Sums of whole updates by two servers: the plain ring sum, of whom both have, or nothing."""

from dataclasses import replace
from hashlib import sha256
from itertools import combinations

import numpy as np
import pytest

from keyhole.aggregation.exchange import combine
from keyhole.aggregation.shares import (
    SEAL_BYTES,
    Receipt,
    pack_list,
    pack_receipt,
    read_list,
    read_receipt,
    read_share,
    receipt_message_bytes,
)
from keyhole.aggregation.sum_server import ShareAdder, SumServer
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.aggregation.two_servers.params import PartParams, SumParams
from keyhole.crypto.prg import Prg
from keyhole.errors import (
    InputError,
    KeySpaceError,
    MalformedError,
    MismatchError,
    NotAdmittedError,
    ReplayError,
    ShapeError,
    StaleError,
    ThresholdError,
    TooLateError,
    ViolationError,
)
from tests.aggregation.two_servers.two_server_sums import (
    COHORT,
    add_all,
    agree,
    combined,
    plain_sum,
    rows_of,
    server_of,
    servers_of,
    share_of,
    shares_of,
    terms_of,
)
from tests.delivery.pir.mutations import bit_flips, extensions, truncations

SETS = [reached for size in range(4) for reached in combinations(COHORT[:3], size)]


def sent_by(terms, names=COHORT):
    rows = {name: rows_of(terms, seed) for seed, name in enumerate(names)}
    return rows, {name: shares_of(terms, rows[name], seed) for seed, name in enumerate(names)}


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("with_counts", [False, True])
def test_both_shares_together_are_the_plain_ring_sum_bit_for_bit(bits, with_counts):
    terms = terms_of(bits=bits, with_counts=with_counts, clip=1.0)
    rows, sent = sent_by(terms)
    servers = servers_of(terms, sent)
    agree(servers)
    add_all(servers, sent)
    found = combined(terms, *map(share_of, servers))
    for one, other in zip(found, plain_sum(terms, rows.values()), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("first", SETS, ids=len)
@pytest.mark.parametrize("second", SETS, ids=len)
def test_whoever_reached_both_is_added_and_nobody_else(first, second):
    """Every pattern of three clients; with fewer than two in both, nothing is released."""
    terms = terms_of()
    rows, sent = sent_by(terms, COHORT[:3])
    servers = servers_of(terms, sent, lambda party, name: name in (first, second)[party])
    both = sorted(set(first) & set(second))
    if len(both) < terms.min_clients:
        lists = servers[0].close(), servers[1].close()
        for server in servers:
            with pytest.raises(ThresholdError):
                server.reduce(lists[1 - server.party])
            with pytest.raises(ViolationError):
                server.share()
        return
    agree(servers)
    add_all(servers, sent)
    found = combined(terms, *map(share_of, servers))
    expected = plain_sum(terms, [rows[name] for name in both])
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("party", [0, 1])
def test_nothing_is_added_before_both_agree_and_nothing_released_before_all_are_added(party):
    terms = terms_of()
    _, sent = sent_by(terms)
    servers = servers_of(terms, sent)
    server, name = servers[party], COHORT[0]
    messages = sent[name].public, sent[name].to[party]
    for act in (server.share, lambda: server.add(name, *messages), lambda: server.agree(b"")):
        with pytest.raises(ViolationError):
            act()
    lists = servers[0].close(), servers[1].close()
    with pytest.raises(ViolationError):
        server.add(name, *messages)
    agreed = servers[0].reduce(lists[1]), servers[1].reduce(lists[0])
    for act in (server.share, lambda: server.add(name, *messages)):
        with pytest.raises(ViolationError):
            act()
    server.agree(agreed[1 - party])
    server.add(name, *messages)
    with pytest.raises(MismatchError, match="not added"):
        server.share()


def test_a_share_is_given_out_once_and_nobody_is_accepted_late():
    terms = terms_of()
    _, sent = sent_by(terms, COHORT[:3])
    late = shares_of(terms, rows_of(terms, 9), 9)
    servers = servers_of(terms, sent)
    agree(servers)
    with pytest.raises(TooLateError):
        servers[0].accept(COHORT[4], late.to[0])
    add_all(servers, sent)
    for server in servers:
        server.share()
        with pytest.raises(ViolationError):
            server.share()


def test_replays_strangers_and_foreign_messages_are_refused():
    terms, other = terms_of(), terms_of(round=bytes(16))
    one, foreign = shares_of(terms, rows_of(terms, 1)), shares_of(other, rows_of(other, 1))
    server = server_of(terms, 0)
    damaged = bytearray(one.to[0])
    damaged[80] ^= 1
    refusals = [
        ("stranger", one.to[0], NotAdmittedError),
        (COHORT[0], one.to[1], MalformedError),
        (COHORT[0], one.to[0][:-1], MalformedError),
        (COHORT[0], bytes(damaged), MalformedError),
        (COHORT[0], b"", MalformedError),
        (COHORT[0], foreign.to[0], StaleError),
    ]
    for name, own, kind in refusals:
        with pytest.raises(kind):
            server.accept(name, own)
    server.accept(COHORT[0], one.to[0])
    for name in COHORT[:2]:  # again, and as another client's
        with pytest.raises(ReplayError):
            server.accept(name, one.to[0])
    assert server.clients == (COHORT[0],)


def test_only_the_messages_that_were_agreed_on_are_added_each_once():
    terms = terms_of()
    _, sent = sent_by(terms, COHORT[:3])
    other = shares_of(terms, rows_of(terms, 8), 8)
    servers = servers_of(terms, sent)
    agree(servers)
    server, name = servers[1], COHORT[0]
    public, own = sent[name].public, sent[name].to[1]
    refusals = [
        (name, other.public, own, MismatchError),
        (name, public, other.to[1], MismatchError),
        (COHORT[3], public, own, MismatchError),
        ("stranger", public, own, NotAdmittedError),
    ]
    for client, sent_public, sent_own, kind in refusals:
        with pytest.raises(kind):
            server.add(client, sent_public, sent_own)
    server.add(name, public, own)
    with pytest.raises(ReplayError):
        server.add(name, public, own)


def test_servers_with_different_cohorts_lists_or_terms_do_not_agree():
    terms, other = terms_of(), terms_of(min_clients=1)
    _, sent = sent_by(terms, COHORT[:3])
    one, two = servers_of(terms, sent)
    stranger = server_of(terms, 1, COHORT[::-1])
    for name, shares in sent.items():
        stranger.accept(name, shares.to[1])
    mine, theirs = one.close(), two.close()
    for told, kind in [
        (stranger.close(), MismatchError),
        (mine, MalformedError),
        (server_of(other, 1).close(), StaleError),
        (theirs[:-1], MalformedError),
        (b"", MalformedError),
    ]:
        with pytest.raises(kind):
            one.reduce(told)
    one.reduce(theirs)
    fewer = server_of(terms, 1)
    for name in COHORT[:2]:
        fewer.accept(name, sent[name].to[1])
    fewer.close()
    with pytest.raises(MismatchError):
        one.agree(fewer.reduce(mine))


@pytest.mark.parametrize("party", [0, 1])
def test_every_damaged_list_is_refused_and_a_foreign_one(party):
    terms = terms_of()
    _, sent = sent_by(terms, COHORT[:2])
    servers = servers_of(terms, sent)
    lists = [server.close() for server in servers]
    good = lists[1 - party]
    for bad in (*truncations(good), *extensions(good), *bit_flips(good), lists[party]):
        with pytest.raises(MalformedError):
            servers[party].reduce(bad)
    for other in (terms_of(round=bytes(16)), terms_of(min_clients=3)):
        with pytest.raises(StaleError):
            servers[party].reduce(server_of(other, 1 - party).close())
    servers[party].reduce(good)


def test_a_client_that_tells_each_server_another_public_message_is_left_out():
    terms = terms_of()
    rows, sent = sent_by(terms, COHORT[:2])
    servers = servers_of(terms, sent)
    one, other = (shares_of(terms, rows_of(terms, 9), seed) for seed in (8, 9))
    servers[0].accept(COHORT[2], one.to[0])
    servers[1].accept(COHORT[2], other.to[1])
    agree(servers)
    assert servers[0].clients == servers[1].clients == tuple(COHORT[:2])
    add_all(servers, sent)
    total = combined(terms, *map(share_of, servers))
    for found, expected in zip(total, plain_sum(terms, rows.values()), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_every_flipped_public_message_is_refused():
    terms = terms_of(parts=(PartParams(6, 1, 1, True),))
    _, sent = sent_by(terms, COHORT[:2])
    servers = servers_of(terms, sent)
    agree(servers)
    public, own = sent[COHORT[0]].public, sent[COHORT[0]].to[1]
    for bad in bit_flips(public):
        with pytest.raises(MismatchError):
            servers[1].add(COHORT[0], bad, own)
    servers[1].add(COHORT[0], public, own)


def test_there_is_no_third_server():
    with pytest.raises(InputError):
        server_of(terms_of(), 2)


def test_a_list_that_names_a_client_twice_is_refused():
    terms = terms_of()
    names = sha256(b"".join(name.encode() + b"\0" for name in COHORT)).digest()
    packed = pack_list(terms.facts, 1, names, {0: bytes(32), 2: bytes(32)})
    assert read_list(terms.facts, 1, packed)[1] == {0: bytes(32), 2: bytes(32)}
    swapped = bytearray(packed)
    swapped[96:112] = packed[104:112] + packed[96:104]
    with pytest.raises(MalformedError):
        read_list(terms.facts, 1, bytes(swapped))


def test_shares_of_one_server_or_of_different_clients_are_not_combined():
    terms = terms_of()
    _, sent = sent_by(terms)
    all_shares = []
    for there in (COHORT[:3], COHORT[:4]):
        servers = servers_of(terms, sent, lambda party, name, there=there: name in there)
        agree(servers)
        add_all(servers, sent)
        all_shares.append([share_of(server) for server in servers])
    (one, two), (_, other) = all_shares
    for pair in ((one, one), (one, other)):
        with pytest.raises(MismatchError):
            combine(TwoServers(), terms.encode(), pair)
    parts = combine(TwoServers(), terms.encode(), (two, one))
    assert [part.rows.shape[1] for part in parts] == [part.width for part in terms.parts]


def test_a_share_survives_its_message_and_damage_to_it_is_found():
    terms = terms_of(bits=16, clip=1.0)
    _, sent = sent_by(terms, COHORT[:2])
    servers = servers_of(terms, sent)
    agree(servers)
    add_all(servers, sent)
    packed = b"".join(bytes(piece) for piece in servers[0].share())
    assert len(packed) == terms.facts.share_message_bytes
    share = read_share(terms.facts, 0, packed)
    tables = sum(table.nbytes for table in plain_sum(terms, []))
    assert (share.clients, share.payload.nbytes) == (2, tables)
    for place in (0, 60, 200, len(packed) - 1):
        damaged = bytearray(packed)
        damaged[place] ^= 16
        with pytest.raises(MalformedError):
            read_share(terms.facts, 0, bytes(damaged))
    with pytest.raises(MalformedError):
        read_share(terms.facts, 1, packed)


def test_the_noise_of_a_server_is_in_its_share():
    terms = terms_of(noise=0.5, room=19, clip=1.0, norm=1.0)
    rows, sent = sent_by(terms, COHORT[:2])
    servers = servers_of(terms, sent)
    agree(servers)
    add_all(servers, sent)
    seeds = [[Prg(bytes([party, place]) * 8) for place in range(3)] for party in (0, 1)]
    found = combined(terms, *(share_of(s, seeds[s.party].__getitem__) for s in servers))
    spread = np.concatenate(
        [
            (one - other).view(np.int32).reshape(-1) / terms.ring_noise
            for one, other in zip(found, plain_sum(terms, rows.values()), strict=True)
        ]
    )
    # 143 numbers: their standard deviation is off by 6 %, five of which are 30 %.
    assert spread.std() == pytest.approx(2**0.5, rel=0.3)


@pytest.mark.parametrize(
    "changes",
    [
        {"round": bytes(15)},
        {"parts": ()},
        {"parts": (PartParams(3, 1, 4, True),)},
        {"parts": (PartParams(0, 1, 1, True),)},
        {"max_clients": 0},
        {"min_clients": 0},
        {"bits": 8},
        {"clip": 0.0},
        {"clip": float("nan")},
        {"noise": -1.0},
        {"noise": float("nan")},
        {"norm": 0.0},
        {"norm": float("nan")},
        {"room": -1},
        {"noise": 1.0, "room": 0},
        {"noise": 1.0, "room": 19, "with_counts": True, "clip": 1.0},
        {"max_clients": 2**31},
    ],
)
def test_terms_that_make_no_sense_are_refused(changes):
    with pytest.raises(InputError):
        terms_of(**changes)


def test_terms_have_one_text_and_every_bit_of_it_counts():
    terms = terms_of(noise=0.1, room=2, clip=1.0, norm=1.0)
    text = terms.encode()
    assert SumParams.decode(text) == terms
    for at in range(8 * len(text)):
        changed = bytearray(text)
        changed[at // 8] ^= 1 << at % 8
        try:
            found = SumParams.decode(bytes(changed))
        except MalformedError:
            continue
        assert found.digest != terms.digest
    for data in (b"", text[:-1], text + b"\0"):
        with pytest.raises(MalformedError):
            SumParams.decode(data)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([(np.array([1]), np.ones((1, 3), np.uint32))], ShapeError),
        ("repeated", KeySpaceError),
        ("outside", KeySpaceError),
        ("ring", ShapeError),
        ("width", ShapeError),
    ],
    ids=["parts", "repeated", "outside", "ring", "width"],
)
@pytest.mark.parametrize("place", [0, 1])
def test_rows_that_do_not_fit_are_not_shared(rows, kind, place):
    terms = terms_of()
    given = rows_of(terms, 3)
    width = terms.parts[place].width
    wrong = {
        "repeated": (np.array([1, 1]), np.ones((2, width), np.uint32)),
        "outside": (np.array([99]), np.ones((1, width), np.uint32)),
        "ring": (np.array([1]), np.ones((1, width), np.uint16)),
        "width": (np.array([1]), np.ones((1, width + 1), np.uint32)),
    }
    if isinstance(rows, str):
        given[place] = wrong[rows]
        rows = given
    with pytest.raises(kind):
        shares_of(terms, rows)


def test_a_cohort_larger_than_the_ring_or_with_repeats_is_refused():
    for cohort in ([*COHORT, "one more"], [COHORT[0]] * 2):
        with pytest.raises(InputError, match="cohort"):
            server_of(terms_of(), 0, cohort)
    with pytest.raises(InputError, match="two servers"):
        server_of(terms_of(), 2)


def test_messages_are_as_long_as_the_terms_say_whatever_they_hold():
    terms = terms_of()
    empty = [(np.zeros(0, np.int64), np.zeros((0, p.width), np.uint32)) for p in terms.parts]
    for rows in (empty, rows_of(terms, 1), rows_of(terms, 2)):
        made = shares_of(terms, rows)
        assert len(made.public) == terms.facts.public_message_bytes
        assert [len(m) for m in made.to] == [
            terms.facts.own_message_bytes(party) for party in (0, 1)
        ]
        sealed = 2 * SEAL_BYTES
        assert terms.facts.upload_bytes == len(made.public) + sum(map(len, made.to)) + sealed


def test_nothing_that_is_printed_holds_a_key_or_a_number():
    terms = terms_of()
    made = shares_of(
        terms, [(np.array([33]), np.full((1, 3), 77, np.uint32)), *rows_of(terms, 1)[1:]]
    )
    server = server_of(terms, 0)
    server.accept(COHORT[0], made.to[0])
    assert repr(made) == (
        f"SumShares({len(made.public)} bytes, and {len(made.to[0])} and {len(made.to[1])} "
        "for the servers)"
    )
    assert repr(server) == "SumServer(party 0, open, 1 clients)"
    assert len(pack_receipt(terms.facts, 0, server.receipt)) == receipt_message_bytes(1)


def test_receipts_name_model_params_cohort_places_and_messages_and_each_is_compared():
    terms = terms_of()
    _, sent = sent_by(terms, COHORT[:3])
    servers = servers_of(terms, sent)
    lists = [server.close() for server in servers]
    receipt = read_receipt(terms.facts, 1, servers[1].reduce(lists[0]))
    servers[0].reduce(lists[1])
    digests = {place: sha256(sent[COHORT[place]].public).digest() for place in range(3)}
    names = sha256(b"".join(name.encode() + b"\0" for name in COHORT)).digest()
    assert receipt == Receipt.of(terms.facts, names, digests)
    assert (receipt.model, receipt.params) == (bytes(32), sha256(terms.encode()).digest())
    names = ["model", "params", "cohort", "messages"]
    for name, value in {"places": (0, 1), **dict.fromkeys(names, bytes(31) + b"x")}.items():
        wrong = pack_receipt(terms.facts, 1, replace(receipt, **{name: value}))
        with pytest.raises(MismatchError, match="same receipt"):
            servers[0].agree(wrong)
    good = pack_receipt(terms.facts, 1, receipt)
    for bad in (*truncations(good), *extensions(good), *bit_flips(good)):
        with pytest.raises(MalformedError):
            servers[0].agree(bad)
    servers[0].agree(good)


@pytest.mark.parametrize("party", [0, 1])
def test_what_was_made_from_another_model_is_refused(party):
    terms, model, other = terms_of(), bytes(31) + b"1", bytes(31) + b"2"
    server = server_of(terms, party, model=model)
    made = {name: shares_of(terms, rows_of(terms, 1), model=name) for name in (model, other)}
    for wrong in (made[other], shares_of(terms, rows_of(terms, 1))):
        with pytest.raises(StaleError):
            server.accept(COHORT[0], wrong.to[party])
    server.accept(COHORT[0], made[model].to[party])
    server.close()
    with pytest.raises(StaleError):
        server.reduce(server_of(terms, 1 - party, model=other).close())


def test_an_adder_without_counts_opens_no_sum_that_drops_rows():
    counted, open_to_all = terms_of(min_per_key=2), terms_of()

    class Bare(ShareAdder):
        """Adds, and counts nothing."""

    with pytest.raises(InputError, match="got Bare without `counts` and `drop`"):
        SumServer(counted.facts, 0, COHORT, Bare())
    server = SumServer(open_to_all.facts, 0, COHORT, Bare())
    server._phase = "agreed"
    with pytest.raises(ViolationError, match="opens every row"):
        server.counts()
