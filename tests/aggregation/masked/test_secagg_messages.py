"""Messages of a secure sum: their bytes, and how those that cannot be used are refused."""

import re
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyhole.aggregation.masked.messages import FRAME_BYTES, REFUSAL
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.errors import MalformedError, ProtocolError, ReplayError, StaleError
from tests.aggregation.masked.secagg_parties import (
    ROUND,
    STEPS,
    Parties,
    body_of,
    plain_sum,
    settings_of,
    vector_of,
)
from tests.delivery.pir.golden import assert_golden
from tests.delivery.pir.mutations import bit_flips, truncations

CHECK_BYTES, HEAD_BYTES = 16, 60
SIGNED = settings_of(3, length=2, signed=True)  # every kind of message, and spare bits in the sets
LISTS = STEPS[1:]


def resealed(message):
    """The message with the check that belongs to its bytes: written from docs/wire.md and not with
    the code under test, since this is what a forger would do."""
    rest = message[:-CHECK_BYTES]
    return rest + AESGCM(b"keyhole-secagg-1").encrypt(bytes(12), b"", rest)


def with_body(message, body):
    return resealed(message[:HEAD_BYTES] + body + message[-CHECK_BYTES:])


def damaged(message):
    """Every truncation, every flipped bit, and longer ones."""
    yield from truncations(message)
    yield from bit_flips(message)
    yield from (message + b"\0", b"\0" + message, message * 2, REFUSAL)


def texts_of(refuse, messages):
    """What is said about bad messages, without their numbers; each is refused."""
    texts = set()
    for bad in messages:
        with pytest.raises(ProtocolError) as refused:
            refuse(bad)
        assert isinstance(refused.value, MalformedError)
        texts.add(re.sub(r"\d+", "n", str(refused.value)))
    return texts


def check_end(parties):
    """Nothing that was refused has left a trace."""
    np.testing.assert_array_equal(
        parties.server.sum(), plain_sum(parties.settings, parties.invited)
    )


# Bytes


def test_the_messages_of_version_1_are_these_bytes():
    parties = Parties(SIGNED)
    messages = {}
    for step in STEPS:
        if step in LISTS:
            messages[f"before {step}"] = parties.list_for(step, 1)
        parties.do(step)
        messages[step] = parties.said[step, 1]
    assert_golden("secagg", {"settings": SIGNED.encode(), **messages, "refusal": REFUSAL})


def test_a_message_is_laid_out_as_the_page_says():
    parties = Parties(SIGNED)
    parties.do("keys")
    message = parties.said["keys", 2]
    head = struct.pack("<4sB3xI16s32s", b"KHS1", 1, 2, ROUND, SIGNED.digest)
    secrets = parties.secrets(2)
    publics = secrets.cipher.public + secrets.mask.public
    assert message.startswith(head + publics)
    assert len(message) == FRAME_BYTES + 160
    assert resealed(message) == message
    listed = body_of(parties.list_for("shares", 0))
    assert (listed[0], listed[1 + 2 * 160 :]) == (0b111, body_of(message))


def test_the_lengths_of_all_messages_follow_from_the_settings():
    parties = Parties(SIGNED)
    slots = {"shares": 160, "input": 148, "unmasking": 64}  # of the lists before them
    bodies = {"keys": 160, "shares": 1 + 3 * 148, "input": 2 * 4, "confirmation": 64}
    for step in STEPS:
        if step in LISTS:
            expected = 1 + 3 * slots[step] if step in slots else 2
            assert len(parties.list_for(step, 0)) == FRAME_BYTES + expected
        parties.do(step)
        assert len(parties.said[step, 0]) == FRAME_BYTES + bodies.get(step, 1 + 3 * 66)


def test_whatever_is_wrong_the_answer_is_the_same():
    assert b"KHS1\xff" + bytes(FRAME_BYTES - 5) == REFUSAL


# Damage


