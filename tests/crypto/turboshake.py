"""TurboSHAKE128 (RFC 9861), slow and plain: how the VDAF draft derives its keys."""

from functools import cache

_RATE = 168  # bytes
_ROUND_CONSTANTS = (  # of the last 12 rounds of Keccak-p[1600, 24], FIPS 202
    0x000000008000808B,
    0x800000000000008B,
    0x8000000000008089,
    0x8000000000008003,
    0x8000000000008002,
    0x8000000000000080,
    0x000000000000800A,
    0x800000008000000A,
    0x8000000080008081,
    0x8000000000008080,
    0x0000000080000001,
    0x8000000080008008,
)


@cache
def turboshake128(message, domain, length):
    """Returns `length` bytes for a message and a domain byte."""
    padded = bytearray(message + bytes([domain]))
    padded += bytes(-len(padded) % _RATE)
    padded[-1] ^= 0x80
    state = [0] * 25  # lane x + 5 y
    for start in range(0, len(padded), _RATE):
        for lane in range(_RATE // 8):
            block = padded[start + 8 * lane : start + 8 * lane + 8]
            state[lane] ^= int.from_bytes(block, "little")
        state = _permute(state)
    out = b""
    while len(out) < length:
        out += b"".join(lane.to_bytes(8, "little") for lane in state[: _RATE // 8])
        state = _permute(state)
    return out[:length]


def _permute(a):
    for constant in _ROUND_CONSTANTS:
        # theta
        c = [a[x] ^ a[x + 5] ^ a[x + 10] ^ a[x + 15] ^ a[x + 20] for x in range(5)]
        a = [a[i] ^ c[(i - 1) % 5] ^ _rotate(c[(i + 1) % 5], 1) for i in range(25)]
        # rho and pi: along the path (x, y) -> (y, 2x + 3y) the t-th lane turns by (t+1)(t+2)/2
        b, x, y = [a[0]] + [0] * 24, 1, 0
        for t in range(24):
            nx, ny = y, (2 * x + 3 * y) % 5
            b[nx + 5 * ny] = _rotate(a[x + 5 * y], (t + 1) * (t + 2) // 2 % 64)
            x, y = nx, ny
        # chi
        a = [b[i] ^ (~b[(i + 1) % 5 + i // 5 * 5] & b[(i + 2) % 5 + i // 5 * 5]) for i in range(25)]
        # iota
        a[0] ^= constant
    return a


def _rotate(lane, by):
    return ((lane << by) | (lane >> (64 - by))) & (2**64 - 1) if by else lane
