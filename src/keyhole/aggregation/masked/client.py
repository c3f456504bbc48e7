"""Masks a client's vector: a state machine, bytes in and bytes out (Bonawitz et al., CCS 2017).

A client masks its vector twice, with seeds that it agrees on with every neighbour and that cancel
in the sum, and with a seed of its own. Neighbours hold shares of its secrets: of the one kind if it
stays, so that its own mask can be removed, and of the other if it leaves, so that what its
neighbours have left over can be. Nobody gives out both kinds of one client: that would open its
vector.

Hidden from an honest-but-curious server and up to t - 1 clients that collude with it: everything
but the sum over the survivors, of whom there are t or more. A vector that arrives when the
survivors are settled stays hidden. It rests on X25519, HKDF-SHA256, SHA-256 (of the commitment to a
seed) and AES-128. On a sparse graph it holds as far as no client has t colluding neighbours and the
others stay connected (see `params.py`); a client then counts the survivors of its group, and only
the server counts all of them.

Not covered without `signed`: a server that cheats. It can invent all other clients and open the
vector of the one that is left. It can show different lists of survivors to different clients and
open a sum of fewer than t, of one if t is N / 2 or less. Nothing here notices. With `signed`, if
clients know each other's public keys from elsewhere, fewer than 2 t - N of them collude with the
server and no honest one takes part in a round twice, invented clients and lists that differ are
noticed before a share is given out.

Not covered at all: clients that send wrong vectors, what the sum itself shows, the number of
clients, and who was lost when. Secrets are dropped as soon as they are of no more use; Python does
not promise that the memory is overwritten, nor that work takes constant time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyhole.aggregation.masked.messages import (
    Identity,
    PublicKeys,
    UnmaskRequest,
    bad_keys,
    check_keys,
    commitment_of,
    keys_text,
    open_asked,
    open_slots,
    other_list,
    out_of_turn,
    seal,
    seal_slots,
    survivors_text,
    too_few,
)
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.once import SumsJoined
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.crypto.ring import RingArray, add_masks, pair_seed
from keyhole.crypto.shamir import SHARE_BYTES, split
from keyhole.crypto.signatures import is_signed
from keyhole.errors import InputError, MalformedError, ShapeError, ViolationError


@dataclass(frozen=True, repr=False)
class Secrets:
    """The secrets of one client in one sum.

    Args:
        cipher: key under which it receives shares.
        mask: key from which it agrees on common masks; shares of it are given out if it is lost.
        seed: of its own mask; shares of it are given out if it stays.
    """

    settings: SecAggParams
    place: int
    prg: Prg
    cipher: PrivateKey
    mask: PrivateKey
    seed: bytes
    _ciphers: dict[int, AESGCM] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "Secrets(...)"

    @staticmethod
    def draw(settings: SecAggParams, place: int, prg: Prg) -> Secrets:
        """Returns new ones."""
        cipher, mask = PrivateKey.fresh(prg), PrivateKey.fresh(prg)
        return Secrets(settings, place, prg, cipher, mask, prg.bytes(SEED_BYTES))

    def keys(self) -> PublicKeys:
        """Returns what is advertised of them, without a signature."""
        commitment = commitment_of(self.settings, self.place, self.seed)
        return PublicKeys(self.cipher.public, self.mask.public, commitment)

    def split(self, places: list[int]) -> dict[int, bytes]:
        """Returns for every place a share of the key of masks, followed by one of the seed."""
        xs, needed = [place + 1 for place in places], self.settings.shares_needed
        of_mask = split(self.mask.secret, needed, xs, self.prg)
        of_seed = split(self.seed, needed, xs, self.prg)
        return {place: of_mask[at] + of_seed[at] for at, place in enumerate(places)}

    def seal(self, receiver: int, keys: PublicKeys, pair: bytes) -> bytes:
        """Returns two shares as only their receiver can open them, once a receiver and round."""
        bound = _bound(self.settings, self.place, receiver)
        return self._cipher(receiver, keys).encrypt(_nonce(self.place), pair, bound)

    def open(self, sender: int, keys: PublicKeys, sealed: bytes) -> bytes:
        """Returns two shares that a sender has sealed for this client."""
        bound = _bound(self.settings, sender, self.place)
        try:
            return self._cipher(sender, keys).decrypt(_nonce(sender), sealed, bound)
        except InvalidTag as error:
            raise MalformedError(
                f"the shares of client {sender} do not open: got a wrong tag; expected shares "
                "sealed for this client in this round; leave this client out of the next round"
            ) from error

    def masks(self, peers: Mapping[int, PublicKeys]) -> list[tuple[bytes, int]]:
        """Returns seeds and signs of the client's own mask and of those it shares with peers: the
        lower place adds, the higher subtracts.
        """
        masks = [(self.seed, 1)]
        for place, keys in peers.items():
            seed = self._agree(self.mask, place, keys.mask, b"mask")
            masks.append((seed, 1 if self.place < place else -1))
        return masks

    def _cipher(self, place: int, keys: PublicKeys) -> AESGCM:
        """Kept from sealing to opening: agreeing on it is most of the work."""
        if place not in self._ciphers:
            key = self._agree(self.cipher, place, keys.cipher, b"shares")
            self._ciphers[place] = AESGCM(key)
        return self._ciphers[place]

    def _agree(self, own: PrivateKey, place: int, public: bytes, use: bytes) -> bytes:
        low, high = sorted((self.place, place))
        try:
            return pair_seed(own, public, self.settings.round, low, high, use=use)
        except MalformedError as error:
            raise bad_keys(place, "a point of low order") from error


def _nonce(sender: int) -> bytes:
    """A key of AES-GCM seals one message in either direction: the sender tells them apart."""
    return struct.pack("<I8x", sender)


def _bound(settings: SecAggParams, sender: int, receiver: int) -> bytes:
    """What sealed shares belong to: they open nowhere else."""
    return settings.round + struct.pack("<II", sender, receiver)


Step: TypeAlias = Literal["advertise", "share", "mask", "confirm", "unmask", "left"]
_STEPS: tuple[Step, ...] = get_args(Step)


class SecAggClient:
    """One client in one secure sum; methods are called in the order in which they stand here.

    An unreadable message changes nothing. After any other error the client has left the
    round and has forgotten its secrets.

    Args:
        settings: of the sum. The device checks them before it takes part: a threshold that is low
            makes a sum of few.
        prg: where secrets come from; by default a fresh one. Tests pass their own.
        rounds: what this device has taken part in, so that it does not do so twice.
    """

    def __init__(
        self,
        settings: SecAggParams,
        place: int,
        prg: Prg | None = None,
        identity: Identity | None = None,
        rounds: SumsJoined | None = None,
    ) -> None:
        knows = identity is not None and len(identity.everyone) == settings.cohort
        if not 0 <= place < settings.cohort or (settings.signed and not knows):
            raise InputError(
                f"no such client in a secure sum: got place {place}, an identity that knows "
                f"everyone: {knows}; expected places 0..{settings.cohort - 1}, with an identity if "
                "the sum is signed; take the place and the public keys of the cohort from the "
                "party that invites"
            )
        if rounds is not None:
            rounds.claim(settings.round)
        self.settings = settings
        self.place = place
        self._identity = identity
        self._secrets: Secrets | None = Secrets.draw(settings, place, prg or Prg.fresh())
        self._step: Step = "advertise"
        self._peers: dict[int, PublicKeys] = {}
        self._kept: dict[int, bytes] = {}  # whose shares: of the mask key, then of the seed
        self._asked: UnmaskRequest | None = None

    def __repr__(self) -> str:
        return f"SecAggClient(place={self.place}, step={self._step})"

    @property
    def has_left(self) -> bool:
        """Whether this client is done, or has given up: its secrets are forgotten."""
        return self._step == "left"

    def advertise(self) -> bytes:
        """Returns the client's public keys."""
        secrets = self._turn("advertise")
        keys = secrets.keys()
        if self._identity is not None and self.settings.signed:
            signature = self._identity.sign(keys_text(self.settings, self.place, keys))
            keys = keys._replace(signature=signature)
        self._peers = {self.place: keys}
        self._step = "share"
        return seal("keys", self.settings, self.place, keys.encode())

    def share(self, key_list: bytes) -> bytes:
        """Returns shares of the client's secrets, sealed for the members of its group."""
        secrets = self._turn("share")
        slots = open_slots(key_list, "key list", self.settings, self.place)
        with self._moving_to("mask"):
            peers = {place: PublicKeys.decode(slot) for place, slot in slots.items()}
            self._check_peers(peers)
            self._peers = peers
            pairs = secrets.split(sorted(peers))
            self._kept = {self.place: pairs.pop(self.place)}
            sealed = {place: secrets.seal(place, peers[place], pairs[place]) for place in pairs}
        return seal_slots("shares", self.settings, self.place, sealed)

    def mask(self, share_list: bytes, vector: RingArray) -> bytes:
        """Returns the masked vector, (length,) ring elements; nothing is lost by one of another
        length or ring, which is refused."""
        secrets = self._turn("mask")
        check_vector(self.settings, vector)
        sealed = open_slots(share_list, "share list", self.settings, self.place)
        with self._moving_to("confirm" if self.settings.signed else "unmask"):
            self._receive(secrets, sealed)
            masked = np.array(vector, self.settings.dtype)
            others = self._kept.keys() - {self.place}
            add_masks(masked, secrets.masks({place: self._peers[place] for place in others}))
            # Nothing of them is needed any more: what is left are shares of others, and its own.
            self._secrets = None
        return seal("input", self.settings, self.place, masked.data.cast("B"))

    def confirm(self, survivor_list: bytes) -> bytes:
        """Returns a signature over the list of survivors, if the settings ask for one."""
        asked = self._accept(survivor_list, "confirm")
        if self._identity is None:
            raise out_of_turn(_STEPS, "confirm", self._step)
        with self._moving_to("unmask"):
            signature = self._identity.sign(survivors_text(self.settings, asked.survivors))
        return seal("confirmation", self.settings, self.place, signature)

    def unmask(self, request: bytes) -> bytes:
        """Returns one share of every client that has shared secrets; then the client is done.

        Args:
            request: the list of survivors; with signatures, the list of confirmations.

        Raises:
            ViolationError: both kinds of share of one client are asked for, or what the lists so
                far do not allow. The client has forgotten all shares.
            MismatchError: others have not signed the list of survivors that this client has seen.
        """
        if self.settings.signed:
            asked = self._accept_confirmed(request)
        else:
            asked = self._accept(request, "unmask")
        slots = {place: pair[:SHARE_BYTES] for place, pair in self._kept.items()}
        slots |= {place: self._kept[place][SHARE_BYTES:] for place in asked.survivors}
        self._forget()
        return seal_slots("unmasking", self.settings, self.place, slots)

    def _turn(self, step: Step) -> Secrets:
        """The secrets, if this step is the next one."""
        if self._step != step or self._secrets is None:
            raise out_of_turn(_STEPS, step, self._step)
        return self._secrets

    @contextmanager
    def _moving_to(self, following: Step) -> Iterator[None]:
        """The client goes on to the next step, or leaves if anything is wrong: memory that runs
        out, or a step that is broken off, as well."""
        try:
            yield
        except BaseException:
            self._forget()
            raise
        self._step = following

    def _forget(self) -> None:
        self._secrets = None
        self._peers, self._kept = {}, {}
        self._step = "left"

    def _check_peers(self, peers: Mapping[int, PublicKeys]) -> None:
        own = self._peers[self.place]
        if peers.get(self.place) != own:
            raise violation("a list of keys without this client's own", "the keys it advertised")
        seen: set[bytes] = set()
        for place, keys in peers.items():
            check_keys(place, keys, seen)
            if self.settings.signed and self._identity is not None:
                text = keys_text(self.settings, place, keys)
                if not is_signed(self._identity.everyone[place], text, keys.signature):
                    raise bad_keys(place, "a signature that is not its own")
        self._require(len(peers))

    def _receive(self, secrets: Secrets, sealed: Mapping[int, bytes]) -> None:
        """Opens the shares of others."""
        others = sealed.keys() - {self.place}
        if self.place not in sealed or not others <= self._peers.keys():
            raise violation("shares of other clients than before", "of those on the list of keys")
        self._require(len(sealed))
        self._kept |= {
            place: secrets.open(place, self._peers[place], sealed[place]) for place in others
        }

    def _accept(self, data: bytes, step: Step) -> UnmaskRequest:
        """Takes a list of survivors, once: a second one that turns a client round opens it."""
        asked, before = open_asked(data, self.settings, self.place), self._asked
        if before and (before.survivors & asked.lost or before.lost & asked.survivors):
            self._forget()
            raise violation("both kinds of share of one client, one after the other")
        if before or self._step != step:
            raise out_of_turn(_STEPS, step, self._step)
        with self._moving_to(step):
            if asked.survivors & asked.lost:
                raise violation("both kinds of share of one client")
            if self.place in asked.lost:
                raise violation("the key of a client that has sent its input")
            if asked.survivors | asked.lost != self._kept.keys():
                raise violation("shares of other clients than before", "of those who have shared")
            self._require(len(asked.survivors))
        self._asked = asked
        return asked

    def _accept_confirmed(self, data: bytes) -> UnmaskRequest:
        """Takes the signatures of others over the list that this client has seen."""
        asked = self._asked
        if self._step != "unmask" or asked is None or self._identity is None:
            raise out_of_turn(_STEPS, "unmask", self._step)
        signatures = open_slots(data, "confirmation list", self.settings, self.place)
        text = survivors_text(self.settings, asked.survivors)
        with self._moving_to("unmask"):
            if not signatures.keys() <= asked.survivors:
                raise violation("confirmations of others than survivors", "of survivors")
            for place, signature in signatures.items():
                if not is_signed(self._identity.everyone[place], text, signature):
                    raise other_list(place)
            self._require(len(signatures))
        return asked

    def _require(self, members: int) -> None:
        if members < self.settings.shares_needed:
            raise too_few(members, self.settings.shares_needed)


def violation(got: str, allowed: str = "one kind of share of each client") -> ViolationError:
    """Returns the error of a server that asks for what is forbidden."""
    return ViolationError(
        f"the server of a secure sum asks for what would open an input: got {got}; expected "
        f"{allowed}; do not trust this server; the client has forgotten its secrets"
    )


def check_vector(settings: SecAggParams, vector: RingArray) -> None:
    """Refuses a vector of another length or ring."""
    if vector.shape != (settings.length,) or vector.dtype != settings.dtype:
        raise ShapeError(
            f"a vector that does not belong into this sum: got {vector.dtype} of shape "
            f"{vector.shape}; expected uint{settings.bits} of shape ({settings.length},); encode "
            "it with the FixedPoint of this sum"
        )
