"""Delivers slices from an enclave: a program of its own, which clients verify before they ask.

Hidden: keys, from the host, by hardware. Not hidden: anything, where there is no hardware. Then the
evidence is simulated and the host can look into the process: that must be allowed, and every record
says so.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from keyhole.arrays import KeyArray
from keyhole.delivery.base import (
    KEYS_AND_WHOSE,
    WHO_TAKES_PART,
    Delivered,
    DeliveryAbout,
    Price,
    making_seconds,
)
from keyhole.delivery.enclave import sealed
from keyhole.delivery.enclave.client import EnclaveClient
from keyhole.delivery.enclave.evidence import NONCE_BYTES, EnclaveParams, Evidence
from keyhole.delivery.enclave.host import EnclaveProcess
from keyhole.delivery.enclave.verifier import Policy, simulation_policy
from keyhole.delivery.exchange import (
    ByteTally,
    LocalLinks,
    PrivateRound,
    PrivateTable,
    Retrieval,
    Retrieved,
    deliver_privately,
    name_of_round,
    retrieve,
)
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.errors import AttestationError, ServiceError
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

_LOG = logging.getLogger("keyhole.delivery")  # a warning shows on stderr unless told otherwise

# Of a genuine TDX quote and the certificates that go with it; those of other makes differ little.
_QUOTE_BYTES = 5_006
_COLLATERAL_BYTES = 16_072

_HOST = "enclave host"
_ABOUT = DeliveryAbout(
    name="enclave",
    title="enclave",
    leaks=MappingProxyType({_HOST: WHO_TAKES_PART}),
    rests_on="The enclave's hardware, its maker's signatures and HPKE hold, and nothing leaks by "
    "timing.",
    is_private=True,
    is_served=False,
    basis="hardware",
    route=None,
)
_SIMULATED = replace(
    _ABOUT,
    leaks=MappingProxyType({"host of a simulated enclave, NO HARDWARE PROTECTION": KEYS_AND_WHOSE}),
    rests_on="None holds: the enclave is simulated, and its host can look into it.",
)


class Enclave:
    """Retrieves from an enclave program, which is started with the first round and then kept. One
    that has ended or hangs is lost with its round; the next round starts another.

    Args:
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
        allow_simulation: accepts evidence that no hardware stands behind, which is all there is
            here: an attester of real hardware is none of ours.
        clock: unix seconds, for the age of evidence.
    """

    def __init__(
        self,
        keys_per_client: Mapping[str, int] | None = None,
        coding: Coding = PLAIN,
        *,
        allow_simulation: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys_per_client, self.coding = keys_per_client or {}, coding
        self.about = _SIMULATED if allow_simulation else _ABOUT
        self._allow_simulation, self._clock = allow_simulation, clock
        self._process: EnclaveProcess | None = None
        self._policy: Policy | None = None

    def __repr__(self) -> str:
        return f"Enclave(allow_simulation={self._allow_simulation})"

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> Enclave:
        """Returns the delivery with the public numbers of a run.

        Raises:
            AttestationError: simulation is not allowed.
        """
        if not allow_simulation:
            raise _simulated()
        _LOG.warning("the enclave is simulated: NO HARDWARE PROTECTION")
        return Enclave(keys_per_client, self.coding, allow_simulation=True, clock=self._clock)

    def close(self) -> None:
        """Ends the program; a later round starts a new one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices evidence of real hardware, and one pass over the table for each key."""
        params = EnclaveParams(
            bytes(16), load.num_keys, load.slice_bytes, load.keys_per_client, bytes(32)
        )
        quote, collateral = bytes(_QUOTE_BYTES), bytes(_COLLATERAL_BYTES)
        evidence = Evidence("tdx", quote, collateral, bytes(32), bytes(32))
        scanned = load.cohort * load.keys_per_client * load.table_bytes
        return Price(
            _ABOUT,
            len(evidence.encode()) + sealed.reply_bytes(params) + load.broadcast_bytes,
            NONCE_BYTES + sealed.request_bytes(params),
            {_HOST: scanned / speeds.enclave_scan},
            speeds.quote_seconds + speeds.seal_seconds + load.asked_bytes / speeds.aes,
            load.table_bytes,
            load.num_keys,
            {_HOST: making_seconds(load, speeds)},
            requests=2,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round.

        Raises:
            AttestationError: simulation is not allowed, or the evidence is not enough.
        """
        if not self._allow_simulation:
            raise _simulated()
        how = PrivateRound(self.keys_per_client, self.coding, self.about.leaks)
        return deliver_privately(self._retrieve, how, state, keys)

    def _retrieve(
        self, table: PrivateTable, wanted: Mapping[int, KeyArray], tally: ByteTally
    ) -> Mapping[int, Retrieved]:
        """Each client verifies the enclave for itself and sends one sealed request."""
        process = self._started()
        if self._policy is None:
            self._policy = simulation_policy()
        try:
            params = process.load(name_of_round(table.round_id), table.records, table.max_keys)
            found = {}
            # One after the other: evidence is as fresh as can be.
            for client, keys in wanted.items():

                def challenge(nonce: bytes, client: int = client) -> Evidence:
                    evidence = process.evidence(nonce)
                    tally.add(client, len(evidence.encode()), len(nonce))
                    return evidence

                asking = EnclaveClient(challenge, self._policy, params, self._clock)
                links = LocalLinks(_answer_by(process), [client], tally)
                (found[client],) = retrieve([Retrieval(asking, keys)], links)
            return found
        except ServiceError:
            self.close()
            raise

    def _started(self) -> EnclaveProcess:
        if self._process is None:
            self._process = EnclaveProcess("simulated")
            weakref.finalize(self, self._process.close)
        return self._process


def _answer_by(
    process: EnclaveProcess,
) -> Callable[[Sequence[tuple[bytes, ...]]], list[list[bytes]]]:
    return lambda sent: [[process.answer(message) for message in each] for each in sent]


def _simulated() -> AttestationError:
    return AttestationError(
        "the enclave would be simulated",
        got="no hardware that protects it",
        allowed="simulation only where it is asked for",
        fix="pass allow_simulation=True or --allow-simulation where nothing needs protection from "
        "the host",
    )
