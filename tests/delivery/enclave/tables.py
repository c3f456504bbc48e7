"""What the tests of the enclave share: a table whose rows can be recognised, and genuine quotes."""

import json
from dataclasses import replace
from datetime import datetime

import numpy as np

from keyhole.delivery.base import PrivateTable, name_of_round
from keyhole.delivery.enclave.client import ask, fresh_nonce
from keyhole.delivery.enclave.messages import EnclaveParams, Evidence
from keyhole.delivery.enclave.program import Inside
from keyhole.delivery.enclave.verifier import Measurement, Policy, SimulatedAttester
from tests.helpers import vector_file

ROUND_ID = "round-7"
ROUND, MODEL = name_of_round(ROUND_ID), bytes(range(32))
NOW = 1_750_000_000
PROGRAM = Measurement("simulated", (bytes(32),))
SIMULATION = Policy(frozenset({PROGRAM}), allow_simulation=True)
DAY = 86_400

# From the genuine quotes: MRTD and RTMR 0 to 3; MRENCLAVE and MRSIGNER. They were read from the
# quotes at bytes 184 and 376 to 567, and 112 and 176.
REGISTERS = {
    "tdx": [(184, 48), *((376 + 48 * i, 48) for i in range(4))],
    "sgx": [(112, 32), (176, 32)],
}
WAIVED = {
    "tcb_statuses": frozenset({"ConfigurationAndSWHardeningNeeded"}),
    "advisories": frozenset({"INTEL-SA-00289", "INTEL-SA-00615"}),
}


def table(num_keys=37, record_bytes=29):
    """Rows that say which they are, of a length that no word divides."""
    text = [f"<slice {key:05d} of the table>".encode() for key in range(num_keys)]
    return np.array([list(row.ljust(record_bytes, b".")[:record_bytes]) for row in text], np.uint8)


def private_table(records, max_keys, round_id=ROUND_ID):
    """Records as a table of a round; small ones have no paths."""
    return PrivateTable.of(round_id, MODEL, np.ascontiguousarray(records), max_keys)


def params_of(records, max_keys, round_id=ROUND_ID):
    """The params of such a table."""
    return EnclaveParams.of(private_table(records, max_keys, round_id).public)


def inside_with(records, max_keys=8, **attester):
    """The enclave program's middle with a table, in this process."""
    inside = Inside(SimulatedAttester(PROGRAM, **attester), clock=lambda: NOW)
    params = params_of(records, max_keys)
    inside.load(params)
    inside.add_rows(records.reshape(-1))
    return inside, params


def question(host, params, keys, policy=SIMULATION, now=NOW):
    """A client's question to whoever gives evidence."""
    nonce = fresh_nonce()
    return ask(host.evidence(nonce), nonce, policy, params, np.array(keys, np.int64), now=now)


def genuine(kind):
    """Evidence around a genuine quote; the public key and the config are ours, so not bound."""
    quote = vector_file(f"{kind}_quote.bin").read_bytes()
    collateral = vector_file(f"{kind}_collateral.json").read_bytes()
    return Evidence(kind, quote, collateral, bytes(32), bytes(32))


def issued(evidence):
    """When the TCB information of genuine evidence was issued."""
    info = json.loads(json.loads(evidence.collateral)["tcb_info"])
    return int(datetime.fromisoformat(info["issueDate"]).timestamp())


def genuine_policy(evidence, **changes):
    """A policy with the measurement, and the length, of a genuine quote."""
    registers = tuple(evidence.quote[at : at + size] for at, size in REGISTERS[evidence.kind])
    measurement = Measurement(evidence.kind, registers)
    policy = Policy(frozenset({measurement}), quote_bytes=len(evidence.quote))
    return replace(policy, **changes)


def flipped(data, bit):
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
