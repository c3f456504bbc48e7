"""What a client of a secure sum must not show, and what it makes from it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyhole.errors import MalformedError
from keyhole.private.hpke import PrivateKey
from keyhole.private.prg import SEED_BYTES, Prg
from keyhole.private.secure_sum.masks import pair_seed
from keyhole.private.secure_sum.secagg_keys import Keys, bad_keys, commitment_of
from keyhole.private.secure_sum.secagg_refusals import closed
from keyhole.private.secure_sum.secagg_settings import SecAggSettings
from keyhole.private.secure_sum.shamir import split

__all__ = ["Secrets"]


@dataclass(frozen=True, repr=False)
class Secrets:
    """The secrets of one client in one sum.

    Args:
        settings: of the sum.
        place: of the client.
        prg: where shares come from.
        cipher: key under which it receives shares.
        mask: key from which it agrees on common masks; shares of it are given out if it is lost.
        seed: of its own mask; shares of it are given out if it stays.
    """

    settings: SecAggSettings
    place: int
    prg: Prg
    cipher: PrivateKey
    mask: PrivateKey
    seed: bytes
    _ciphers: dict[int, AESGCM] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "Secrets(...)"

    @staticmethod
    def draw(settings: SecAggSettings, place: int, prg: Prg) -> Secrets:
        """Returns new ones."""
        cipher, mask = PrivateKey.fresh(prg), PrivateKey.fresh(prg)
        return Secrets(settings, place, prg, cipher, mask, prg.bytes(SEED_BYTES))

    def keys(self) -> Keys:
        """What is advertised of them, without a signature."""
        commitment = commitment_of(self.settings, self.place, self.seed)
        return Keys(self.cipher.public, self.mask.public, commitment, b"")

    def split(self, places: list[int]) -> dict[int, bytes]:
        """Returns for every place a share of the key of masks, followed by one of the seed."""
        xs, needed = [place + 1 for place in places], self.settings.shares_needed
        of_mask = split(self.mask.secret, needed, xs, self.prg)
        of_seed = split(self.seed, needed, xs, self.prg)
        return {place: of_mask[at] + of_seed[at] for at, place in enumerate(places)}

    def seal(self, receiver: int, keys: Keys, pair: bytes) -> bytes:
        """Returns two shares as only their receiver can open them, once a receiver and round.

        Raises:
            MalformedError: the receiver's key is of low order; it is named.
        """
        bound = _bound(self.settings, self.place, receiver)
        return self._cipher(receiver, keys).encrypt(_nonce(self.place), pair, bound)

    def open(self, sender: int, keys: Keys, sealed: bytes) -> bytes:
        """Returns two shares that a sender has sealed for this client.

        Raises:
            MalformedError: they do not open; the sender is named.
        """
        bound = _bound(self.settings, sender, self.place)
        try:
            return self._cipher(sender, keys).decrypt(_nonce(sender), sealed, bound)
        except InvalidTag as error:
            raise closed(sender) from error

    def masks(self, peers: Mapping[int, Keys]) -> list[tuple[bytes, int]]:
        """Returns seeds and signs of the client's own mask and of those it shares with peers: the
        lower place adds, the higher subtracts.

        Raises:
            MalformedError: a key is of low order; its place is named.
        """
        masks = [(self.seed, 1)]
        for place, keys in peers.items():
            seed = self._agree(self.mask, place, keys.mask, b"mask")
            masks.append((seed, 1 if self.place < place else -1))
        return masks

    def _cipher(self, place: int, keys: Keys) -> AESGCM:
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


def _bound(settings: SecAggSettings, sender: int, receiver: int) -> bytes:
    """What sealed shares belong to: they open nowhere else."""
    return settings.round + struct.pack("<II", sender, receiver)