@pytest.mark.parametrize("step", STEPS)
def test_every_damaged_message_to_the_server_is_refused_and_changes_nothing(step):
    parties = Parties(SIGNED).until(step)
    parties.say(step)
    good = parties.said[step, 1]
    texts = texts_of(lambda bad: parties.receive(step, 1, bad), damaged(good))
    assert len(texts) <= 2  # length, check
    for place in range(3):
        parties.receive(step, place, parties.said[step, place])
    for later in STEPS[STEPS.index(step) + 1 :]:
        parties.do(later)
    check_end(parties)


@pytest.mark.parametrize("step", LISTS)
def test_every_damaged_message_to_a_client_is_refused_and_changes_nothing(step):
    parties = Parties(SIGNED).until(step)
    good = parties.list_for(step, 1)
    texts = texts_of(lambda bad: parties.answer(step, 1, bad), damaged(good))
    assert len(texts) <= 2
    for later in STEPS[STEPS.index(step) :]:
        parties.do(later)
    check_end(parties)


# Forged, with a check that is right


def test_a_message_that_belongs_elsewhere_is_refused_though_it_is_whole():
    parties = Parties(SIGNED)
    parties.say("keys")
    good = parties.said["keys", 1]
    heads = [b"KHS2" + good[4:], good[:4] + b"\x02" + good[5:], good[:5] + b"\1" + good[6:]]
    other_place = good[:8] + b"\2" + good[9:]
    for bad in (*heads, other_place, parties.said["keys", 0]):
        with pytest.raises(MalformedError):
            parties.receive("keys", 1, resealed(bad))
    for at in range(12, HEAD_BYTES):
        with pytest.raises(StaleError):
            parties.receive("keys", 1, resealed(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]))
    parties.receive("keys", 1, good)


@pytest.mark.parametrize("place", [-1, 3, 2**32])
def test_a_place_that_there_is_not_is_refused(place):
    parties = Parties(SIGNED)
    parties.say("keys")
    with pytest.raises(MalformedError):
        parties.receive("keys", place, parties.said["keys", 0])


def test_a_message_of_another_round_is_stale():
    ours, theirs = Parties(settings_of(3)), Parties(SecAggParams(bytes(16), 3, 3))
    theirs.say("keys")
    with pytest.raises(StaleError):
        ours.receive("keys", 0, theirs.said["keys", 0])
    ours.do("keys")
    for place in range(3):
        theirs.receive("keys", place, theirs.said["keys", place])
    with pytest.raises(StaleError):
        ours.answer("shares", 0, theirs.list_for("shares", 0))


def test_a_vector_of_another_length_or_ring_is_refused_by_the_server():
    """As many bytes in another ring are a message under other settings."""
    parties = Parties(settings_of(3, length=4, bits=16)).until("input")
    for other, error in (
        (settings_of(3, length=5, bits=16), MalformedError),
        (settings_of(3, length=2, bits=32), StaleError),
    ):
        foreign = Parties(other).until("input")
        foreign.say("input")
        parties.list_for("input", 0)
        with pytest.raises(error):
            parties.receive("input", 0, foreign.said["input", 0])


@pytest.mark.parametrize("step", ["shares", "input", "unmasking"])
def test_spare_bits_and_bytes_about_nobody_are_refused(step):
    """A list for three clients: five spare bits; a fourth client would have no slot."""
    parties = Parties(settings_of(3, threshold=2))
    for earlier in STEPS[: STEPS.index(step)]:
        if earlier != "confirmation":
            parties.do(earlier, [0, 1])
    good = parties.list_for(step, 0)
    body = body_of(good)
    bad = [bytes([body[0] | 1 << bit]) + body[1:] for bit in range(3, 8)]
    if step != "unmasking":
        bad.append(body[:-1] + b"\1")  # of client 2, who is not there
    for forged in bad:
        with pytest.raises(MalformedError):
            parties.answer(step, 0, with_body(good, forged))
    parties.answer(step, 0, good)


