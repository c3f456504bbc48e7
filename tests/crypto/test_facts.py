"""Public facts: every kind of them has one text for each meaning, and what is no such text is
refused."""

import struct
from hashlib import sha256

import pytest

from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.two_servers.params import PartParams, SumParams
from keyhole.crypto.codec import read_facts
from keyhole.delivery.enclave.messages import EnclaveParams
from keyhole.delivery.pir.database import PirParams
from keyhole.errors import MalformedError
from tests.delivery.pir.mutations import bit_flips, extensions, truncations

NAME, DIGEST = bytes(range(16)), sha256(b"slices").digest()
KINDS = {
    "private retrieval": PirParams("one-server", NAME, DIGEST, DIGEST, 1000, 24, 12),
    "an enclave's table": EnclaveParams(NAME, DIGEST, DIGEST, 1000, 24, 12),
    "a sum at two servers": SumParams(
        NAME, (PartParams(1000, 5, 10, True),), 9, 3, norm=1.0, noise=0.5, room=1
    ),
    "a secure sum": SecAggParams(NAME, 9, 1000, 16, 5, 6),
    "a signed sum": SecAggParams(NAME, 9, 1000, signed=True),
}
kinds = pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS)


@kinds
def test_facts_come_back_from_their_text_whatever_holds_it(facts):
    text = facts.encode()
    for data in (text, bytearray(text), memoryview(text)):
        read = type(facts).decode(data)
        assert (read, read.digest) == (facts, sha256(text).digest())


@kinds
def test_a_text_of_another_length_is_refused(facts):
    for bad in (*truncations(facts.encode()), *extensions(facts.encode())):
        with pytest.raises(MalformedError, match="these are not"):
            type(facts).decode(bad)


@kinds
def test_a_flipped_bit_makes_other_facts_or_none(facts):
    """Nothing protects facts from changes: parties compare digests. No two texts mean the same."""
    others = set()
    for bad in bit_flips(facts.encode()):
        try:
            others.add(type(facts).decode(bad))
        except MalformedError:
            continue
        assert type(facts).decode(bad).encode() == bad
    assert others
    assert facts not in others


@kinds
def test_another_magic_is_refused(facts):
    text = facts.encode()
    for at in range(4):
        with pytest.raises(MalformedError):
            type(facts).decode(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])


def test_a_mistake_of_ours_is_not_called_bad_facts():
    """Only what numbers out of range, or a wrong length, raise."""

    def build(_):
        raise TypeError

    with pytest.raises(TypeError):
        read_facts(b"", "facts", build)
    with pytest.raises(MalformedError, match="these are not facts: got 3 bytes"):
        read_facts(b"abc", "facts", lambda data: struct.unpack("<I", data))
