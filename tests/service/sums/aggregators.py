"""Two aggregators on loopback, their tokens, and devices that send shares to them."""

import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256

import numpy as np

from keyhole.aggregation.shares import seal_share
from keyhole.aggregation.two_servers.params import SumParams, part_params
from keyhole.aggregation.two_servers.server import tables_of
from keyhole.crypto.prg import Prg
from keyhole.device.device import Device
from keyhole.service.access import Keyring, new_key
from keyhole.service.aggregator import AggregatorApp, Keyrings
from keyhole.service.finishing import PeerLine
from keyhole.service.sum_files import SumFiles
from keyhole.service.sum_services import AggregatorClient
from keyhole.service.sums import AggregatorSettings
from keyhole.service.transport import Listen, serving
from keyhole.wire.http import OCTETS, HttpClient
from keyhole.wire.manifest import digest_of
from keyhole.wire.sockets import Retry
from tests.aggregation.two_servers.two_server_sums import share_update
from tests.service.sockets import held_port

COHORT = [f"device-{i}" for i in range(6)]


def keyring():
    return Keyring((bytes.fromhex(new_key()),))


def terms_of(name=b"a", cohort=6, minimum=2, bits=32, **more):
    """Three parts: sparse, sparse, and dense."""
    sizes = (500, 8, 4), (300, 3, 3), (5, 2, 5)
    parts = tuple(part_params(*size, bits, False) for size in sizes)
    assert [part.is_sparse for part in parts] == [True, True, False]
    return SumParams(sha256(name).digest()[:16], parts, cohort, minimum, bits=bits, **more)


def rows_of(terms, seed):
    """Of one client: few keys of sparse parts, all of dense ones; ring elements of every size."""
    rng, rows = np.random.default_rng(seed), []
    for part in terms.parts:
        keys = np.sort(rng.choice(part.num_keys, rng.integers(1, part.max_keys + 1), False))
        limit = np.iinfo(terms.dtype).max
        rows.append((keys, rng.integers(0, limit, (len(keys), part.width), terms.dtype)))
    return rows


def plain_sum(terms, clients):
    """The sum in the ring, as it is defined."""
    totals = [np.zeros(terms.shape(place), terms.dtype) for place in range(len(terms.parts))]
    for rows in clients:
        for total, (keys, values) in zip(totals, rows, strict=True):
            np.add.at(total, keys, values)
    return totals


def round_name(name=b"a", number=0):
    return f"{number}-{sha256(name).hexdigest()}"


def facts_at(terms, round_id=None):
    """The facts of the sum of a round, which hold its model."""
    return replace(terms.facts, model=digest_of(round_id or round_name()))