def test_shares_for_others_than_those_on_the_list_are_refused():
    parties = Parties(settings_of(3)).until("shares")
    parties.say("shares")
    good = parties.said["shares", 0]
    body = body_of(good)
    assert body[0] == 0b110
    missing = bytes([0b010]) + body[1 : 1 + 2 * 148] + bytes(148)
    with pytest.raises(MalformedError):
        parties.receive("shares", 0, with_body(good, missing))
    parties.receive("shares", 0, good)


def test_an_unmasking_that_leaves_somebody_out_is_refused():
    parties = Parties(settings_of(3)).until("unmasking")
    parties.say("unmasking")
    good = parties.said["unmasking", 0]
    with pytest.raises(MalformedError):
        parties.receive(
            "unmasking", 0, with_body(good, bytes([0b011]) + body_of(good)[1:133] + bytes(66))
        )
    parties.receive("unmasking", 0, good)


# Order


@pytest.mark.parametrize("step", STEPS)
def test_a_second_message_of_a_step_is_a_replay_then_and_later(step):
    parties = Parties(SIGNED).until(step)
    parties.do(step)
    for later in (*STEPS[STEPS.index(step) + 1 :], None):
        with pytest.raises(ReplayError):
            parties.receive(step, 1, parties.said[step, 1])
        if later:
            parties.do(later)
    check_end(parties)


@pytest.mark.parametrize("step", STEPS)
def test_a_second_answer_of_a_client_is_a_replay(step):
    parties = Parties(SIGNED).until(step)
    listed = parties.list_for(step, 1)
    parties.answer(step, 1, listed)
    with pytest.raises(ReplayError):
        parties.answer(step, 1, listed)


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_message_before_its_step_is_refused_by_the_server(step):
    done = Parties(SIGNED).until(step)
    done.say(step)
    with pytest.raises(StaleError):
        Parties(SIGNED).receive(step, 1, done.said[step, 1])


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_list_before_its_step_is_refused_by_a_client(step):
    done = Parties(SIGNED).until(step)
    with pytest.raises(StaleError):
        Parties(SIGNED).answer(step, 1, done.list_for(step, 1))


def test_a_sum_before_its_time_or_a_second_time_is_refused():
    parties = Parties(settings_of(3))
    with pytest.raises(StaleError):
        parties.server.sum()
    parties.until("unmasking").do("unmasking")
    check_end(parties)
    with pytest.raises(ReplayError):
        parties.server.sum()


@pytest.mark.parametrize("step", ["shares", "input", "unmasking"])
def test_a_client_that_missed_a_step_is_out(step):
    """Neither lists for it nor messages of it any more."""
    parties = Parties(settings_of(4))
    order = [one for one in STEPS if one != "confirmation"]
    for earlier in order[: order.index(step)]:
        is_last = earlier == order[order.index(step) - 1]
        parties.do(earlier, [0, 1, 2] if is_last else None)
    with pytest.raises(StaleError):
        parties.list_for(step, 3)
    everyone = Parties(settings_of(4)).until(step)
    everyone.say(step)
    with pytest.raises(StaleError):
        parties.receive(step, 3, everyone.said[step, 3])


@pytest.mark.parametrize("step", ["shares", "input", "unmasking"])
def test_whoever_asks_without_being_there_does_not_end_a_step(step):
    parties = Parties(settings_of(4))
    order = [one for one in STEPS if one != "confirmation"]
    before = order[order.index(step) - 1]
    parties.until(before).do(before, [0, 1, 2])
    with pytest.raises(StaleError):
        parties.list_for(step, 3)
    parties.do(before, [3])
    for later in order[order.index(step) :]:
        parties.do(later)
    check_end(parties)


def test_nothing_that_is_printed_shows_a_secret():
    parties = Parties(SIGNED).until("unmasking")
    shown = [parties.server, *parties.clients.values(), *parties.identities, parties.secrets(0)]
    for thing in shown:
        assert len(repr(thing)) < 50
    assert vector_of(SIGNED, 0).tobytes() not in repr(vars(parties.server)).encode()
