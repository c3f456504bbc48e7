"""Adds masked vectors up: a state machine, bytes in and bytes out (Bonawitz et al., CCS 2017).

The server relays keys and sealed shares, adds up masked vectors as they arrive, asks the survivors
for the shares that remove the masks that did not cancel, and learns the sum. `client.py` says what
is hidden from it: the clients do not rely on this code, but on what they refuse.

The first list that is made of a step closes it: what comes later is refused and not kept. If too
few clients are left at any step, everything is dropped and nothing is released. `run_secagg` runs a
whole sum in process: its clients and its server, message by message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from keyhole.aggregation.masked.client import SecAggClient, check_vector
from keyhole.aggregation.masked.messages import (
    FRAMING,
    REFUSAL,
    SEALED_BYTES,
    Identity,
    PublicKeys,
    UnmaskRequest,
    bad_keys,
    check_keys,
    commitment_of,
    keys_text,
    open_slots,
    other_list,
    out_of_turn,
    seal_asked,
    seal_slots,
    survivors_text,
    too_few,
    unseal,
)
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.once import SumsJoined
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.crypto.ring import RingArray, add_masks, pair_seed
from keyhole.crypto.shamir import Combiner
from keyhole.crypto.signatures import is_signed
from keyhole.errors import InputError, MalformedError, MismatchError, ReplayError, StaleError


class Unmasking:
    """Rebuilds secrets from what their holders have sent, and finds the masks that are left.

    On the complete graph the same holders serve all secrets, so their weights are computed once.

    Args:
        shares: by holder, its share of whose secret: of those who survived the seed, of the others
            the key.
    """

    def __init__(
        self,
        settings: SecAggParams,
        keys: Mapping[int, PublicKeys],
        survivors: frozenset[int],
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> None:
        self._settings, self._keys, self._survivors = settings, keys, survivors
        self._shares = shares
        self._combiners: dict[tuple[int, ...], Combiner] = {}

    def masks(self) -> Iterator[tuple[bytes, int]]:
        """Yields seeds and signs of the masks that turn the sum of masked vectors into the sum."""
        for place in sorted({place for shares in self._shares.values() for place in shares}):
            if place in self._survivors:
                yield self._own_seed(place), -1
            else:
                yield from self._pair_masks(place)

    def _own_seed(self, place: int) -> bytes:
        """The seed of a survivor's own mask."""
        seed = self._secret(place, SEED_BYTES)
        if commitment_of(self._settings, place, seed) != self._keys[place].commitment:
            raise other_secret(place)
        return seed

    def _pair_masks(self, place: int) -> Iterator[tuple[bytes, int]]:
        """What the neighbours of a lost client have left over: the opposite of what they added."""
        secret = PrivateKey(self._secret(place, 32))
        if secret.public != self._keys[place].mask:
            raise other_secret(place)
        for other in self._settings.group(place):
            if other in self._survivors:
                low, high = sorted((place, other))
                seed = pair_seed(secret, self._keys[other].mask, self._settings.round, low, high)
                yield seed, (-1 if other < place else 1)

    def _secret(self, place: int, length: int) -> bytes:
        """The secret of a client of which the holders have sent shares."""
        needed = self._settings.shares_needed
        holders = [member for member in self._settings.group(place) if member in self._shares]
        if len(holders) < needed:
            raise too_few(len(holders), needed)
        xs = tuple(holder + 1 for holder in holders[:needed])
        if xs not in self._combiners:
            self._combiners[xs] = Combiner(xs)
        try:
            shares = {x: self._shares[x - 1][place] for x in xs}
            return self._combiners[xs].combine(shares, length)
        except MalformedError as error:
            raise other_secret(place) from error


def other_secret(place: int) -> MismatchError:
    """Returns the error of a rebuilt secret that is not the advertised one."""
    return MismatchError(
        f"the shares of client {place} do not give the secret that it advertised: got a false "
        "share, or a false secret; expected shares of the secret behind its keys; start a new "
        "round without this client; nothing of this one is released"
    )


def not_invited(place: int) -> StaleError:
    """Returns the error of a client that was not there at the step before."""
    return StaleError(
        f"a client that is no longer part of this sum: got place {place}; expected clients that "
        "have taken every step so far; take part in a new round"
    )


Step: TypeAlias = Literal["keys", "shares", "inputs", "confirmations", "unmasking", "over"]
_STEPS: tuple[Step, ...] = get_args(Step)


