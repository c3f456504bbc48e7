"""Genuine quotes of Intel's hardware, under policies and at fixed times.

No public quote binds a key of ours. So here the binding is shown to refuse foreign quotes; that it
accepts its own is shown with simulated evidence, in test_simulated.py.
"""

import json
import sys
from dataclasses import replace

import pytest

from keyhole.delivery.enclave.client import ask, fresh_nonce
from keyhole.delivery.enclave.verifier import Measurement, Policy, verify, verify_quote
from keyhole.errors import AttestationError, InputError
from tests.delivery.enclave.tables import (
    DAY,
    WAIVED,
    flipped,
    genuine,
    genuine_policy,
    issued,
    params_of,
    table,
)

pytest.importorskip("dcap_qvl")

SIGNED = {"tdx": 48 + 584, "sgx": 48 + 384}  # head and report, all of it under the signature
SIGNED_COLLATERAL = [
    "root_ca_crl",
    "pck_crl",
    "tcb_info",
    "tcb_info_signature",
    "qe_identity",
    "qe_identity_signature",
]


class CountingHost:
    """A host that shows given evidence, and counts what it is handed in return."""

    def __init__(self, evidence):
        self._evidence = evidence
        self.received = 0

    def evidence(self, nonce):
        return self._evidence

    def answer(self, sealed):
        self.received += len(sealed)
        raise AssertionError("a request was sent to an enclave that nobody verified")


def refusal_of(evidence, policy, now):
    """Why a client refuses, after trying to retrieve; it has sent nothing."""
    host, nonce, params = CountingHost(evidence), fresh_nonce(), params_of(table(), 3)
    with pytest.raises(AttestationError) as refused:
        host.answer(ask(host.evidence(nonce), nonce, policy, params, [1, 2], now=now).messages()[0])
    assert host.received == 0
    return refused.value.wrong


@pytest.fixture(params=["tdx", "sgx"])
def good(request):
    """Evidence with a policy and a time under which its quote is accepted."""
    evidence = genuine(request.param)
    waived = WAIVED if request.param == "sgx" else {}
    return evidence, genuine_policy(evidence, **waived), issued(evidence) + DAY


def test_a_genuine_tdx_quote_is_up_to_date():
    evidence = genuine("tdx")
    claims = verify_quote(evidence, genuine_policy(evidence), issued(evidence) + DAY)
    assert (claims.kind, claims.tcb_status, claims.is_debug) == ("tdx", "UpToDate", False)
    assert claims.report_data == evidence.quote[568:632]
    assert claims.advisories == frozenset()
    assert claims.warning == ""


def test_a_genuine_sgx_quote_is_refused_by_default():
    evidence = genuine("sgx")
    policy, now = genuine_policy(evidence), issued(evidence) + DAY
    assert refusal_of(evidence, policy, now) == "a platform that is not up to date"
    with pytest.raises(AttestationError, match="ConfigurationAndSWHardeningNeeded"):
        verify_quote(evidence, policy, now)


def test_a_genuine_sgx_quote_is_accepted_once_status_and_advisories_are_waived():
    evidence = genuine("sgx")
    now = issued(evidence) + DAY
    claims = verify_quote(evidence, genuine_policy(evidence, **WAIVED), now)
    assert claims.advisories == WAIVED["advisories"]
    assert claims.report_data.rstrip(b"\0") == b"Hello, world!"
    only_status = genuine_policy(evidence, tcb_statuses=WAIVED["tcb_statuses"])
    assert refusal_of(evidence, only_status, now) == "a platform with a security advisory"


def test_a_genuine_quote_that_binds_another_key_is_refused(good):
    assert refusal_of(*good) == "a quote that does not belong to this key, table and nonce"


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_byte_under_the_signature_of_a_quote_counts(good, step):
    evidence, policy, now = good
    for byte in range(0, SIGNED[evidence.kind], step):
        changed = replace(evidence, quote=flipped(evidence.quote, 8 * byte + byte % 8))
        with pytest.raises(AttestationError, match="quote"):
            verify_quote(changed, policy, now)


