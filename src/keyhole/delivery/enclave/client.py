"""The client: verifies first, then asks for all keys in one sealed request.

Hidden from the host and from everybody on the way: the keys, how many there are, and the records;
if HPKE holds, if the hardware isolates the program that the policy lists, and if that program is
good. Not hidden: who asks, when, and the public maximum of keys. Under simulated evidence nothing
is hidden from the host, who can look into the process. Protocol, policy and verifier are real;
isolation is neither provided nor tested here; Python in an enclave is not constant-time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.hpke import Context
from keyhole.crypto.once import Once, distinct_keys
from keyhole.crypto.prg import Prg
from keyhole.delivery.enclave.evidence import NONCE_BYTES, Claims, EnclaveTerms, Evidence
from keyhole.delivery.enclave.sealed import open_reply, seal_request
from keyhole.delivery.enclave.verifier import Policy, verify
from keyhole.errors import AttestationError


def fresh_nonce(prg: Prg | None = None) -> bytes:
    """Draws the nonce of one client and one request; `prg` is given by tests only."""
    return (prg or Prg.fresh()).bytes(NONCE_BYTES)


class EnclaveQuestion:
    """One request of a client, for one use. From `ask`.

    Printing it shows nothing about the keys.
    """

    def __init__(
        self,
        claims: Claims,
        terms: EnclaveTerms,
        nonce: bytes,
        sealed: tuple[bytes, Context],
        places: NDArray[np.int64],
    ) -> None:
        self._claims, self._terms, self._nonce = claims, terms, nonce
        self._message = Once(sealed[0], "request")
        self._context = Once(sealed[1], "reply")
        self._places = places

    def __repr__(self) -> str:
        return f"EnclaveQuestion({self._claims.kind}, ...)"

    @property
    def claims(self) -> Claims:
        """What was verified; whoever shows or records it must show `claims.warning`."""
        return self._claims

    def message(self) -> bytes:
        """The sealed request.

        Raises:
            ReplayError: it has been taken before. To ask again, fetch evidence anew.
        """
        return self._message.take()

    def open(self, reply: bytes) -> NDArray[np.uint8]:
        """Returns the records, (n, record_bytes), in the order of the keys and with their repeats.

        Raises:
            MalformedError, StaleError: not a reply to this request.
            IntegrityError: not the enclave's, or changed on its way.
            ReplayError: a reply has been opened before.
        """
        records = open_reply(self._context.peek(), self._terms, self._nonce, reply)
        self._context.take()
        return records[self._places]


def ask(
    evidence: Evidence,
    nonce: bytes,
    policy: Policy,
    terms: EnclaveTerms,
    keys: KeyArray,
    *,
    now: int,
    prg: Prg | None = None,
) -> EnclaveQuestion:
    """Makes the one request of a client, after the evidence is verified.

    Args:
        evidence: for this nonce, as it came from the host.
        nonce: that this client drew with `fresh_nonce`, for this request alone.
        policy: what the evidence must show.
        terms: of the table, as they came from the host: the evidence must vouch for them.
        keys: (n,) with at most `terms.max_keys` different ones; order and repeats stay here.
        now: seconds since 1970.
        prg: where secrets come from; a fresh one if None. Given by tests only.

    Raises:
        AttestationError: the evidence is not enough, or vouches for another table. No key has been
            used for anything, and nothing must be sent.
        KeySpaceError: keys are outside the table, or too many.
        InputError: the extra `enclave` is missing.
    """
    claims = verify(evidence, policy, nonce, now)
    if evidence.config != terms.digest:
        raise AttestationError(
            "an enclave that holds another table",
            got="a digest of other terms",
            allowed="the digest of these terms",
            fix="fetch terms and evidence anew, in one round",
        )
    found, places = distinct_keys(keys, terms.num_keys, terms.max_keys)
    return EnclaveQuestion(
        claims, terms, nonce, seal_request(evidence.public, terms, nonce, found, prg), places
    )
