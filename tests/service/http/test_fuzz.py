"""Bad input: whatever arrives, the answer is one of the service, and says nothing about keys.

Requests are made of pieces that are right, nearly right and wrong. The slow test makes 100,000.
"""

import asyncio
import json
import logging
import random
import re
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.service.access import Access, Keyring
from keyhole.service.app import App
from keyhole.service.limits import Limits
from keyhole.service.spool import UpdateSpool
from keyhole.wire import messages as wire
from keyhole.wire.assignment import Pace, admit
from keyhole.wire.manifest import digest_of
from tests.helpers import DIGEST
from tests.service.memory_rounds import WORDS, MemoryRounds, layout, make_round

NOW = 1_800_000_000.0
RING = Keyring((b"k" * 32,))
ROUND, OLD = make_round(3), make_round(2)
OTHER = f"9-{DIGEST}"
SHAPE = {"status", "kind", "wrong", "got", "allowed", "fix"}
MARKED = 7_654_321  # keys from here on are outside, and would be noticed in a text
LAYOUT = layout()


def issue(ring=RING, kind="round", device="phone-1", now=NOW, round_id=ROUND.id, **more):
    return ring.issue(kind, device, now=now, seconds=60.0, round_id=round_id, **more).encode()


TOKENS = [
    issue(),
    issue(device="phone-2", max_keys=2),
    issue(kind="device", round_id=None),
    issue(now=NOW - 1e6),
    issue(now=NOW + 1e6),
    issue(round_id=OTHER),
    issue(ring=Keyring((b"x" * 32,))),
    issue()[:-1],
    issue() + b"=",
    b"kh2..",
    b"A" * 5000,
]

WORDS_OF_PATHS = [
    *(b"v1", b"rounds", b"current", b"manifest", b"slices", b"tables", b"segments", b"proof"),
    *(b"broadcast", b"updates", b"checkin", b"healthz", b"readyz", b"metrics", b"0", b"1", b"7"),
    *(ROUND.id.encode(), OLD.id.encode(), OTHER.encode(), ROUND.id.upper().encode()),
    *(b"", b".", b"..", b"%2e%2e", b"%2f", b"%00", b"\x00", b"\xff\xfe", "é".encode(), b"~root"),
    *(b"-1", b"00", b"1e3", b"99999999999999999999", b"0x1", b"a" * 5000, b"{round}", b"*", b"?"),
]
BASE = b"/v1/rounds/" + ROUND.id.encode()
RIGHT_PATHS = [
    *(b"/v1/rounds/current", b"/v1/checkin", b"/healthz", b"/readyz", b"/metrics"),
    *(BASE + b"/manifest", BASE + b"/broadcast", BASE + b"/tables/1/slices/7"),
    *(BASE + b"/tables/1/segments/1", BASE + b"/tables/1/segments/0/proof"),
    *([BASE + b"/slices"] * 6),
    *([BASE + b"/updates"] * 3),
    *(b"/v1/rounds/" + each.encode() + b"/slices" for each in (OLD.id, OTHER)),
]
METHODS = [
    "GET",
    "GET",
    "GET",
    "POST",
    "POST",
    "POST",
    "QUERY",
    "HEAD",
    "PUT",
    "DELETE",
    "TRACE",
    "",
    "GET ",
]
HEADERS = [b"range", b"if-range", b"if-none-match", b"content-length", b"content-type", b"x"]
VALUES = [
    *(b"bytes=0-3", b"bytes=-0", b"bytes=5-2", b"bytes=9999999999999999999999-", b"bytes="),
    *(b"bytes=0-1,5-6", b"*", b'""', b'W/"x"', b"-1", b"x", b"1e9", b"99999999999999999999"),
]
USUAL = [(b"range", b"bytes=0-3"), (b"range", b"bytes=-0"), (b"if-none-match", b"*")]
EDGES = [-1, WORDS, 2**31 - 1, 2**31, 2**62, -(2**31)]


