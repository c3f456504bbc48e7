"""Delivers slices from an enclave: a client verifies it, then asks for all keys under seal.

Hidden from the host and from everybody on the way: the keys, how many there are, and the rows;
if HPKE holds, if the hardware isolates the program that the policy lists, and if that program is
good. Not hidden: who asks, when, and the public maximum of keys. Under simulated evidence nothing
is hidden from the host, who can look into the process: that must be allowed, and every record says
so. Protocol, policy and verifier are real; isolation is neither provided nor tested here; Python in
an enclave is not constant-time.

The host starts the enclave program, hands it a table, and carries sealed messages to and fro. It
sees the table, who asks and when, and ciphertext. It is not trusted with more, and need not be:
whatever it changes, withholds or repeats is refused by the client or by the program. A table that
it altered gives rows that do not lead to the root of the round; that a client finds some does not
show (`Retrieved`).
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.hpke import Context
from keyhole.crypto.once import Once, distinct_keys
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import (
    KEYS_AND_WHOSE,
    WHO_TAKES_PART,
    Delivered,
    DeliveryAbout,
    Price,
    PrivateTable,
    Retrieved,
    making_seconds,
)
from keyhole.delivery.enclave.messages import (
    NONCE_BYTES,
    PIECE_BYTES,
    Channel,
    EnclaveParams,
    Evidence,
    Kind,
    open_reply,
    reply_bytes,
    request_bytes,
    seal_request,
)
from keyhole.delivery.enclave.verifier import Claims, Policy, simulation_policy, verify
from keyhole.delivery.exchange import (
    ByteTally,
    LocalLinks,
    Retrieval,
    deliver_privately,
    retrieve,
)
from keyhole.delivery.paths import path_bytes, top_bytes
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.errors import AttestationError, InputError, KeyholeError, ProtocolError, ServiceError
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState


def fresh_nonce(prg: Prg | None = None) -> bytes:
    """Draws the nonce of one client and one request; `prg` is given by tests only."""
    return (prg or Prg.fresh()).bytes(NONCE_BYTES)


class EnclaveQuery:
    """One request of a client, for one use, from `ask`; printing it shows nothing of the keys."""

    def __init__(
        self,
        claims: Claims,
        params: EnclaveParams,
        nonce: bytes,
        sealed: tuple[bytes, Context],
        places: NDArray[np.int64],
    ) -> None:
        self.claims = claims
        """What was verified; anyone who shows or records it must show `claims.warning`."""
        self._params, self._nonce = params, nonce
        self._message = Once(sealed[0], "request")
        self._context = Once(sealed[1], "reply")
        self._places = places

    def __repr__(self) -> str:
        return f"EnclaveQuery({self.claims.kind}, ...)"

    def messages(self) -> tuple[bytes, ...]:
        """Returns the sealed request."""
        return (self._message.take(),)

    def decode(self, replies: Sequence[bytes]) -> Retrieved:
        """Returns the rows in the order of the keys and with their repeats. A reply that does not
        open was changed on its way, whatever is in it: the host knows that before anybody."""
        (reply,) = replies
        rows = open_reply(self._context.peek(), self._params, self._nonce, reply)
        self._context.take()
        found, is_found = rows[self._places], self._places >= 0
        found[~is_found] = 0
        return Retrieved(found, is_found)


@dataclass(frozen=True)
class EnclaveClient:
    """Verifies the enclave for every query, with a nonce of its own; `clock` is in unix seconds."""

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
        nonce: that this client drew with `fresh_nonce`, for this request alone.
        params: of the table, as they came from the host: the evidence must vouch for them.
        now: seconds since 1970.

    Raises:
        AttestationError: the evidence is not enough, or vouches for another table. No key has been
            used for anything, and nothing must be sent.
    """
    claims = verify(evidence, policy, nonce, now)
    if evidence.config != params.digest:
        raise AttestationError(
            "an enclave that holds another table: got a digest of other params; expected the "
            "digest of these params; fetch params and evidence again, in one round"
        )
    found, which = distinct_keys(keys, params.num_keys, params.max_keys)
    asked, places = params.assign(found)
    sealed = seal_request(evidence.public, params, nonce, asked, prg)
    return EnclaveQuery(claims, params, nonce, sealed, places[which])


