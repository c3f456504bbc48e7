"""Params and frames: what every scheme of private retrieval says about itself, and how its
messages are read. Renew the golden bytes with KEYHOLE_RENEW_GOLDEN=1."""

import mmap
import struct
from dataclasses import replace
from hashlib import sha256
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.delivery.base import name_of_round
from keyhole.delivery.pir import messages
from keyhole.delivery.pir.database import PirParams, Scheme
from keyhole.delivery.pir.messages import (
    FRAME_BYTES,
    REPLY_BYTES,
    check_of,
    seal,
    seal_reply,
    unseal,
    unseal_reply,
)
from keyhole.errors import InputError, MalformedError, ProtocolError, StaleError
from keyhole.wire.http import REFUSAL
from tests.delivery.pir.golden import assert_golden
from tests.delivery.pir.mutations import bit_flips, extensions, resealed, truncations

MODEL, ROOT = sha256(b"manifest").digest(), sha256(b"slices").digest()
PARAMS = PirParams("two-server", name_of_round("round-7"), MODEL, ROOT, 1000, 24, 12)
BODY = bytes(range(40))

PARAMS_STRATEGY = st.builds(
    lambda scheme, name, model, root, num_keys, row_bytes, limit: PirParams(
        scheme, name, model, root, num_keys, row_bytes, min(limit, num_keys)
    ),
    st.sampled_from(get_args(Scheme)),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 40),
    st.integers(1, 1 << 40),
)


def open_query(data):
    return bytes(unseal(data, "query", PARAMS, 1, len(BODY)))


# PirParams


@given(params=PARAMS_STRATEGY)
def test_terms_survive_their_bytes(params):
    assert PirParams.decode(params.encode()) == params
    assert PirParams.decode(params.encode()).digest == params.digest


def test_no_two_terms_have_one_digest():
    others = [
        replace(PARAMS, scheme="one-server"),
        replace(PARAMS, round=name_of_round("round-8")),
        replace(PARAMS, num_keys=1001),
        replace(PARAMS, row_bytes=25),
        replace(PARAMS, max_keys=13),
        replace(PARAMS, model=sha256(b"other manifest").digest()),
        replace(PARAMS, root=sha256(b"other slices").digest()),
    ]
    assert len({params.digest for params in [PARAMS, *others]}) == len(others) + 1


def test_terms_of_another_length_are_refused():
    data = PARAMS.encode()
    for bad in [*truncations(data), *extensions(data)]:
        with pytest.raises(MalformedError):
            PirParams.decode(bad)


def test_a_flipped_bit_makes_other_terms_or_none():
    """No check protects params: a client compares what both servers say. One text, one meaning."""
    found = set()
    for bad in bit_flips(PARAMS.encode()):
        try:
            found.add(PirParams.decode(bad).digest)
        except MalformedError:
            continue
        assert PirParams.decode(bad).encode() == bad
    assert PARAMS.digest not in found


@pytest.mark.parametrize("at", range(8), ids=lambda at: f"byte {at}")
def test_another_magic_scheme_or_filling_is_refused(at):
    data = bytearray(PARAMS.encode())
    data[at] ^= 0x80
    with pytest.raises(MalformedError):
        PirParams.decode(bytes(data))


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": "three-server"},
        {"round": bytes(15)},
        {"model": bytes(31)},
        {"root": bytes(33)},
        {"num_keys": 0},
        {"row_bytes": 0},
        {"max_keys": 0},
        {"max_keys": 1001},
        {"row_bytes": (1 << 40) + 1},
    ],
    ids=str,
)
def test_terms_without_sense_are_refused(change):
    with pytest.raises(InputError):
        replace(PARAMS, **change)


def test_rounds_have_names_of_one_length_and_no_two_the_same():
    names = {name_of_round(text) for text in ["", "a", "b", "ab", "\u00e4", "round-1" * 100]}
    assert {len(name) for name in names} == {16}
    assert len(names) == 6


# Frames


@pytest.mark.parametrize("kind", ["query", "reply"])
@pytest.mark.parametrize("server", [0, 1])
@given(body=st.binary(max_size=99))
def test_a_frame_gives_back_its_body(kind, server, body):
    message = seal(kind, PARAMS, server, body)
    assert len(message) == len(body) + FRAME_BYTES
    assert bytes(unseal(message, kind, PARAMS, server, len(body))) == body


def test_any_kind_of_buffer_can_be_sealed_and_read():
    messages = {seal("query", PARAMS, 1, kind(BODY)) for kind in (bytes, bytearray, memoryview)}
    (message,) = messages
    assert open_query(memoryview(message)) == open_query(bytearray(message)) == BODY


def test_every_damaged_frame_is_malformed_and_says_nothing_of_its_bytes():
    message = seal("query", PARAMS, 1, BODY)
    texts = set()
    for bad in bit_flips(message):
        with pytest.raises(MalformedError) as refused:
            open_query(bad)
        texts.add(str(refused.value))
    assert len(texts) == 1
    for bad in [*truncations(message), *extensions(message)]:
        with pytest.raises(MalformedError, match=f"{len(bad)} bytes"):
            open_query(bad)