@pytest.mark.parametrize("byte", [0, 4, 12, 48, 190, 400, 640, 720, 800, 1300, 1400])
def test_nothing_is_sent_on_a_damaged_quote(good, byte):
    evidence, policy, now = good
    changed = replace(evidence, quote=flipped(evidence.quote, 8 * byte))
    assert refusal_of(changed, policy, now) in {
        "a quote of another form",
        "the quote cannot be verified",
    }


def _check_flips(good, step):
    """A flipped bit is refused or changes no claim: copies of Intel's root are not read."""
    evidence, policy, now = good
    claims, accepted = verify_quote(evidence, policy, now), 0
    for byte in range(0, len(evidence.quote), step):
        changed = replace(evidence, quote=flipped(evidence.quote, 8 * byte + byte % 8))
        try:
            assert verify_quote(changed, policy, now) == claims
            accepted += 1
        except AttestationError:
            pass
    # The last of three certificates is about a seventh of a quote.
    assert accepted * step < len(evidence.quote) / 6


def test_a_flipped_bit_of_a_quote_is_refused_or_changes_no_claim(good):
    _check_flips(good, step=53)


@pytest.mark.slow
def test_any_flipped_byte_of_a_quote_is_refused_or_changes_no_claim(good):
    _check_flips(good, step=1)


