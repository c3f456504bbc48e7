"""What a server of a secure sum rebuilds at its end: the masks that did not cancel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keyhole.errors import MalformedError
from keyhole.private.hpke import PrivateKey
from keyhole.private.prg import SEED_BYTES
from keyhole.private.secure_sum.masks import pair_seed
from keyhole.private.secure_sum.secagg_keys import Keys, commitment_of
from keyhole.private.secure_sum.secagg_refusals import other_secret, too_few
from keyhole.private.secure_sum.secagg_settings import SecAggSettings
from keyhole.private.secure_sum.shamir import Combiner

__all__ = ["masks_left"]


class Rebuilder:
    """Rebuilds secrets from what their holders have sent.

    On the complete graph the same holders serve all secrets, so their weights are computed once.

    Args:
        settings: of the sum.
        unmasking: by holder, its share of whose secret.
    """

    def __init__(
        self, settings: SecAggSettings, unmasking: Mapping[int, Mapping[int, bytes]]
    ) -> None:
        self._settings = settings
        self._unmasking = unmasking
        self._combiners: dict[tuple[int, ...], Combiner] = {}

    def secret(self, place: int, length: int) -> bytes:
        """Returns the secret of a client of which the holders have sent shares.

        Raises:
            ThresholdError: too few have.
            MismatchError: shares that do not belong together.
        """
        needed = self._settings.shares_needed
        holders = [member for member in self._settings.group(place) if member in self._unmasking]
        if len(holders) < needed:
            raise too_few(len(holders), needed)
        xs = tuple(holder + 1 for holder in holders[:needed])
        if xs not in self._combiners:
            self._combiners[xs] = Combiner(xs)
        try:
            shares = {x: self._unmasking[x - 1][place] for x in xs}
            return self._combiners[xs].combine(shares, length)
        except MalformedError as error:
            raise other_secret(place) from error


def masks_left(
    settings: SecAggSettings,
    keys: Mapping[int, Keys],
    survivors: frozenset[int],
    unmasking: Mapping[int, Mapping[int, bytes]],
) -> list[tuple[bytes, int]]:
    """Returns seeds and signs of the masks that turn the sum of masked vectors into the sum.

    Args:
        settings: of the sum.
        keys: that clients advertised, by place.
        survivors: whose vectors have been added.
        unmasking: by holder, its share of whose secret: of those who survived the seed, of the
            others the key.

    Raises:
        ThresholdError: too few shares of one secret.
        MismatchError: a secret is not the one behind a client's keys; its place is named.
    """
    rebuild = Rebuilder(settings, unmasking)
    shared = {place for shares in unmasking.values() for place in shares}
    masks = []
    for place in sorted(shared):
        if place in survivors:
            masks.append((_seed(settings, rebuild, place, keys[place]), -1))
        else:
            masks.extend(_pair_masks(settings, rebuild, place, keys, survivors))
    return masks


def _seed(settings: SecAggSettings, rebuild: Rebuilder, place: int, keys: Keys) -> bytes:
    """The seed of a survivor's own mask."""
    seed = rebuild.secret(place, SEED_BYTES)
    if commitment_of(settings, place, seed) != keys.commitment:
        raise other_secret(place)
    return seed


def _pair_masks(
    settings: SecAggSettings,
    rebuild: Rebuilder,
    place: int,
    keys: Mapping[int, Keys],
    survivors: frozenset[int],
) -> Iterator[tuple[bytes, int]]:
    """What the neighbours of a lost client have left over: the opposite of what they added."""
    secret = PrivateKey(rebuild.secret(place, 32))
    if secret.public != keys[place].mask:
        raise other_secret(place)
    for other in settings.group(place):
        if other in survivors:
            low, high = sorted((place, other))
            seed = pair_seed(secret, keys[other].mask, settings.round, low, high)
            yield seed, (-1 if other < place else 1)