def test_a_head_with_one_bit_changed_is_refused_though_its_check_is_right():
    """Whoever forges a message can make its check as well; the head is compared all the same."""
    message = seal("query", PARAMS, 1, BODY)
    for at, bad in enumerate(bit_flips(message[: FRAME_BYTES - 16])):
        kind = StaleError if at >= 8 * 8 else MalformedError  # magic, kind, server, zeros: 8 bytes
        with pytest.raises(kind):
            open_query(resealed(bad + message[FRAME_BYTES - 16 :]))


def test_resealing_makes_what_sealing_makes():
    """The forger of these tests is right about the check: otherwise they would show nothing."""
    message = seal("query", PARAMS, 1, BODY)
    assert resealed(message) == message
    changed = seal("query", PARAMS, 1, b"!" + BODY[1:])
    at = FRAME_BYTES - 16
    assert resealed(message[:at] + b"!" + message[at + 1 :]) == changed


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (seal("reply", PARAMS, 1, BODY), MalformedError),
        (seal("query", PARAMS, 0, BODY), MalformedError),
        (seal("query", replace(PARAMS, round=name_of_round("round-8")), 1, BODY), StaleError),
        (seal("query", replace(PARAMS, max_keys=11), 1, BODY), StaleError),
        (seal("query", replace(PARAMS, scheme="one-server"), 1, BODY), StaleError),
    ],
    ids=["a reply", "for the other server", "of another round", "of other params", "of one server"],
)
def test_a_whole_message_that_belongs_elsewhere_is_refused(message, error):
    with pytest.raises(error):
        open_query(message)


def test_damage_is_found_before_terms_are_compared():
    stale = seal("query", replace(PARAMS, round=name_of_round("round-8")), 1, BODY)
    for bad in [stale[:-1], stale + b"\0", *bit_flips(stale)]:
        with pytest.raises(MalformedError):
            open_query(bad)


QUERY = seal("query", PARAMS, 1, b"what is asked")


def test_a_reply_gives_back_its_rows_to_whoever_asked():
    reply = seal_reply(QUERY, PARAMS, 1, BODY)
    assert reply == seal("reply", PARAMS, 1, check_of(QUERY) + BODY)
    assert len(reply) == REPLY_BYTES + len(BODY)
    assert bytes(unseal_reply(reply, check_of(QUERY), PARAMS, 1, len(BODY))) == BODY


def test_the_reply_to_another_query_is_malformed_though_it_is_whole():
    for at in range(16):
        other = bytearray(check_of(QUERY))
        other[at] ^= 1
        reply = seal("reply", PARAMS, 1, bytes(other), BODY)
        with pytest.raises(MalformedError, match="another query"):
            unseal_reply(reply, check_of(QUERY), PARAMS, 1, len(BODY))


def test_a_reply_that_is_summed_in_pieces_has_the_same_check(monkeypatch):
    whole = seal_reply(QUERY, PARAMS, 1, BODY)
    for piece in (1, 7, 16, 40):
        monkeypatch.setattr(messages, "_PIECE", piece)
        assert seal_reply(QUERY, PARAMS, 1, BODY) == whole == resealed(whole)


@pytest.mark.slow
def test_a_reply_of_two_gibibytes_has_a_check():
    """The library takes fewer bytes at once. Private pages that nobody wrote take no memory."""
    with mmap.mmap(-1, 2**31 + 5, flags=mmap.MAP_PRIVATE) as zeros, memoryview(zeros) as body:
        assert len(messages._sum_of_reply([b"head", body])) == 16


def test_the_refusal_is_one_text_that_is_no_message():
    assert len(REFUSAL) == FRAME_BYTES
    for kind in ("query", "reply"):
        for body_bytes in (0, len(BODY)):
            with pytest.raises(MalformedError):
                unseal(REFUSAL, kind, PARAMS, 0, body_bytes)
            with pytest.raises(MalformedError):
                unseal(resealed(REFUSAL), kind, PARAMS, 0, body_bytes)


def test_checks_tell_messages_apart():
    messages = [
        seal("query", PARAMS, server, struct.pack("<Q", i)) for server in (0, 1) for i in (1, 2)
    ]
    assert len({check_of(message) for message in messages}) == 4
    assert {len(check_of(message)) for message in messages} == {16}


def test_all_kinds_of_refusal_look_alike_to_http():
    kinds = ProtocolError.__subclasses__()
    assert {MalformedError, StaleError} <= set(kinds)
    assert {kind.http_status for kind in kinds} == {ProtocolError.http_status}


def test_bytes_of_terms_and_frames_are_golden():
    others = {scheme: replace(PARAMS, scheme=scheme).encode() for scheme in get_args(Scheme)}
    frames = {
        f"{kind} {server}": seal(kind, PARAMS, server, BODY)
        for kind in ("query", "reply")
        for server in (0, 1)
    }
    assert_golden("params-and-frames", {**others, **frames, "refusal": REFUSAL})