@pytest.mark.parametrize("field", SIGNED_COLLATERAL)
def test_a_changed_field_of_the_collateral_is_refused(good, field):
    evidence, policy, now = good
    fields = json.loads(evidence.collateral)
    for at in range(0, len(fields[field]), max(1, len(fields[field]) // 9)):
        other = "1" if fields[field][at] != "1" else "2"
        changed = {**fields, field: fields[field][:at] + other + fields[field][at + 1 :]}
        damaged = replace(evidence, collateral=json.dumps(changed).encode())
        assert refusal_of(damaged, policy, now) in {
            "the quote cannot be verified",
            "the collateral cannot be read",
        }


@pytest.mark.parametrize("field", ["tcb_info_issuer_chain", "qe_identity_issuer_chain"])
def test_collateral_under_another_chain_is_refused(good, field):
    evidence, policy, now = good
    fields = json.loads(evidence.collateral)
    for chain in ("", fields["pck_crl_issuer_chain"]):
        damaged = replace(evidence, collateral=json.dumps({**fields, field: chain}).encode())
        assert refusal_of(damaged, policy, now) == "the quote cannot be verified"


def test_collateral_of_another_platform_is_refused(good):
    evidence, policy, now = good
    other = genuine("sgx" if evidence.kind == "tdx" else "tdx").collateral
    changed = replace(evidence, collateral=other)
    assert refusal_of(changed, policy, now) == "the quote cannot be verified"


@pytest.mark.parametrize("collateral", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_collateral_that_is_none_is_refused(good, collateral):
    evidence, policy, now = good
    changed = replace(evidence, collateral=collateral)
    assert refusal_of(changed, policy, now) == "the collateral cannot be read"


@pytest.mark.parametrize("value", [None, 7, ["a"], "\ud800"])
def test_a_field_of_collateral_that_is_no_text_is_refused(good, value):
    evidence, policy, now = good
    for field in json.loads(evidence.collateral):
        changed = json.dumps({**json.loads(evidence.collateral), field: value}).encode()
        assert refusal_of(replace(evidence, collateral=changed), policy, now)


def test_collateral_with_a_field_too_few_or_too_many_is_refused(good):
    evidence, policy, now = good
    fields = json.loads(evidence.collateral)
    more, fewer = {**fields, "extra": ""}, dict(list(fields.items())[1:])
    for changed in (more, fewer):
        damaged = replace(evidence, collateral=json.dumps(changed).encode())
        assert refusal_of(damaged, policy, now) == "the collateral cannot be read"


@pytest.mark.parametrize(
    ("days", "reason"), [(-2, "issue date is in the future"), (40, "expired"), (4000, "CrlExpired")]
)
def test_collateral_out_of_its_time_is_refused(good, days, reason):
    evidence, policy, _ = good
    now = issued(evidence) + days * DAY
    assert refusal_of(evidence, policy, now) == "the quote cannot be verified"
    with pytest.raises(AttestationError, match=reason):
        verify_quote(evidence, policy, now)


def test_a_policy_bounds_when_collateral_was_issued(good):
    evidence, policy, now = good
    late = replace(policy, collateral_from=issued(evidence) + DAY)
    early = replace(policy, collateral_until=issued(evidence) - DAY)
    for bounded in (late, early):
        assert refusal_of(evidence, bounded, now) == "collateral that is too old, or not yet valid"


@pytest.mark.parametrize("change", [lambda q: q[:-50], lambda q: q[:-1], lambda q: q + bytes(1)])
def test_a_quote_of_another_length_than_the_pinned_one_is_refused(good, change):
    evidence, policy, now = good
    changed = replace(evidence, quote=change(evidence.quote))
    assert refusal_of(changed, policy, now) == "a quote of another length"


def test_without_a_pinned_length_a_quote_ends_where_its_fields_do(good):
    evidence, policy, now = good
    free = replace(policy, quote_bytes=None)
    # The TDX file carries 70 zeros behind the quote, which nothing signs.
    end = {"tdx": 4936, "sgx": 4600}[evidence.kind]
    bare = replace(evidence, quote=evidence.quote[:end])
    assert verify_quote(bare, free, now) == verify_quote(evidence, policy, now)
    for length in (0, 1, 47, 48, 500, 700, 770, 1300, end - 50, end - 1):
        cut = replace(evidence, quote=evidence.quote[:length])
        assert refusal_of(cut, free, now) == "a quote of another form"
    for behind in (bytes(1), bytes(70), b"x" * 50):
        longer = replace(bare, quote=bare.quote + behind)
        assert refusal_of(longer, free, now) == "a quote of another form"


def test_padding_of_a_pinned_length_is_zeros(good):
    evidence, policy, now = good
    longer = replace(evidence, quote=evidence.quote + b"x")
    pinned = replace(policy, quote_bytes=len(longer.quote))
    assert refusal_of(longer, pinned, now) == "a quote of another form"


def test_the_library_itself_does_not_notice_bytes_behind_a_quote(good):
    """Why lengths are checked here; if this fails, the library has become stricter."""
    import dcap_qvl

    evidence, _, now = good
    collateral = dcap_qvl.QuoteCollateralV3.from_json(evidence.collateral.decode())
    assert dcap_qvl.verify(evidence.quote + b"x" * 50, collateral, now)


def test_lengths_within_a_quote_must_agree(good):
    evidence, policy, now = good
    inner = {"tdx": [632, 766, 1218, 1254], "sgx": [432, 1012, 1048]}[evidence.kind]
    for at in inner:
        changed = replace(evidence, quote=flipped(evidence.quote, 8 * at))
        assert refusal_of(changed, policy, now) == "a quote of another form"


def test_a_quote_under_the_name_of_other_hardware_is_refused(good):
    evidence, policy, now = good
    renamed = replace(evidence, kind="sgx" if evidence.kind == "tdx" else "tdx")
    assert refusal_of(renamed, policy, now) == "a quote of another form"


def test_each_register_of_a_measurement_must_be_listed(good):
    evidence, policy, now = good
    (listed,) = policy.measurements
    for place, register in enumerate(listed.registers):
        registers = list(listed.registers)
        registers[place] = flipped(register, 5)
        other = Policy(frozenset({Measurement(listed.kind, tuple(registers))}), **WAIVED)
        other = replace(other, quote_bytes=policy.quote_bytes, tcb_statuses=policy.tcb_statuses)
        assert refusal_of(evidence, other, now) == "an unknown measurement"


def test_without_the_library_the_extra_is_named(good, monkeypatch):
    evidence, policy, now = good
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[enclave\]'"):
        verify(evidence, policy, bytes(32), now)