def make_keys(rng):
    """In range, just outside, negative, huge; in any order, once or often."""
    kinds = [
        lambda: rng.randrange(WORDS),
        lambda: rng.randrange(WORDS),
        lambda: rng.randrange(WORDS),
        lambda: rng.choice([MARKED, -MARKED]) + rng.randrange(9999),
        lambda: rng.choice(EDGES),
    ]
    some = kinds[: rng.choice([1, 1, 4, 5])]
    return [rng.choice(some)() for _ in range(rng.randrange(5))]


def make_query(rng):
    """The body of a query and the keys in it."""
    asks, shown = [], []
    for _ in range(rng.randrange(4)):
        chosen = make_keys(rng)
        shown += chosen
        sums = np.zeros(len(chosen), np.uint64) if rng.random() < 0.5 else None
        table = rng.choice([1, 1, 1, 1, 0, 2, 65535])
        asks.append(wire.Ask(table, np.array(chosen, np.int64), sums))
    return wire.encode_query(asks), shown


def make_update(rng):
    """The body of an update and the keys in it."""
    chosen = [rng.randrange(WORDS) for _ in range(rng.randrange(4))]
    value = rng.choice([0.0, 1.0, -3e38, np.nan, np.inf])
    update = {"w": np.full((len(chosen), 3), value, np.float32), "b": np.zeros(5, np.float32)}
    keys, made_from = {"word": LAYOUT.spaces[0].keys(chosen)}, rng.choice([ROUND, ROUND, OLD]).id
    return wire.encode_update(LAYOUT, update, keys, digest_of(made_from)), []


def make_body(rng):
    """A message, whole or damaged, or anything."""
    make = rng.choice([make_query, make_query, make_query, make_update, lambda _: (b"", [])])
    body, shown = make(rng)
    damage = rng.choice(["none", "none", "flip", "cut", "longer", "other"])
    if damage == "flip" and body:
        changed = bytearray(body)
        changed[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        body = bytes(changed)
    elif damage == "cut":
        body = body[: rng.randrange(len(body) + 1)]
    elif damage == "longer":
        body += rng.randbytes(rng.randrange(9))
    elif damage == "other":
        body = rng.randbytes(rng.randrange(40))
    return body, shown


def make_path(rng):
    """A path that exists, one made of words that occur in paths, or anything."""
    words = [rng.choice(WORDS_OF_PATHS) for _ in range(rng.randrange(8))]
    return rng.choice(
        [
            rng.choice(RIGHT_PATHS),
            rng.choice(RIGHT_PATHS),
            rng.choice(RIGHT_PATHS),
            b"/" + b"/".join(words),
            rng.choice(RIGHT_PATHS) + b"/" + rng.choice(WORDS_OF_PATHS),
            rng.randbytes(rng.randrange(30)),
        ]
    )


def make_request(rng):
    """A request, and the keys in it."""
    body, shown = make_body(rng)
    headers = [(b"content-type", b"application/octet-stream")]
    if rng.random() < 0.5:
        headers.append((b"content-length", b"%d" % len(body)))
    if rng.random() < 0.7:
        headers.append((b"authorization", b"Bearer " + rng.choice([TOKENS[0], *TOKENS])))
    if rng.random() < 0.4:
        value = rng.choice([*VALUES, rng.randbytes(rng.randrange(20))])
        headers.append(rng.choice([*USUAL, (rng.choice(HEADERS), value)]))
    cut = rng.choice([len(body), rng.randrange(len(body) + 1)])
    pieces = [body[:cut], body[cut:]] if cut < len(body) else [body]
    return *make_line(rng, body), headers, pieces, shown


def make_line(rng, body):
    """Method and path; those of the body in some cases."""
    if rng.random() < 0.7:
        return rng.choice(METHODS), make_path(rng)
    if rng.random() < 0.3:
        return "GET", rng.choice(RIGHT_PATHS)
    return "POST", BASE + (b"/updates" if body.startswith(b"KHU2") else b"/slices")


class Service:
    """A service whose every answer is held to the rules."""

    def __init__(self, runner, directory, reads_need_token):
        self._runner = runner
        rounds = MemoryRounds()
        rounds.open(3)
        rounds.removed.add(OLD.id)
        assert rounds.now.round == ROUND.id
        self.rounds = rounds
        self.statuses = set()
        self.app = App(
            rounds,
            access=Access(RING, reads_need_token),
            limits=Limits(max_keys=6, max_body=4096, rate=1e9),
            spool=UpdateSpool(directory),
            admit=partial(admit, pace=Pace(), uniform=lambda: 0.5),
            clock=lambda: NOW,
            rng=random.Random(0),
        )

    def check(self, request):
        method, path, headers, pieces, shown = request
        status, answered, body = self._runner.run(self._ask(method, path, headers, pieces))
        self.statuses.add(status)
        assert 200 <= status < 500, (status, body)
        assert self.rounds.held == 0
        if status != 304:
            assert answered[b"content-length"] == b"%d" % len(body) or method == "HEAD"
        if status >= 400 and method != "HEAD":
            facts = json.loads(body)["error"]
            assert facts.keys() == SHAPE
            assert facts["status"] == status
            assert "Traceback" not in body.decode()
            for key in shown:
                assert abs(key) < 1000 or str(abs(key)) not in body.decode()

    async def _ask(self, method, path, headers, pieces):
        left, sent = list(pieces), []

        async def receive():
            if not left:
                return {"type": "http.disconnect"}
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left)}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path.decode("latin-1"),
            "raw_path": path,
            "headers": headers,
            "client": ("127.0.0.1", 9),
        }
        await self.app(scope, receive, send)
        start, *parts = sent
        body = b"".join(part["body"] for part in parts)
        return start["status"], dict(start["headers"]), body


