"""Evidence and params as bytes: one length, one form."""

from dataclasses import replace
from hashlib import sha256, sha512

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.delivery.enclave.messages import EnclaveParams, Evidence, report_data_of
from keyhole.errors import InputError, MalformedError
from tests.delivery.enclave.tables import MODEL, ROUND, flipped, params_of, table

EVIDENCE = Evidence("tdx", b"quote", b"collateral", bytes(range(32)), bytes(range(32, 64)))
ROOT = bytes(range(32, 64))
PARAMS = EnclaveParams(ROUND, MODEL, ROOT, 37, 29, 8)


@given(
    st.sampled_from(["tdx", "sgx", "simulated"]),
    st.binary(max_size=300),
    st.binary(max_size=300),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
)
def test_evidence_comes_back_as_it_was(kind, quote, collateral, public, config):
    evidence = Evidence(kind, quote, collateral, public, config)
    assert Evidence.decode(evidence.encode()) == evidence


def test_the_bytes_of_evidence():
    head = b"KHA1" + bytes([0, 0, 0, 0]) + (5).to_bytes(4, "little") + (10).to_bytes(4, "little")
    assert EVIDENCE.encode() == head + bytes(range(64)) + b"quote" + b"collateral"


def test_the_bytes_of_terms():
    numbers = b"".join(n.to_bytes(8, "little") for n in (37, 29, 8))
    assert PARAMS.encode() == b"KHT4" + bytes(4) + ROUND + MODEL + ROOT + numbers
    assert PARAMS.digest == sha256(PARAMS.encode()).digest()
    assert EnclaveParams.decode(PARAMS.encode()) == PARAMS


@pytest.mark.parametrize("row_bytes", [1, 8, 24])
def test_a_request_or_reply_that_cannot_be_sealed_at_once_is_refused(row_bytes):
    """2^31 - 4,096 bytes of keys, 8 each, or of records."""
    limit = (2**31 - 4096) // max(8, row_bytes)
    EnclaveParams(ROUND, MODEL, ROOT, 2**31, row_bytes, limit)
    with pytest.raises(InputError, match="2 GB"):
        EnclaveParams(ROUND, MODEL, ROOT, 2**31, row_bytes, limit + 1)


@pytest.mark.parametrize("kind", [Evidence, EnclaveParams])
def test_a_cut_extended_or_changed_head_is_refused(kind):
    data = (EVIDENCE if kind is Evidence else PARAMS).encode()
    changed = [data[:end] for end in range(len(data))] + [data + b"\0"]
    # Magic, kind and reserved bytes; a flipped kind may name another one.
    changed += [flipped(data, bit) for bit in (0, 31, 39, 40, 63)]
    for damaged in changed:
        with pytest.raises(MalformedError):
            kind.decode(damaged)


def test_lengths_that_lie_are_refused():
    data = EVIDENCE.encode()
    for bit in range(64, 128):
        with pytest.raises(MalformedError):
            Evidence.decode(flipped(data, bit))


@pytest.mark.parametrize(
    "fields",
    [{"kind": "sev"}, {"public": b""}, {"config": bytes(31)}, {"quote": bytes(70_000)}],
)
def test_evidence_of_no_enclave_is_refused(fields):
    with pytest.raises(InputError, match="evidence of no enclave"):
        replace(EVIDENCE, **fields)


def test_report_data_binds_key_table_and_nonce():
    key, config, nonce = b"k" * 32, b"c" * 32, b"n" * 32
    bound = sha512(b"keyhole-enclave-v1" + key + config + nonce).digest()
    assert report_data_of(key, config, nonce) == bound
    for lengths in [(31, 33, 32), (32, 31, 33), (32, 32, 0)]:
        with pytest.raises(InputError):
            report_data_of(*(bytes(length) for length in lengths))


def test_terms_differ_when_anything_does():
    records = table()
    params = [
        params_of(records, 8),
        params_of(records, 8, "round-8"),
        params_of(records[:-1], 8),
        params_of(records[:, :-1], 8),
        params_of(records, 7),
        params_of(records[::-1], 8),
        params_of(records.reshape(29, 37), 8),
        replace(params_of(records, 8), model=bytes(32)),
    ]
    assert len({each.digest for each in params}) == len(params)
    assert params_of(records, 1000).max_keys == len(records)


@pytest.mark.parametrize(
    "fields",
    [
        {"round": b""},
        {"model": bytes(31)},
        {"root": bytes(33)},
        {"num_keys": 0},
        {"row_bytes": 0},
        {"max_keys": 0},
        {"max_keys": 38},
        {"row_bytes": 1 << 31},
    ],
)
def test_terms_that_make_no_sense_are_refused(fields):
    with pytest.raises(InputError, match=r"make no sense|too large"):
        replace(PARAMS, **fields)
