"""An own sum, as a user writes it: every number in two random halves, added up by two servers."""

import json
from dataclasses import dataclass
from math import prod

import numpy as np

from keyhole.about import Leak
from keyhole.aggregation.base import AggregationAbout, PartSum, SumPrice, rows_of
from keyhole.aggregation.exchange import add_shared
from keyhole.aggregation.shares import SplitUpdate, SumFacts
from keyhole.aggregation.sum_server import ShareAdder
from keyhole.errors import MalformedError
from keyhole.pricing import Workload


class HalfAdder(ShareAdder):
    def __init__(self, size):
        self.total = np.zeros(size // 8, np.uint64)

    def add(self, public, own):
        self.total += np.frombuffer(own, np.uint64)

    def take(self, noise):
        return [self.total.tobytes()]


@dataclass(frozen=True)
class Halves:
    scale: int = 1 << 20

    @property
    def about(self):
        leak = Leak(updates="who takes part; with the other half, the sum of all updates")
        leaks = {"left server": leak, "right server": leak}
        return AggregationAbout(
            name="halves",
            title="two halves",
            leaks=leaks,
            rests_on="The two servers do not work together.",
            servers=2,
            min_clients=2,
        )

    def with_ring(self, ring, noise=0.0):
        return self

    def price(self, load: Workload):
        size = 2 * load.num_keys * load.slice_bytes  # 8 bytes for each number of 4
        seconds = dict.fromkeys(self.about.leaks, load.cohort * size / 1000000000.0)
        return SumPrice("halves", 2 * size, 0, 1, seconds, size / 1e8, size)

    def params(self, round):
        shapes = [(part.space.num_keys, part.slice_size) for part in round.layout.parts]
        clients = max(2, round.min_clients), round.asked
        return json.dumps(["halves", round.name.hex(), *clients, self.scale, shapes]).encode()

    def read(self, params):
        if not params.startswith(b'["halves", '):
            raise MalformedError("no halves: got other params; expected halves; ask anew")
        return json.loads(params)[1:]

    def facts(self, params):
        name, least, most, _, shapes = self.read(params)
        size = 8 * sum(map(prod, shapes))
        return SumFacts(
            params=params,
            round=bytes.fromhex(name),
            min_clients=least,
            max_clients=most,
            public_bytes=0,
            own_bytes=(size, size),
            share_bytes=size,
        )

    def split(self, params, layout):
        *_, scale, shapes = self.read(params)

        def split(one, coins, secrets):
            tables = [np.zeros(shape) for shape in shapes]
            for table, (keys, rows) in zip(tables, rows_of(layout, one), strict=True):
                table[keys] = np.rint(rows * scale)
            ring = np.concatenate(tables, axis=None).astype(np.int64).view(np.uint64)
            mask = np.frombuffer(secrets.bytes(ring.nbytes), np.uint64)
            return SplitUpdate((mask.tobytes(), (ring - mask).tobytes()))

        return split

    def adder(self, params, party):
        return HalfAdder(self.facts(params).share_bytes)

    def decode(self, params, shares):
        *_, scale, shapes = self.read(params)
        one, other = (np.frombuffer(share, np.uint64) for share in shares)
        flat = ((one + other).view(np.int64) / scale).astype(np.float32)
        parts = np.split(flat, np.cumsum([prod(shape) for shape in shapes])[:-1])
        return [PartSum.of_dense(p.reshape(s), None) for p, s in zip(parts, shapes, strict=True)]

    def add(self, request):
        return add_shared(self, request)


HALVES = Halves()