@contextmanager
def services():
    """Two services, one whose reads need tokens; what they log and count is checked at the end."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("keyhole")
    logger.addHandler(handler)
    try:
        with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as directory:
            made = [Service(runner, Path(directory) / name, name == "b") for name in "ab"]
            yield made
    finally:
        logger.removeHandler(handler)
    assert records == []
    for service in made:
        assert b"Unexpected" not in service.app.metrics.page()
        assert not re.search(
            rb"phone|round-|(?<![.\d])76[56]\d{4}(?![.\d])", service.app.metrics.page()
        )


def fuzz(seeds):
    """Holds two services to the rules in so many requests; returns the statuses that were seen."""
    with services() as made:
        for number in seeds:
            rng = random.Random(number)
            rng.choice(made).check(make_request(rng))
    return made[0].statuses | made[1].statuses


def check_body(service, path, body):
    """A request whose head is right."""
    token = b"Bearer " + TOKENS[0]
    headers = [(b"content-type", b"application/octet-stream"), (b"authorization", token)]
    service.check(("POST", BASE + path, headers, [body], []))


def fuzz_bodies(cases):
    """Holds a service to the rules for any bytes, and any bytes behind a right beginning."""
    begun = st.sampled_from(
        [b"", b"KHQ2", b"KHQ2\x01\0\0\0\x01\0\x04\0", b"KHU2\x01\0\x02\0" + digest_of(ROUND.id)]
    )
    with services() as (made, _):

        @settings(max_examples=cases, database=None)
        @given(st.sampled_from([b"/slices", b"/updates"]), begun, st.binary(max_size=60))
        def run(path, first, rest):
            check_body(made, path, first + rest)

        run()


def test_no_request_makes_the_service_fail():
    seen = fuzz(range(5000))
    expected = {200, 201, 206, 304, 400, 401, 403, 404, 405, 409, 410, 413, 415, 416}
    assert seen == expected


def test_no_bytes_make_the_service_fail():
    fuzz_bodies(300)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_ten_thousand_requests_do_not_make_the_service_fail(chunk):
    fuzz(range(10_000 * (chunk + 1), 10_000 * (chunk + 2)))


@pytest.mark.slow
def test_thousands_of_bytes_do_not_make_the_service_fail():
    fuzz_bodies(5000)
