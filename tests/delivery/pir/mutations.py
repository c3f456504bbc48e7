"""What can happen to a message, and what a forger can do to it."""

from hashlib import sha256

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyhole.delivery.pir.messages import FRAME_BYTES

CHECK_BYTES = 16
HEAD_BYTES = FRAME_BYTES - CHECK_BYTES

_LONG = 1000  # bytes: of longer messages not every bit of a body is tried
_STEP = 37


def _tried(count, ends):
    """All numbers of [0, count), or those near both ends and every 37th between."""
    if count <= ends * _LONG // 100:
        return range(count)
    return [*range(ends), *range(ends, count - ends, _STEP), *range(count - ends, count)]


def truncations(data):
    """Every shorter beginning, the empty one included, and a message that lost its first byte; of
    a long message some of them."""
    yield from (data[:length] for length in _tried(len(data), 100))
    yield data[1:]


def extensions(data):
    """Longer ones: zeros, its own bytes again, and bytes put before it or in between."""
    yield from (data + bytes(more) for more in (1, 2, 7, 8, 16, 64, 4096))
    yield data + data
    yield b"\0" + data
    yield data[:-CHECK_BYTES] + b"\0" + data[-CHECK_BYTES:]


def bit_flips(data):
    """The message with one bit changed: each of them, and of a long body every 37th."""
    for at in _tried(8 * len(data), 800):
        yield flipped(data, at)


def flipped(data, at):
    """The message with bit `at` changed."""
    changed = bytearray(data)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)


def body_of(message):
    return message[HEAD_BYTES:-CHECK_BYTES]


def rows_of(reply):
    """What follows the check of the query that a reply answers."""
    return body_of(reply)[CHECK_BYTES:]


def with_rows(reply, rows):
    """The reply with other rows to the same query, and the check that belongs to it."""
    return with_body(reply, body_of(reply)[:CHECK_BYTES] + rows)


def with_body(message, body):
    """The message with another body, and the check that belongs to it."""
    return resealed(message[:HEAD_BYTES] + body + message[-CHECK_BYTES:])


def resealed(message):
    """The message with the check that belongs to its bytes: written from docs/wire.md and not with
    the code under test, since this is what a forger would do."""
    rest = message[:-CHECK_BYTES]
    if rest[4] == 2:
        return rest + AESGCM(b"keyhole-pir-repl").encrypt(bytes(12), b"", rest)
    return rest + sha256(rest).digest()[:CHECK_BYTES]
