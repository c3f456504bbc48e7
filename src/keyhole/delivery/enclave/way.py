"""An enclave as a delivery: the program is a process of its own, and clients verify it first.

Without hardware the evidence is simulated, and the host can look into the process: nothing is
hidden from it. That must be allowed, and every record says so.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping

import numpy as np

from keyhole.arrays import ClientId, KeyArray
from keyhole.delivery.base import KEYS_AND_WHOSE, Learned
from keyhole.delivery.enclave.client import ask, fresh_nonce
from keyhole.delivery.enclave.evidence import EnclaveTerms
from keyhole.delivery.enclave.host import EnclaveProcess
from keyhole.delivery.enclave.verifier import Policy, simulation_policy
from keyhole.delivery.exchange import PrivateTable, Tally
from keyhole.delivery.pir.database import name_of_round
from keyhole.delivery.pir.messages import Retrieved
from keyhole.errors import AttestationError, ServiceError

_LOG = logging.getLogger("keyhole.delivery")  # a warning shows on stderr unless told otherwise
_HOST = "host of a simulated enclave, NO HARDWARE PROTECTION"


class Enclave:
    """Retrieval from an enclave program, which is started with the first round and then kept. One
    that has ended or hangs is lost with its round; the next round starts another.

    Args:
        allow_simulation: accepts evidence that no hardware stands behind, which is all there is
            here: an attester of real hardware is none of ours.
        clock: unix seconds, for the age of evidence.

    Raises:
        AttestationError: simulation is not allowed.
    """

    def __init__(
        self, allow_simulation: bool = False, *, clock: Callable[[], float] = time.time
    ) -> None:
        if not allow_simulation:
            raise AttestationError(
                "the enclave would be simulated",
                got="no hardware that protects it",
                allowed="simulation only where it is asked for",
                fix="pass allow_simulation=True or --allow-simulation where nothing needs "
                "protection from the host",
            )
        _LOG.warning("the enclave is simulated: NO HARDWARE PROTECTION")
        self._clock = clock
        self._process: EnclaveProcess | None = None
        self._policy: Policy | None = None

    def __repr__(self) -> str:
        return "Enclave(allow_simulation=True)"

    @property
    def seen_by(self) -> Mapping[str, Learned]:
        """A simulated enclave hides nothing from its host."""
        return {_HOST: KEYS_AND_WHOSE}

    def close(self) -> None:
        """Ends the program; a later round starts a new one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def retrieve(
        self, table: PrivateTable, wanted: Mapping[ClientId, KeyArray], tally: Tally
    ) -> Mapping[ClientId, Retrieved]:
        """Each client verifies the enclave for itself and sends one sealed request."""
        process = self._started()
        try:
            terms = process.load(name_of_round(table.round_id), table.records, table.max_keys)
            return {
                client: self._ask(process, terms, client, keys, tally)
                for client, keys in wanted.items()
            }
        except ServiceError:
            self.close()
            raise

    def _ask(
        self,
        process: EnclaveProcess,
        terms: EnclaveTerms,
        client: ClientId,
        keys: KeyArray,
        tally: Tally,
    ) -> Retrieved:
        nonce = fresh_nonce()
        evidence = process.evidence(nonce)
        if self._policy is None:
            self._policy = simulation_policy()
        question = ask(evidence, nonce, self._policy, terms, keys, now=int(self._clock()))
        message = question.message()
        reply = process.answer(message)
        tally.add(client, len(evidence.encode()) + len(reply), len(nonce) + len(message))
        records = question.open(reply)
        return Retrieved(records, np.ones(len(records), bool))

    def _started(self) -> EnclaveProcess:
        if self._process is None:
            self._process = EnclaveProcess("simulated")
            weakref.finalize(self, self._process.close)
        return self._process
