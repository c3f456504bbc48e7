"""Every bad query that the tests know, for every scheme: (server, queries, the error they meet)."""

from dataclasses import replace

from keyhole.delivery.base import name_of_round
from keyhole.delivery.pir.messages import seal
from keyhole.errors import MalformedError, ReplayError, StaleError
from keyhole.wire.http import REFUSAL
from tests.delivery.pir.mutations import (
    HEAD_BYTES,
    bit_flips,
    body_of,
    extensions,
    flipped,
    resealed,
    truncations,
    with_body,
)
from tests.delivery.pir.schemes import SCHEMES, seeded

KEYS = [2, 0]
MAGIC_BITS = 8 * 8  # of the head that say what it is: magic, kind, server, zeros


def bad_queries(scheme, table):
    """Everything but a replay, from one good question."""
    messages = table.query(KEYS, seeded(0)).messages()
    for server, message in enumerate(messages):
        damaged = [*truncations(message), *extensions(message), *bit_flips(message), REFUSAL]
        yield from ((server, [bad], MalformedError) for bad in damaged)
        yield from ((server, *case) for case in _forged(scheme, table, message, server))
        others = [other for at, other in enumerate(messages) if at != server]
        yield from ((server, [other], MalformedError) for other in others)


def _forged(scheme, table, message, server):
    """Whole messages whose check is right."""
    head, rest = message[:HEAD_BYTES], message[HEAD_BYTES:]
    for at in range(8 * HEAD_BYTES):
        error = MalformedError if at < MAGIC_BITS else StaleError
        yield [resealed(flipped(head, at) + rest)], error
    body = body_of(message)
    for at in SCHEMES[scheme].zero_bits(table.params):
        yield [with_body(message, flipped(body, at))], MalformedError
    for length in (0, len(body) - 1, len(body) + 1, 2 * len(body)):
        changed = (body * 2)[:length]
        yield [seal("query", table.params, server, changed)], MalformedError
    yield [seal("reply", table.params, server, body)], MalformedError
    yield [seal("query", table.params, 1 - server, body)], MalformedError
    yield [seal("query", table.params, 2, body)], MalformedError
    for params in _other_terms(table.params):
        yield [seal("query", params, server, body)], StaleError


def _other_terms(params):
    return [
        replace(params, round=name_of_round("round-6")),
        replace(params, model=bytes(32)),
        replace(params, root=bytes(32)),
        replace(params, row_bytes=params.row_bytes + 1),
        replace(params, num_keys=params.num_keys + 1),
        replace(params, max_keys=params.max_keys - 1),
        *(replace(params, scheme=scheme) for scheme in SCHEMES if scheme != params.scheme),
    ]


def replayed(table):
    """Queries that were answered before, and one that comes twice at once. Answers two of them."""
    first, second = (table.query(KEYS, seeded(number)).messages() for number in (1, 2))
    table.replies(first)
    table.replies(second)
    new = table.query(KEYS, seeded(3)).messages()
    for server in range(len(table.servers)):
        yield server, [first[server]], ReplayError
        yield server, [second[server]], ReplayError
        yield server, [new[server], first[server]], ReplayError
        yield server, [new[server], new[server]], ReplayError
