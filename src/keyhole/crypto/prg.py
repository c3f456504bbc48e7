"""Generates all secrets and masks.

`Prg` is AES-128 in counter mode under a seed of the operating system: full width and uniform.
`FixedKeyAes` is the extendable-output function XofFixedKeyAes128 of the VDAF draft (CFRG), for
trees of seeds: one AES key for many seeds, derived again for every request, so that an attacker who
sees many requests cannot work on all of them at once. It stands on AES being a circular
correlation-robust hash. The draft derives that key with TurboSHAKE128; ours is BLAKE2b
(`fixed_key`), so that outputs are the draft's for the same AES key, not for the same nonce.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

import numpy as np
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, ECB
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.compiled import has_aes, loop
from keyhole.errors import InputError

SEED_BYTES = 16
"""Bytes of a seed: 128 bits."""

SeedArray = NDArray[np.uint8]
"""Seeds, shape (n, 16)."""

_CHUNK = 256 << 10  # bytes a call: what stays in the cache of a core
_TILE = 64 << 10  # bytes that are mixed, enciphered and mixed again while they are at hand


def new_rsa_key(bits: int) -> RSAPrivateKey:
    """Returns a new RSA key from the library's own generator, which the operating system seeds: the
    search for its primes is the library's, too."""
    return generate_private_key(65537, bits)


class Prg:
    """A stream of secret bytes: the same seed gives the same bytes. Threads do not share one.

    Args:
        seed: 16 bytes, used for this stream and nothing else. `Prg.fresh()` takes one from the
            operating system; a seed of your own is for tests and for what a protocol derives.

    >>> Prg(bytes(16)).bytes(4).hex()  # AES-128 of zeros under a key of zeros
    '66e94bd4'
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise InputError(
                f"seed has the wrong length: got {len(seed)} bytes; expected {SEED_BYTES} bytes; "
                "take one from Prg.fresh().bytes(16)"
            )
        self._stream = Cipher(AES(bytes(seed)), CTR(bytes(16))).encryptor()

    def __repr__(self) -> str:
        return "Prg(...)"

    @staticmethod
    def fresh() -> Prg:
        """Returns a stream that nobody can foresee."""
        return Prg(secrets.token_bytes(SEED_BYTES))

    def bytes(self, count: int) -> bytes:
        """Returns the next bytes."""
        return self._stream.update(bytes(count))

    def fill(self, out: NDArray[np.uint8]) -> None:
        """Writes the next bytes over a contiguous array."""
        if not out.size:
            return
        flat = out.data.cast("B")  # refuses what is not contiguous
        zeros = bytes(min(_CHUNK, len(flat)))
        for start in range(0, len(flat), _CHUNK):
            piece = flat[start : start + _CHUNK]
            self._stream.update_into(zeros[: len(piece)], piece)

    def seeds(self, count: int) -> SeedArray:
        """Returns seeds, (count, 16)."""
        return np.frombuffer(bytearray(self.bytes(SEED_BYTES * count)), np.uint8).reshape(count, 16)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Returns uniform numbers of 64 bits."""
        return np.frombuffer(bytearray(self.bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def below(self, bound: int, count: int) -> KeyArray:
        """Returns `count` uniform numbers of [0, bound), with a bound of 1 to 2^63: those that
        would favour small ones are drawn again, however many that takes."""
        if not 1 <= bound <= 1 << 63:
            raise InputError(
                f"bound is out of range: got {bound}; expected 1..2^63; check what is drawn from: "
                "it may be empty"
            )
        found: list[NDArray[np.uint64]] = []
        missing, limit = count, (2**64 // bound) * bound
        while missing > 0:
            drawn = self.words(missing)
            kept = drawn if limit == 2**64 else drawn[drawn < np.uint64(limit)]
            found.append(kept % np.uint64(bound))
            missing -= len(kept)
        return (np.concatenate(found) if found else np.empty(0, np.uint64)).astype(np.int64)

    def permutation(self, count: int) -> KeyArray:
        """Returns 0 to count - 1 in an order that nobody can foresee.

        Sorting random words of 64 bits: two are equal with probability below count^2 / 2^65, and
        then keep their order.
        """
        return np.argsort(self.words(count), kind="stable").astype(np.int64)


class FixedKeyAes:
    """XofFixedKeyAes128 of many seeds at once.

    Block i of a seed s is h(s xor i) with h(x) = AES_k(sigma(x)) xor sigma(x) and
    sigma(low || high) = high || (high xor low).

    Args:
        key: 16 bytes, from `fixed_key`.
    """

    def __init__(self, key: bytes) -> None:
        self.key = np.frombuffer(bytes(key), np.uint8).copy()  # as loops take it

    def expand(self, seeds: SeedArray, blocks: int) -> NDArray[np.uint8]:
        """Returns the first blocks of the output of each seed, (n, 16 * blocks)."""
        halves = np.ascontiguousarray(seeds).view("<u8").reshape(-1, 2)
        out = np.empty((len(halves), blocks * 2), "<u8")
        if out.size:
            stretch(self.key, halves, out)
        return out.view(np.uint8)


@loop("keyhole.crypto.aes_loops", can=has_aes)
def stretch(key: NDArray[np.uint8], seeds: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Writes the first blocks of the output of seeds, (n, 2), to `out`, (n, 2 * blocks)."""
    # Single blocks of a permutation: what is made of them is h, not a cipher.
    cipher = Cipher(AES(key.tobytes()), ECB()).encryptor()  # nosec B305
    row_bytes = out.shape[1] * 8
    step = min(len(seeds), max(1, _TILE // row_bytes))
    mixed = np.empty((step, out.shape[1]), "<u8")
    # The cipher asks for a block more than it writes.
    hidden = np.empty(mixed.size + 2, "<u8")
    source, target = mixed.data.cast("B"), hidden.data.cast("B")
    for start in range(0, len(seeds), step):
        rows = min(step, len(seeds) - start)
        mix_blocks(seeds[start : start + rows], mixed)
        cipher.update_into(source[: rows * row_bytes], target)
        tile = hidden[: rows * out.shape[1]].reshape(rows, -1)
        np.bitwise_xor(tile, mixed[:rows], out=out[start : start + rows])


@loop("keyhole.crypto.loops")
def mix_blocks(halves: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Writes sigma(s xor i) of seeds (n, 2) over the first n rows of (n or more, 2 * blocks)."""
    rows, high = out[: len(halves)], halves[:, 1]
    rows[:, 0::2] = high[:, None]
    rows[:, 1::2] = (high ^ halves[:, 0])[:, None]
    rows[:, 1::2] ^= np.arange(out.shape[1] // 2, dtype=np.uint64)


def fixed_key(nonce: bytes, usage: bytes) -> bytes:
    """Returns the AES key of one request and one usage (at most 16 bytes): BLAKE2b-128 of the
    nonce, which belongs to this request alone and is no secret, personalised."""
    return blake2b(nonce, digest_size=SEED_BYTES, person=usage).digest()
