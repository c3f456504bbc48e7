"""Simulated evidence: refused by default, and otherwise held to every rule that genuine ones are.

The binding of key, table and nonce that holds is shown here, since no genuine quote binds our key.
"""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.crypto.hpke import PrivateKey
from keyhole.delivery.enclave.client import ask, fresh_nonce
from keyhole.delivery.enclave.verifier import (
    NO_HARDWARE_PROTECTION,
    Measurement,
    Policy,
    SimulatedAttester,
    simulation_policy,
    verify,
)
from keyhole.errors import AttestationError, KeySpaceError
from tests.delivery.enclave.tables import (
    DAY,
    NOW,
    PROGRAM,
    SIMULATION,
    flipped,
    inside_with,
    params_of,
    question,
    table,
)


@pytest.fixture
def shown():
    """A nonce, and the evidence and params that an enclave shows for it."""
    inside, params = inside_with(table())
    nonce = fresh_nonce()
    return nonce, inside.evidence(nonce), params


def reason(evidence, nonce, policy=SIMULATION, now=NOW):
    with pytest.raises(AttestationError) as refused:
        verify(evidence, policy, nonce, now)
    return refused.value.wrong


def test_simulated_evidence_is_refused_by_default(shown):
    nonce, evidence, _ = shown
    policy = Policy(frozenset({PROGRAM}))
    assert reason(evidence, nonce, policy) == "simulated evidence"


def test_allowed_simulation_says_that_there_is_no_protection(shown):
    nonce, evidence, _ = shown
    assert verify(evidence, SIMULATION, nonce, NOW).warning == "NO HARDWARE PROTECTION"
    assert NO_HARDWARE_PROTECTION in repr(SimulatedAttester(PROGRAM))


def test_every_flipped_bit_of_simulated_evidence_is_refused(shown):
    nonce, evidence, _ = shown
    verify(evidence, SIMULATION, nonce, NOW)
    for field in ("quote", "collateral", "public", "config"):
        value = getattr(evidence, field)
        for bit in range(0, 8 * len(value), 5):
            assert reason(replace(evidence, **{field: flipped(value, bit)}), nonce)


@pytest.mark.parametrize("change", [lambda q: q[:-1], lambda q: q + b"\0", lambda q: b""])
def test_a_simulated_quote_has_one_length(shown, change):
    nonce, evidence, _ = shown
    changed = replace(evidence, quote=change(evidence.quote))
    assert reason(changed, nonce) == "simulated evidence that does not hold"
    pinned = replace(SIMULATION, quote_bytes=len(evidence.quote))
    verify(evidence, pinned, nonce, NOW)
    assert reason(changed, nonce, pinned) == "a quote of another length"


UNBOUND = "a quote that does not belong to this key, table and nonce"


def test_evidence_for_another_nonce_is_refused(shown):
    _, evidence, _ = shown
    assert reason(evidence, fresh_nonce()) == UNBOUND


def test_evidence_with_another_public_key_is_refused(shown):
    """A host that puts its own key in the place of the enclave's could read everything."""
    nonce, evidence, _ = shown
    assert reason(replace(evidence, public=PrivateKey.fresh().public), nonce) == UNBOUND


def test_evidence_of_another_table_is_refused(shown):
    nonce, evidence, params = shown
    assert reason(replace(evidence, config=bytes(32)), nonce) == UNBOUND
    for other in (
        params_of(table(38), 8),
        replace(params, root=bytes(32)),
        replace(params, model=bytes(32)),
        replace(params, max_keys=7),
        replace(params, round=bytes(16)),
    ):
        with pytest.raises(AttestationError, match="another table"):
            ask(evidence, nonce, SIMULATION, other, np.array([1]), now=NOW)


@pytest.mark.parametrize(
    ("attester", "wrong"),
    [
        ({"is_debug": True}, "an enclave in debug mode"),
        ({"tcb_status": "OutOfDate"}, "a platform that is not up to date"),
        ({"tcb_status": "Revoked"}, "a platform that is not up to date"),
    ],
)
def test_an_enclave_that_is_not_good_enough_is_told_nothing(attester, wrong):
    inside, params = inside_with(table(), **attester)
    with pytest.raises(AttestationError) as refused:
        question(inside, params, [1, 2])
    assert refused.value.wrong == wrong
    assert inside.rows_read == 0


def test_another_program_is_refused(shown):
    nonce, evidence, _ = shown
    other = Policy(frozenset({Measurement("simulated", (b"x" * 32,))}), allow_simulation=True)
    assert reason(evidence, nonce, other) == "an unknown measurement"
    assert reason(evidence, nonce, simulation_policy()) == "an unknown measurement"


@pytest.mark.parametrize("late", [-1, DAY + 1])
def test_simulated_evidence_has_its_time(shown, late):
    nonce, evidence, _ = shown
    verify(evidence, SIMULATION, nonce, NOW + DAY)
    assert "collateral" in reason(evidence, nonce, now=NOW + late)


@pytest.mark.parametrize("keys", [[-1], [37], [1, 99], list(range(9)), [[1]], [0.5]])
def test_keys_that_cannot_be_asked_for_are_refused_at_the_client(shown, keys):
    nonce, evidence, params = shown
    with pytest.raises(KeySpaceError) as refused:
        ask(evidence, nonce, SIMULATION, params, np.array(keys), now=NOW)
    assert "99" not in str(refused.value)
