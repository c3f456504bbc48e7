"""The client: verifies first, then asks for all keys in one sealed request.

Hidden from the host and from everybody on the way: the keys, how many there are, and the records;
if HPKE holds, if the hardware isolates the program that the policy lists, and if that program is
good. Not hidden: who asks, when, and the public maximum of keys. Under simulated evidence nothing
is hidden from the host, who can look into the process. Protocol, policy and verifier are real;
isolation is neither provided nor tested here; Python in an enclave is not constant-time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.hpke import Context
from keyhole.crypto.once import Once, distinct_keys
from keyhole.crypto.prg import Prg
from keyhole.delivery.enclave.evidence import NONCE_BYTES, Claims, EnclaveParams, Evidence
from keyhole.delivery.enclave.sealed import open_reply, seal_request
from keyhole.delivery.enclave.verifier import Policy, verify
from keyhole.delivery.exchange import Retrieved
from keyhole.errors import AttestationError


def fresh_nonce(prg: Prg | None = None) -> bytes:
    """Draws the nonce of one client and one request; `prg` is given by tests only."""
    return (prg or Prg.fresh()).bytes(NONCE_BYTES)


class EnclaveQuery:
    """One request of a client, for one use. From `ask`.

    Printing it shows nothing about the keys.
    """

    def __init__(
        self,
        claims: Claims,
        params: EnclaveParams,
        nonce: bytes,
        sealed: tuple[bytes, Context],
        places: NDArray[np.int64],
    ) -> None:
        self._claims, self._params, self._nonce = claims, params, nonce
        self._message = Once(sealed[0], "request")
        self._context = Once(sealed[1], "reply")
        self._places = places

    def __repr__(self) -> str:
        return f"EnclaveQuery({self._claims.kind}, ...)"

    @property
    def claims(self) -> Claims:
        """What was verified; anyone who shows or records it must show `claims.warning`."""
        return self._claims

    def messages(self) -> tuple[bytes, ...]:
        """Returns the sealed request.

        Raises:
            ReplayError: it has been taken before. To ask again, fetch evidence anew.
        """
        return (self._message.take(),)

    def decode(self, replies: Sequence[bytes]) -> Retrieved:
        """Returns the records in the order of the keys and with their repeats.

        Raises:
            MalformedError, StaleError: not a reply to this request.
            IntegrityError: not the enclave's, or changed on its way.
            ReplayError: a reply has been opened before.
        """
        (reply,) = replies
        records = open_reply(self._context.peek(), self._params, self._nonce, reply)
        self._context.take()
        return Retrieved.whole(records[self._places])


@dataclass(frozen=True)
class EnclaveClient:
    """Verifies the enclave for every query, with a nonce of its own.

    Args:
        challenge: fetches evidence for a nonce.
        policy: what the evidence must show.
        params: of the table.
        clock: unix seconds.
    """

    challenge: Callable[[bytes], Evidence]
    policy: Policy
    params: EnclaveParams
    clock: Callable[[], float]

    def query(self, keys: KeyArray, prg: Prg | None = None) -> EnclaveQuery:
        """Makes a query for keys; see `ask`."""
        nonce = fresh_nonce(prg)
        evidence, now = self.challenge(nonce), int(self.clock())
        return ask(evidence, nonce, self.policy, self.params, keys, now=now, prg=prg)


def ask(
    evidence: Evidence,
    nonce: bytes,
    policy: Policy,
    params: EnclaveParams,
    keys: KeyArray,
    *,
    now: int,
    prg: Prg | None = None,
) -> EnclaveQuery:
    """Makes the one request of a client, after the evidence is verified.

    Args:
        evidence: for this nonce, as it came from the host.
        nonce: that this client drew with `fresh_nonce`, for this request alone.
        policy: what the evidence must show.
        params: of the table, as they came from the host: the evidence must vouch for them.
        keys: (n,) with at most `params.max_keys` different ones; order and repeats stay here.
        now: seconds since 1970.
        prg: where secrets come from; a fresh one if None. Given by tests only.

    Raises:
        AttestationError: the evidence is not enough, or vouches for another table. No key has been
            used for anything, and nothing must be sent.
        KeySpaceError: keys are outside the table, or too many.
        InputError: the extra `enclave` is missing.
    """
    claims = verify(evidence, policy, nonce, now)
    if evidence.config != params.digest:
        raise AttestationError(
            "an enclave that holds another table",
            got="a digest of other params",
            allowed="the digest of these params",
            fix="fetch params and evidence anew, in one round",
        )
    found, places = distinct_keys(keys, params.num_keys, params.max_keys)
    return EnclaveQuery(
        claims, params, nonce, seal_request(evidence.public, params, nonce, found, prg), places
    )
