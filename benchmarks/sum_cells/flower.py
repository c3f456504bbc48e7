"""Flower's SecAgg+ functions in the steps in which Flower calls them, on vectors as they are.

Client: one mask of its own and one for each neighbour, added or subtracted, then the remainder.
Server: vectors added, secrets rebuilt from shares, masks removed. Left out, in its favour: turning
numbers into whole ones, encryption, messages, the masks among lost clients (which Flower computes,
though they cancel), and shares beyond the threshold.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import numpy as np

MODULUS = 2**32  # Flower's default
SEED = 32  # bytes, of which its masks use 32 bits


def is_installed() -> bool:
    """Whether there is something to compare with."""
    return importlib.util.find_spec("flwr") is not None


class Flower:
    """Keys and seeds of all clients, and the two steps.

    Args:
        clients: N, each of them a neighbour of all others.
        lost: how many drop after they have shared their secrets: the first ones.
        threshold: shares that rebuild a secret.
    """

    def __init__(self, clients: int, lost: int, threshold: int) -> None:
        from flwr.common.secure_aggregation import ndarrays_arithmetic, secaggplus_utils
        from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
        from flwr.supercore.primitives import asymmetric

        self.version = importlib.metadata.version("flwr")
        self._sums, self._masks = ndarrays_arithmetic, secaggplus_utils
        self._shamir, self._agree, self._keys = shamir, symmetric_encryption, asymmetric
        self.lost, self.staying = range(lost), range(lost, clients)
        pairs = [asymmetric.generate_key_pairs() for _ in range(clients)]
        self._private = [asymmetric.private_key_to_bytes(private) for private, _ in pairs]
        self._public = [asymmetric.public_key_to_bytes(public) for _, public in pairs]
        self._seeds = [bytes([place + 1]) * SEED for place in range(clients)]
        # Time does not depend on what is shared: one seed and one key stand for all of them.
        self._shares = [
            shamir.create_shares(secret, threshold, clients)[:threshold]
            for secret in (self._seeds[0], self._private[0])
        ]

    def agreed(self, one: int, other: int) -> bytes:
        """The key that two clients share."""
        private = self._keys.bytes_to_private_key(self._private[one])
        public = self._keys.bytes_to_public_key(self._public[other])
        return self._agree.generate_shared_key(private, public)

    def client_masks(self, place: int) -> list[tuple[bytes, int]]:
        """Seeds and signs of what a client adds."""
        others = [other for other in (*self.lost, *self.staying) if other != place]
        pairs = [(self.agreed(place, other), 1 if place > other else -1) for other in others]
        return [(self._seeds[place], 1), *pairs]

    def server_masks(self) -> list[tuple[bytes, int]]:
        """Seeds and signs of what the server adds."""
        pairs = [
            (self.agreed(gone, here), 1 if gone > here else -1)
            for gone in self.lost
            for here in self.staying
        ]
        return [(self._seeds[here], -1) for here in self.staying] + pairs

    def rebuild(self) -> None:
        """The seeds of those who stay and the keys of those who are lost, from shares."""
        for _ in self.staying:
            self._shamir.combine_shares(self._shares[0])
        for _ in self.lost:
            self._shamir.combine_shares(self._shares[1])

    def add_masks(self, vector: np.ndarray, masks: list[tuple[bytes, int]]) -> np.ndarray:
        """Adds masks one by one and takes the remainder."""
        vectors = [vector]
        for seed, sign in masks:
            mask = self._masks.pseudo_rand_gen(seed, MODULUS, [vector.shape])
            if sign == 1:
                vectors = self._sums.parameters_addition(vectors, mask)
            else:
                vectors = self._sums.parameters_subtraction(vectors, mask)
        return self._sums.parameters_mod(vectors, MODULUS)[0]

    def add(self, total: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """Adds one masked vector, as the server does when it arrives."""
        added = self._sums.parameters_addition([total], [vector])
        return self._sums.parameters_mod(added, MODULUS)[0]


def check() -> None:
    """A small sum comes out right: these are the steps of the protocol."""
    flower, rng = Flower(6, 1, 4), np.random.default_rng(0)
    vectors = rng.integers(0, 2**32, (6, 100))
    total = np.zeros(100, np.int64)
    for place in flower.staying:
        total = flower.add(total, flower.add_masks(vectors[place], flower.client_masks(place)))
    total = flower.add_masks(total, flower.server_masks())
    if not np.array_equal(total, vectors[1:].sum(axis=0) % MODULUS):
        raise SystemExit("Flower's functions are not called as they are meant to be")