class SecAggServer:
    """The server of one secure sum.

    Every message comes with the place of the client that the transport says it is from. A message
    that is refused changes nothing; the answer to it is `REFUSAL`.

    Args:
        public_keys: of Ed25519, one a place, if the settings ask for signatures: a client whose
            signature is false is refused, since others would leave because of it.
        rounds: what this server has added up, so that no name of a round is used twice.
    """

    def __init__(
        self,
        settings: SecAggParams,
        public_keys: tuple[bytes, ...] | None = None,
        rounds: SumsJoined | None = None,
    ) -> None:
        if settings.signed and len(public_keys or ()) != settings.cohort:
            raise InputError(
                f"a signed sum needs the public keys of its clients: got {len(public_keys or ())}; "
                f"expected {settings.cohort}; pass the public_keys of all places"
            )
        if rounds is not None:
            rounds.claim(settings.round)
        self.settings = settings
        self._public_keys = public_keys or ()
        self._probe = PrivateKey.fresh()
        self._step: Step = "keys"
        self._keys: dict[int, PublicKeys] = {}
        self._seen: set[bytes] = set()
        self._heard: set[tuple[Step, int]] = set()  # also of what has been dropped
        self._shares: dict[int, dict[int, bytes]] = {}
        self._shared: frozenset[int] = frozenset()
        self._survivors: set[int] = set()
        self._confirmations: dict[int, bytes] = {}
        self._unmasking: dict[int, dict[int, bytes]] = {}
        self._total: RingArray | None = None

    def __repr__(self) -> str:
        return f"SecAggServer(step={self._step}, {len(self._survivors)} inputs)"

    @property
    def survivors(self) -> frozenset[int]:
        """Whose vectors are in the sum, so far."""
        return frozenset(self._survivors)

    def receive_keys(self, place: int, data: bytes) -> None:
        """Takes the keys of a client."""
        self._turn("keys", place, range(self.settings.cohort))
        keys = PublicKeys.decode(unseal(data, "keys", self.settings, place))
        text = keys_text(self.settings, place, keys)
        if self.settings.signed and not is_signed(self._public_keys[place], text, keys.signature):
            raise bad_keys(place, "a signature that is not its own")
        try:  # with a point of low order nobody can agree on a secret
            self._probe.agree(keys.cipher)
            self._probe.agree(keys.mask)
        except MalformedError as error:
            raise bad_keys(place, "a point of low order") from error
        check_keys(place, keys, self._seen)
        self._keys[place] = keys
        self._heard.add(("keys", place))

    def key_list(self, place: int) -> bytes:
        """Returns the keys of a client's group, and closes the step."""
        self._close("keys", "shares", self._keys, self._keys, place)
        near = self._near(place, self._keys)
        slots = {member: self._keys[member].encode() for member in near}
        return seal_slots("key list", self.settings, place, slots)

    def receive_shares(self, place: int, data: bytes) -> None:
        """Takes the sealed shares of a client's secrets."""
        self._turn("shares", place, self._keys)
        sealed = open_slots(data, "shares", self.settings, place)
        if sealed.keys() != self._near(place, self._keys) - {place}:
            raise FRAMING.malformed(
                f"shares for {len(sealed)} clients", "for those on the list of keys"
            )
        self._shares[place] = sealed
        self._heard.add(("shares", place))

    def share_list(self, place: int) -> bytes:
        """Returns the shares that others have sealed for a client, and closes the step."""
        self._close("shares", "inputs", self._shares, self._shares, place)
        self._shared = self._shared or frozenset(self._shares)
        # Of the client's own there is none to seal; its bit says that the others have arrived.
        near, empty = self._near(place, self._shared), bytes(SEALED_BYTES)
        slots = {member: self._shares[member].get(place, empty) for member in near}
        return seal_slots("share list", self.settings, place, slots)

    def receive_input(self, place: int, data: bytes) -> None:
        """Adds the masked vector of a client; one that comes too late is refused, and not kept."""
        self._turn("inputs", place, self._shared)
        body = unseal(data, "input", self.settings, place)
        vector: RingArray = np.frombuffer(body, self.settings.dtype)
        if self._total is None:
            self._total = vector.astype(f"u{vector.itemsize}")
        else:
            self._total += vector
        self._survivors.add(place)
        self._heard.add(("inputs", place))

    def survivor_list(self, place: int) -> bytes:
        """Returns what is asked of a survivor, and closes the step."""
        following: Step = "confirmations" if self.settings.signed else "unmasking"
        self._close("inputs", following, self._survivors, self._shared, place)
        self._shares = {}
        near = self._near(place, self._survivors)
        lost = self._members(place, self._shared - self._survivors)
        return seal_asked(self.settings, place, UnmaskRequest(near, lost))

    def receive_confirmation(self, place: int, data: bytes) -> None:
        """Takes a client's signature over the list of survivors."""
        self._turn("confirmations", place, self._survivors)
        signature = bytes(unseal(data, "confirmation", self.settings, place))
        text = survivors_text(self.settings, self.survivors)
        if not is_signed(self._public_keys[place], text, signature):
            raise other_list(place)
        self._confirmations[place] = signature
        self._heard.add(("confirmations", place))

    def confirmation_list(self, place: int) -> bytes:
        """Returns the signatures of all survivors, and closes the step."""
        self._close("confirmations", "unmasking", self._confirmations, self._shared, place)
        self._near(place, self._confirmations)
        return seal_slots("confirmation list", self.settings, place, self._confirmations)

    def receive_unmasking(self, place: int, data: bytes) -> None:
        """Takes the shares with which a survivor helps to remove masks."""
        asked = self._confirmations if self.settings.signed else self._survivors
        self._turn("unmasking", place, asked)
        shares = open_slots(data, "unmasking", self.settings, place)
        if shares.keys() != self._members(place, self._shared):
            raise FRAMING.malformed(f"shares of {len(shares)} clients", "of all that have shared")
        self._unmasking[place] = shares
        self._heard.add(("unmasking", place))

    def sum(self) -> RingArray:
        """Returns the sum over the survivors, (length,) ring elements, once."""
        self._close("unmasking", "over", self._unmasking, self._shared)
        unmasking = Unmasking(self.settings, self._keys, self.survivors, self._unmasking)
        total = self._total
        self._drop()
        assert total is not None, "there were survivors"
        add_masks(total, unmasking.masks())
        return total

    def _turn(self, step: Step, place: int, invited: Collection[int]) -> None:
        """Refuses a message out of its turn, of nobody who is there, or a second one."""
        if not 0 <= place < self.settings.cohort:
            raise FRAMING.malformed(f"place {place}", f"0..{self.settings.cohort - 1}")
        if (step, place) in self._heard:
            raise ReplayError(
                f"a second message of one client in one step: got {step} of place {place} again; "
                "expected one a step; take part in a new round"
            )
        if step != self._step:
            raise StaleError(
                f"a message of a secure sum that comes too early or too late: got one of {step} "
                f"during {self._step}; expected one of {self._step}; wait for the list of the step "
                "before, or take part in a new round"
            )
        if place not in invited:
            raise not_invited(place)

    def _near(self, place: int, members: Collection[int]) -> frozenset[int]:
        """The members of a client's group among some clients, of which it must be one."""
        if place not in members:
            raise not_invited(place)
        return self._members(place, members)

    def _members(self, place: int, some: Collection[int]) -> frozenset[int]:
        """The members of a client's group among some clients."""
        return frozenset(filter(some.__contains__, self.settings.group(place)))

    def _close(
        self,
        step: Step,
        following: Step,
        there: Collection[int],
        needing: Collection[int],
        place: int | None = None,
    ) -> None:
        """Ends a step: those who are there must be enough for everyone who needs their shares.
        A request of a client that is not there does not end it."""
        if self._step == following and following != "over":
            return
        if self._step != step:
            raise out_of_turn(_STEPS, step, self._step)
        if place is not None and place not in there:
            raise not_invited(place)
        minimum, needed = self.settings.min_survivors, self.settings.shares_needed
        if len(there) < minimum:
            self._drop()
            raise too_few(len(there), minimum)
        # On the complete graph that was all: everyone is near.
        places = () if self.settings.is_complete else needing
        near = min((len(self._members(each, there)) for each in places), default=needed)
        if near < needed:
            self._drop()
            raise too_few(near, needed)
        self._step = following

    def _drop(self) -> None:
        """Nothing of the round is kept but who took part."""
        self._total = None
        self._keys, self._shares, self._unmasking = {}, {}, {}
        self._step = "over"