class Pair:
    """Two aggregators that can be stopped and started; their files stay."""

    scheme = "http"

    def __init__(self, directory, **settings):
        self.directory, self.settings = directory, {"min_clients": 2, **settings}
        self._held = ExitStack()
        self.ports = [self._held.enter_context(held_port()) for _ in range(2)]
        self.peer_key = keyring()
        self.keys = [Keyrings(keyring(), keyring(), self.peer_key) for _ in range(2)]
        self.apps, self._stacks = [None, None], [None, None]
        self.limits = None
        self._lines = {}

    @property
    def urls(self):
        return [f"{self.scheme}://127.0.0.1:{port}" for port in self.ports]

    def start(self, party):
        peer = HttpClient(self.urls[1 - party], retry=Retry(attempts=1))
        stack = ExitStack()
        app = AggregatorApp(
            SumFiles(self.directory / str(party)),
            AggregatorSettings(party, **self.settings),
            self.keys[party],
            PeerLine(peer, self.peer_key, party),
            limits=self.limits,
        )
        stack.callback(app.close)
        stack.enter_context(serving(app, Listen(port=self.ports[party])))
        self.apps[party], self._stacks[party] = app, stack

    def stop(self, party):
        if self._stacks[party] is not None:
            self._stacks[party].close()
            self._stacks[party] = None

    def trainer(self, party, name="trainer"):
        """A trainer's line to one of them, the same for each name; closed with the pair."""
        if (party, name) not in self._lines:
            self._lines[party, name] = self.new_trainer(party, name)
        return self._lines[party, name]

    def give_up_ports(self):
        self._held.close()

    def close_lines(self):
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def new_trainer(self, party, name="trainer", **retry):
        ring = self.keys[party].trainers
        token = ring.issue("device", name, now=time.time(), seconds=600, audience="aggregator")
        retry = Retry(**{"attempts": 3, "first_wait": 0.01, "longest_wait": 0.05, **retry})
        return AggregatorClient(HttpClient(self.urls[party], retry=retry), token, party)

    def device_token(self, party, name, kind="device", **more):
        ring = self.keys[party].devices
        more = {"audience": "aggregator", "now": time.time(), **more}
        return ring.issue(kind, name, seconds=600, **more)

    def device(self, party, name):
        """A device's line to one aggregator, with a token of its own there."""
        quick = {"retry": Retry(attempts=200, first_wait=0.01, longest_wait=0.05, seed=0)}
        return Device(self.urls[party], token=self.device_token(party, name), **quick)

    def public(self, party):
        """The key that devices seal to."""
        return bytes.fromhex((self.directory / str(party) / "seal.pub").read_text())

    def send(self, party, round_id, name, body, token=None, sealed=None):
        """A device sends what it has sealed, or something else in its place."""
        token = token or self.device_token(party, name)
        if sealed is None:
            body = seal_share(self.public(party), round_id, name, token, body)
        else:
            body = sealed
        client = HttpClient(self.urls[party], retry=Retry(attempts=1))
        path = f"/v1/sums/{round_id}/shares"
        try:
            got = client.send(path, body, token=token, limit=4096, content_type=OCTETS)
            return bytes(got.body)
        finally:
            client.close()

    def open(self, round_id, terms, cohort=COHORT):
        for party in (0, 1):
            self.trainer(party).open(round_id, terms.encode(), cohort)

    def share(self, round_id, terms, name, seed, to=(0, 1)):
        """A device sends its shares, to one or to both; returns its rows."""
        rows = rows_of(terms, seed)
        for party, body in enumerate(bodies_of(terms, rows, seed, round_id)):
            if party in to:
                self.send(party, round_id, name, body)
        return rows

    def close(self, round_id):
        for party in (0, 1):
            self.trainer(party).close_sum(round_id)

    def wait(self, round_id, phases=("ready", "failed"), seconds=300.0, parties=(0, 1)):
        """Waits until all are in one of these phases; returns what they say."""
        until = time.monotonic() + seconds
        while True:
            found = [self.trainer(party).status(round_id) for party in parties]
            if all(one.phase in phases for one in found):
                return found
            assert time.monotonic() < until, found
            time.sleep(0.02)

    def combined(self, round_id, terms):
        facts = facts_at(terms, round_id)
        shares = [self.trainer(party).share(round_id, facts) for party in (0, 1)]
        tables = [tables_of(terms, share.payload) for share in shares]
        return [one + other for one, other in zip(*tables, strict=True)]

    def check_sum(self, round_id, terms, clients):
        """What both give out is the sum of the rows of these clients, bit for bit."""
        expected = plain_sum(terms, clients)
        for found, total in zip(self.combined(round_id, terms), expected, strict=True):
            assert found.tobytes() == total.tobytes()


def bodies_of(terms, rows, seed=0, round_id=None):
    """What a device sends to each aggregator."""
    prg = Prg(sha256(b"%d" % seed).digest()[:16])
    return share_update(terms, rows, prg, facts_at(terms, round_id).model).bodies


@contextmanager
def aggregators(directory, **settings):
    """Both of them, for the time of a test."""
    pair = Pair(directory, **settings)
    try:
        for party in (0, 1):
            pair.start(party)
        yield pair
    finally:
        pair.close_lines()
        for party in (0, 1):
            pair.stop(party)
        pair.give_up_ports()


__all__ = [
    "COHORT",
    "Pair",
    "aggregators",
    "bodies_of",
    "facts_at",
    "plain_sum",
    "round_name",
    "rows_of",
    "terms_of",
]
