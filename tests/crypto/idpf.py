"""The incremental point function of the VDAF draft, on the steps of our own trees.

The draft gives every level a value, which ours have at the leaves alone: fields, conversions and
the derivation of keys stand here; extending nodes and correcting them is `keyhole.crypto.dpf`.
The last level of the draft extends with TurboSHAKE, the others with AES under a fixed key.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.crypto.dpf import apply_corrections, correct_level, extend
from keyhole.crypto.prg import FixedKeyAes
from tests.crypto.turboshake import turboshake128

FIELD_64 = (2**32 * 4294967295 + 1, 8)  # modulus, bytes of an element
FIELD_255 = (2**255 - 19, 32)


@dataclass(frozen=True)
class Idpf:
    """Settings of one report: the number of levels, how many elements a value has, and names."""

    bits: int
    value_len: int
    version: int
    context: bytes
    nonce: bytes

    def field(self, level):
        return FIELD_64 if level < self.bits - 1 else FIELD_255

    def dst(self, usage):
        numbers = [(self.version, 1), (1, 1), (0, 4), (usage, 2)]
        return b"".join(number.to_bytes(size, "big") for number, size in numbers) + self.context

    def fixed_key(self, usage):
        dst = self.dst(usage)
        return turboshake128(len(dst).to_bytes(2, "little") + dst + self.nonce, 2, 16)

    def stream(self, level, seed, usage, length):
        """Bytes of a seed for one usage: 0 for children, 1 for a value."""
        if level < self.bits - 1:
            cipher = FixedKeyAes(self.fixed_key(usage))
            return cipher.expand(as_seeds(seed), -(-length // 16)).tobytes()[:length]
        dst = self.dst(usage)
        message = len(dst).to_bytes(2, "little") + dst + bytes([len(seed)]) + seed + self.nonce
        return turboshake128(message, 1, length)

    def children(self, level, seeds):
        """Both children of seeds (n, 16): our `extend`, save in the last level."""
        if level < self.bits - 1:
            return extend(FixedKeyAes(self.fixed_key(0)), seeds)
        raw = b"".join(self.stream(level, seed.tobytes(), 0, 32) for seed in seeds)
        children = as_seeds(raw).reshape(len(seeds), 2, 16)
        bits = (children[..., 0] & 1).astype(np.bool_)
        children[..., 0] &= 0xFE
        return children, bits

    def convert(self, level, seed):
        """Returns the next seed and the value of a node."""
        modulus, size = self.field(level)
        # 8 elements more than are needed: an element that is not below the modulus is skipped.
        raw = self.stream(level, seed, 1, 16 + size * (self.value_len + 8))
        mask = (1 << (modulus - 1).bit_length()) - 1
        drawn = [
            int.from_bytes(raw[i : i + size], "little") & mask for i in range(16, len(raw), size)
        ]
        return raw[:16], [x for x in drawn if x < modulus][: self.value_len]

    def share(self, alpha, betas, keys):
        """Returns the corrections of all levels: (seed, two bits, value)."""
        nodes, control, words = list(keys), np.array([[False], [True]]), []
        for level, beta in enumerate(betas):
            modulus, _ = self.field(level)
            children, bits = self.children(level, np.concatenate([as_seeds(n) for n in nodes]))
            children, bits = children[:, None], bits[:, None]
            seed_word, bit_word = correct_level(children, bits, np.array([alpha[level]]))
            apply_corrections(children, bits, control, seed_word, bit_word)
            side = int(alpha[level])
            control = bits[:, :, side].copy()
            both = [self.convert(level, child.tobytes()) for child in children[:, 0, side]]
            nodes, sign = [seed for seed, _ in both], -1 if control[1, 0] else 1
            triples = zip(beta, both[0][1], both[1][1], strict=True)
            value = [sign * (b - one + other) % modulus for b, one, other in triples]
            words.append((seed_word, bit_word, value))
        return words

    def evaluate(self, party, words, key, prefix):
        """One party's share of the value of a prefix."""
        seed, control = key, np.array([party == 1])
        for level, side in enumerate(prefix):
            modulus, _ = self.field(level)
            children, bits = self.children(level, as_seeds(seed))
            apply_corrections(children, bits, control, *words[level][:2])
            control = bits[:, int(side)].copy()
            seed, value = self.convert(level, children[0, int(side)].tobytes())
            if control[0]:
                value = [(a + b) % modulus for a, b in zip(value, words[level][2], strict=True)]
        return [-x % modulus if party else x for x in value]

    def encode(self, words):
        """The public share: packed bits, seeds, values."""
        bits = np.concatenate([bit_word.ravel() for _, bit_word, _ in words])
        out = np.packbits(bits, bitorder="little").tobytes()
        out += b"".join(seed_word.tobytes() for seed_word, _, _ in words)
        for level, (_, _, value) in enumerate(words):
            out += b"".join(x.to_bytes(self.field(level)[1], "little") for x in value)
        return out


def as_seeds(data):
    return np.frombuffer(bytearray(data), np.uint8).reshape(-1, 16)