Stage: TypeAlias = Literal["before", "after_keys", "after_shares", "after_input"]
"""When a client is lost: before it does anything, or after it has sent what is named."""

_STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class SecAggResult:
    """What a secure sum gave, (length,) ring elements over the survivors, and what it cost."""

    total: RingArray
    survivors: tuple[int, ...]
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]


def run_secagg(
    settings: SecAggParams,
    vectors: Mapping[int, RingArray],
    lost: Mapping[int, Stage] | None = None,
    late: Collection[int] = (),
    prg: Prg | None = None,
) -> SecAggResult:
    """Runs a secure sum.

    sum_(i in survivors) x_i mod 2^bits

    Args:
        vectors: (length,) ring elements of every place that takes part; others are lost from the
            start.
        late: clients whose vectors arrive after the survivors are settled: they are not added.
        prg: where all secrets come from; by default fresh ones. Tests pass their own.

    >>> import numpy as np
    >>> settings = SecAggParams(bytes(16), cohort=4, length=2)
    >>> vectors = {place: np.array([place, 1], np.uint32) for place in range(4)}
    >>> run_secagg(settings, vectors, {3: "after_shares"}).total
    array([3, 3], dtype=uint32)
    """
    lost = lost or {}
    named = vectors.keys() | lost.keys() | set(late)
    unknown = set(lost.values()) - set(_STAGES)
    if not named <= set(range(settings.cohort)) or unknown:
        raise InputError(
            f"places or stages that a secure sum does not have: got {len(named)} places, "
            f"{len(unknown)} unknown stages; expected places 0..{settings.cohort - 1}; stages "
            f"{', '.join(_STAGES)}; number the clients of the cohort from 0 on"
        )
    for vector in vectors.values():
        check_vector(settings, vector)
    return _Run(settings, vectors, lost, prg or Prg.fresh()).result(frozenset(late))


