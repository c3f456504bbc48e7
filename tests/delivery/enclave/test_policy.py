"""The policy, on claims: what a genuine signature does not let us change is shown here."""

from dataclasses import replace

import pytest

from keyhole.delivery.enclave.verifier import (
    NO_HARDWARE_PROTECTION,
    TCB_STATUSES,
    Claims,
    Measurement,
    Policy,
)
from keyhole.errors import AttestationError, InputError

KNOWN = Measurement("tdx", (bytes(48),) * 5)
NOW = 1000
GOOD = Claims(
    measurement=KNOWN,
    is_debug=False,
    tcb_status="UpToDate",
    advisories=frozenset(),
    report_data=bytes(64),
    oldest=900,
    newest=950,
    expires=2000,
)
POLICY = Policy(frozenset({KNOWN}))


def reason(policy, now=NOW, **changes):
    with pytest.raises(AttestationError) as refused:
        policy.check(replace(GOOD, **changes), now)
    return refused.value.wrong


def test_good_claims_pass():
    POLICY.check(GOOD, NOW)


def test_debug_mode_is_refused():
    assert reason(POLICY, is_debug=True) == "an enclave in debug mode"


@pytest.mark.parametrize("status", [*TCB_STATUSES[1:], "", "uptodate", "Unheard"])
def test_any_other_status_is_refused_by_default(status):
    assert reason(POLICY, tcb_status=status) == "a platform that is not up to date"


def test_a_status_can_be_waived_but_not_its_advisories_with_it():
    policy = replace(POLICY, tcb_statuses=frozenset({"SWHardeningNeeded"}))
    policy.check(replace(GOOD, tcb_status="SWHardeningNeeded"), NOW)
    assert reason(policy) == "a platform that is not up to date"
    named = {"tcb_status": "SWHardeningNeeded", "advisories": frozenset({"A", "B"})}
    assert reason(policy, **named) == "a platform with a security advisory"
    assert reason(replace(policy, advisories=frozenset({"A"})), **named)
    replace(policy, advisories=frozenset({"A", "B"})).check(replace(GOOD, **named), NOW)


@pytest.mark.parametrize(
    ("changes", "now"),
    [({"oldest": 899}, NOW), ({"newest": 961}, NOW), ({}, 949), ({"oldest": 0}, NOW)],
)
def test_collateral_outside_the_bounds_is_refused(changes, now):
    policy = replace(POLICY, collateral_from=900, collateral_until=960)
    policy.check(GOOD, NOW)
    assert reason(policy, now, **changes) == "collateral that is too old, or not yet valid"


def test_expired_collateral_is_refused():
    POLICY.check(GOOD, 2000)
    assert reason(POLICY, 2001) == "collateral that has expired"


def test_simulated_claims_need_leave_even_if_their_measurement_is_listed():
    simulated = Measurement("simulated", (bytes(32),))
    policy = Policy(frozenset({simulated, KNOWN}))
    assert reason(policy, measurement=simulated) == "simulated evidence"
    allowed = replace(policy, allow_simulation=True)
    allowed.check(replace(GOOD, measurement=simulated), NOW)
    assert replace(GOOD, measurement=simulated).warning == NO_HARDWARE_PROTECTION
    assert GOOD.warning == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"measurements": frozenset()},
        {"tcb_statuses": frozenset()},
        {"tcb_statuses": frozenset({"Revoked"})},
        {"tcb_statuses": frozenset({"UpToDate", "fine"})},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(fields):
    with pytest.raises(InputError, match="a policy that makes no sense"):
        Policy(**{"measurements": frozenset({KNOWN}), **fields})


@pytest.mark.parametrize(
    ("kind", "registers"),
    [
        ("tdx", (bytes(48),)),
        ("tdx", (bytes(48),) * 4 + (bytes(47),)),
        ("sgx", (bytes(32),)),
        ("sgx", (bytes(32),) * 3),
        ("simulated", ()),
        ("sev", (bytes(32),)),
    ],
)
def test_a_measurement_is_whole(kind, registers):
    with pytest.raises(InputError, match="a measurement that is not whole"):
        Measurement(kind, registers)