_MODULE = "keyhole.delivery.enclave.program"
_STOP_WITHIN = 10.0  # seconds that an idle program has to end by itself


class EnclaveProcess:
    """The enclave program as a process, for as long as the context lasts.

    Threads may share it: commands are carried one after the other.

    Args:
        attester: what makes the evidence: "simulated" is all there is without hardware.
        start_within: seconds until the program must have started.
        answer_within: seconds that a command may take. A program that takes longer is ended.
        watch: is shown every byte that passes between host and program, for audits.
    """

    def __init__(
        self,
        attester: Literal["simulated"],
        *,
        start_within: float = 60.0,
        answer_within: float = 60.0,
        watch: Callable[[bytes], None] | None = None,
    ) -> None:
        if attester != "simulated":
            raise InputError(
                f"an unknown attester: got {attester!r}; expected 'simulated'; name the attester; "
                "hardware needs one of its own"
            )
        self._lock = threading.RLock()
        self._answer_within = answer_within
        near, far = socket.socketpair()
        with far:
            self._channel = Channel(near, watch)
            # A session of its own: Ctrl-C is for the host, which then ends the program.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, "--attester", attester],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._command(Kind.READY, None, start_within)

    def __enter__(self) -> EnclaveProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def load(self, table: PrivateTable) -> EnclaveParams:
        """Hands the program the rows of a table in place of any other, whose evidence is worthless
        then; returns the params that clients need."""
        params, rows = EnclaveParams.of(table.public), table.rows()
        rows_at_once = max(1, PIECE_BYTES // params.row_bytes)
        with self._lock:
            self._command(Kind.LOAD, params.encode())
            for start in range(0, params.num_keys, rows_at_once):
                piece = rows[start : start + rows_at_once]
                self._command(Kind.ROWS, piece.data.cast("B"))
        return params

    def evidence(self, nonce: bytes) -> Evidence:
        """Fetches evidence for the client that drew a nonce."""
        return Evidence.decode(self._command(Kind.EVIDENCE, nonce))

    def answer(self, sealed: bytes) -> bytes:
        """Carries a sealed request to the program and its sealed reply back."""
        return bytes(self._command(Kind.ANSWER, sealed))

    def rows_read(self) -> int:
        """Returns how many rows the program has read since its start, over all keys and padding."""
        return int.from_bytes(self._command(Kind.ROWS_READ, b""), "little")

    def close(self) -> None:
        """Ends the program: it is asked, then made to. Nothing is left of it."""
        with self._lock:
            if self._process.returncode is None:
                try:
                    self._channel.send(Kind.STOP, within=_STOP_WITHIN)
                    self._process.wait(_STOP_WITHIN)
                except (OSError, subprocess.TimeoutExpired):
                    pass  # it is ended below
            self._end()

    def _command(
        self, wanted: Kind, body: bytes | memoryview | None, within: float | None = None
    ) -> bytearray:
        """Sends a command, if there is one to send, and returns the body of the answer."""
        within = self._answer_within if within is None else within
        with self._lock:
            if self._process.returncode is not None:
                raise self._gone()
            try:
                if body is not None:
                    self._channel.send(wanted, body, within)
                kind, answer = self._channel.receive(within)
            except (OSError, EOFError, KeyholeError) as error:
                raise self._lost(error, within) from error
            except BaseException:
                self._end()  # interrupted amid a frame: the next answer would be to this command
                raise
            if kind == Kind.REFUSED:
                raise ProtocolError(
                    "the enclave refuses a message: got a refusal, which does not tell why; "
                    "expected a fresh message under the params of its table; fetch params and "
                    "evidence again, and ask once with each nonce"
                )
            if kind != wanted:
                raise self._lost(None, within)
            return answer

    def _lost(self, error: Exception | None, within: float) -> ServiceError:
        """The error of a program that hangs or has ended; nothing is left of it."""
        self._end()
        if not isinstance(error, TimeoutError):
            return self._gone()
        return ServiceError(
            f"the enclave program hangs: got no answer within {within} s; expected an answer; "
            "start it again, or give it more time with answer_within"
        )

    def _end(self) -> None:
        self._channel.close()
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()

    def _gone(self) -> ServiceError:
        return ServiceError(
            f"the enclave program has ended: got exit code {self._process.returncode}; expected a "
            "program that runs; start a new EnclaveProcess and load the table"
        )


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
        keys_per_client: key space -> max keys that a client may ask for; public.
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

    def __repr__(self) -> str:
        return f"Enclave(allow_simulation={self._allow_simulation})"

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> Enclave:
        """Implements `Delivery.for_run`."""
        if not allow_simulation:
            raise _simulated()
        _LOG.warning("the enclave is simulated: NO HARDWARE PROTECTION")
        return Enclave(keys_per_client, self.coding, allow_simulation=True, clock=self._clock)

    @cached_property
    def _policy(self) -> Policy:
        return simulation_policy()

    def close(self) -> None:
        """Ends the program; a later round starts a new one."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices evidence of real hardware, the top, and passes over the table: one for each
        bucket of a key, which are three, or one for each key where those are few."""
        row_bytes = load.slice_bytes + path_bytes(load.num_keys)
        numbers = load.num_keys, row_bytes, load.keys_per_client
        params = EnclaveParams(bytes(16), bytes(32), bytes(32), *numbers)
        quote, collateral = bytes(_QUOTE_BYTES), bytes(_COLLATERAL_BYTES)
        evidence = Evidence("tdx", quote, collateral, bytes(32), bytes(32))
        table, beside = load.num_keys * row_bytes, top_bytes(load.num_keys) + load.broadcast_bytes
        scanning, held = params.shape.stash * table / speeds.enclave_scan, table
        if params.placement is not None:
            scanning = (params.placement.num_hashes + params.shape.stash) * table / speeds.gather
            held += params.placement.members_bytes
        asked = params.num_places * row_bytes
        return Price(
            _ABOUT,
            len(evidence.encode()) + reply_bytes(params) + beside,
            NONCE_BYTES + request_bytes(params),
            {_HOST: load.cohort * scanning},
            speeds.quote_seconds + speeds.seal_seconds + asked / speeds.aes,
            held,
            load.num_keys,
            {_HOST: making_seconds(load, speeds)},
            requests=3,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Implements `Delivery.deliver`; raises AttestationError where the evidence is not enough,
        or simulation is not allowed."""
        if not self._allow_simulation:
            raise _simulated()
        return deliver_privately(
            self._retrieve, state, keys, self.keys_per_client, self.coding, self.about.leaks
        )

    def _retrieve(
        self, table: PrivateTable, wanted: Mapping[int, KeyArray], tally: ByteTally
    ) -> Mapping[int, Retrieved]:
        """Each client verifies the enclave for itself and sends one sealed request."""
        if self._process is None:
            self._process = EnclaveProcess("simulated")
            weakref.finalize(self, self._process.close)
        process, policy = self._process, self._policy

        def answer(sent: Sequence[tuple[bytes, ...]]) -> list[list[bytes]]:
            return [[process.answer(message) for message in each] for each in sent]

        try:
            params = process.load(table)
            found = {}
            # One after the other: evidence is as fresh as can be.
            for client, keys in wanted.items():

                def challenge(nonce: bytes, client: int = client) -> Evidence:
                    evidence = process.evidence(nonce)
                    tally.add(client, len(evidence.encode()), len(nonce))
                    return evidence

                asking = EnclaveClient(challenge, policy, params, self._clock)
                links = LocalLinks(answer, [client], tally)
                (found[client],) = retrieve([Retrieval(asking, keys)], links)
            return found
        except ServiceError:
            self.close()
            raise


def _simulated() -> AttestationError:
    return AttestationError(
        "the enclave would be simulated: got no hardware that protects it; expected simulation "
        "only where it is asked for; pass allow_simulation=True or --allow-simulation where "
        "nothing needs protection from the host"
    )