class _Run:
    """The parties of one sum, and how much they have sent."""

    def __init__(
        self,
        settings: SecAggParams,
        vectors: Mapping[int, RingArray],
        lost: Mapping[int, Stage],
        prg: Prg,
    ) -> None:
        identities = Identity.all_of(settings.cohort, prg) if settings.signed else ()
        self._settings, self._vectors = settings, vectors
        self._server = SecAggServer(settings, identities[0].everyone if identities else None)
        self._clients = {
            place: SecAggClient(
                settings,
                place,
                Prg(prg.bytes(SEED_BYTES)),
                identities[place] if identities else None,
            )
            for place in sorted(vectors)
        }
        self._last = {place: _STAGES.index(stage) for place, stage in lost.items()}
        self._up = dict.fromkeys(vectors, 0)
        self._down = dict.fromkeys(vectors, 0)

    def result(self, late: frozenset[int]) -> SecAggResult:
        """Runs every step in turn."""
        server = self._server
        for place in self._there("before"):
            self._send(place, self._clients[place].advertise(), server.receive_keys)
        for place in self._there("after_keys"):
            shares = self._clients[place].share(self._fetch(place, server.key_list))
            self._send(place, shares, server.receive_shares)
        self._unmask(self._mask(late))
        survivors = tuple(sorted(server.survivors))
        return SecAggResult(server.sum(), survivors, self._up, self._down)

    def _mask(self, late: frozenset[int]) -> dict[int, bytes]:
        """Vectors in time, the lists that settle the survivors and are returned, late vectors."""
        server, held_back = self._server, {}
        for place in self._there("after_shares"):
            shares = self._fetch(place, server.share_list)
            masked = self._clients[place].mask(shares, self._vectors[place])
            if place in late:
                held_back[place] = masked
            else:
                self._send(place, masked, server.receive_input)
        there = [place for place in self._there("after_input") if place in server.survivors]
        asked = {place: self._fetch(place, server.survivor_list) for place in self._some(there)}
        for place, masked in held_back.items():
            try:
                self._send(place, masked, server.receive_input)
            except StaleError:
                self._down[place] += len(REFUSAL)
        return asked

    def _unmask(self, asked: dict[int, bytes]) -> None:
        server = self._server
        if self._settings.signed:
            for place, survivors in asked.items():
                signature = self._clients[place].confirm(survivors)
                self._send(place, signature, server.receive_confirmation)
            asked = {place: self._fetch(place, server.confirmation_list) for place in asked}
        for place, request in asked.items():
            self._send(place, self._clients[place].unmask(request), server.receive_unmasking)

    def _there(self, stage: Stage) -> list[int]:
        """Who has not been lost by then."""
        last = _STAGES.index(stage)
        return self._some([place for place in self._clients if self._last.get(place, 9) > last])

    def _some(self, places: list[int]) -> list[int]:
        """The server would wait for ever if there were nobody."""
        if not places:
            raise too_few(0, self._settings.min_survivors)
        return places

    def _send(self, place: int, data: bytes, receive: Callable[[int, bytes], None]) -> None:
        self._up[place] += len(data)
        receive(place, data)

    def _fetch(self, place: int, listed: Callable[[int], bytes]) -> bytes:
        data = listed(place)
        self._down[place] += len(data)
        return data
