"""The law of deliveries: every way, in process and over HTTP, gives the same bytes.

A way is added here once. Keys come in any order, repeated, or not at all; slices plain or coded.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.delivery.records import Coding
from keyhole.delivery.relay.ohttp import GatewayKey
from keyhole.delivery.sources import sources_of
from keyhole.device.cache import SliceCache
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.device.relayed import RelayedFetch
from keyhole.service.access import Access
from keyhole.service.app import App
from keyhole.service.gateway import gateway_routes
from keyhole.service.on_demand import OnDemandRounds
from keyhole.service.private import query_routes
from keyhole.service.relay import GatewayLink, Mix, RelayApp
from keyhole.service.transport import serving
from keyhole.wire.http import HttpClient
from keyhole.wire.private import QuerySettings, role_named
from tests.helpers import LAYOUTS, asked, assert_trees_equal, client_keys
from tests.service.small_service import random_state, small_service

CODINGS = ("plain", "half", "uint8", "uint4")


class World:
    """One state, published to a service of files and to one on demand."""

    def __init__(self, stack, directory):
        key, first = GatewayKey.fresh(), QuerySettings(role_named("0"))
        self.files = stack.enter_context(
            small_service(
                directory, extra=lambda r: [query_routes(r, first), gateway_routes(r, [key])]
            )
        )
        threads = stack.enter_context(ThreadPoolExecutor(1))
        self.computed = OnDemandRounds(max_bytes=1 << 20, executor=threads)
        url = stack.enter_context(serving(App(self.computed)))
        self.device = stack.enter_context(Device(self.files.url))
        self.cached = stack.enter_context(Device(self.files.url, cache=SliceCache(None, 1 << 20)))
        self.asking = stack.enter_context(Device(url))
        self._start_private(stack)
        self._numbers = count()
        self._wanted = None

    def _start_private(self, stack):
        """The servers that hide something, over the same rounds."""

        def other(role):
            more = [query_routes(self.files.rounds, QuerySettings(role_named(role)))]
            url = stack.enter_context(
                serving(App(self.files.rounds, access=Access(open_queries=True), extra_routes=more))
            )
            return stack.enter_context(Device(url))

        line = GatewayLink(HttpClient(self.files.url), None, 1 << 26)
        relay = RelayApp(stack.enter_context(closing(line)), mix=Mix(seconds=0.0))
        near = HttpClient(stack.enter_context(serving(relay)))
        self.relayed = RelayedFetch(stack.enter_context(closing(near)))
        self.pir, self.alone = QueryFetch(TwoServerPir(), (other("1"),)), other("one")
        self.one_server = QueryFetch(OneServerPir())

    def hold(self, name, coding):
        """Publishes a state, unless it is the one that is there."""
        if self._wanted == (name, coding):
            return
        self._wanted, self.coding, number = (name, coding), coding, next(self._numbers)
        self.state = random_state(LAYOUTS[name])
        published = self.files.publisher.publish_state(
            self.state,
            number=number,
            coding=coding,
            segment_bytes=100,  # several segments a table
            settings={
                "keys_per_client": {s.name: min(5, s.num_keys) for s in self.state.layout.spaces}
            },
        )
        self.round = published.id
        sources = sources_of(self.state, coding)
        self.round_on_demand = self.computed.publish(sources, self.state.layout, number=number)

    def in_process(self, way, keys):
        return way(self.coding).deliver(self.state, asked(self.state.layout, [keys])).submodels[0]


WAYS = {
    "broadcast, in process": lambda w, z: w.in_process(Broadcast, z),
    "on demand, in process": lambda w, z: w.in_process(OnDemand, z),
    "broadcast, over HTTP": lambda w, z: w.device.fetch_all(w.round).select(z).model,
    "on demand, over HTTP": lambda w, z: w.asking.fetch(w.round_on_demand, z).model,
    "pregenerated, over HTTP": lambda w, z: w.device.fetch(w.round, z).model,
    "pregenerated, over HTTP, with a cache": lambda w, z: w.cached.fetch(w.round, z).model,
}


PRIVATE_WAYS = {
    "two servers": lambda w, z: w.pir(w.device, w.round, z),
    "one server": lambda w, z: w.one_server(w.alone, w.round, z),
    "relay": lambda w, z: w.relayed(w.device, w.round, z),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ExitStack() as stack:
        yield World(stack, tmp_path_factory.mktemp("rounds"))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", CODINGS)
@settings(max_examples=6)
@given(data=st.data())
def test_every_way_delivers_the_same_bytes(world, kind, name, data):
    world.hold(name, Coding(kind, seed=7))
    keys = data.draw(client_keys(LAYOUTS[name]))
    expected = world.in_process(Pregenerated, keys)
    if kind == "plain":
        assert_trees_equal(expected, LAYOUTS[name].select(world.state.model(), keys))
    for way in WAYS.values():
        assert_trees_equal(way(world, keys), expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "uint4"])
@settings(max_examples=2)
@given(data=st.data())
def test_every_private_way_over_http_delivers_the_same_bytes(world, kind, name, data):
    """In process: `tests/delivery/test_private_ways.py`."""
    world.hold(name, Coding(kind, seed=7))
    keys = data.draw(client_keys(LAYOUTS[name]))
    expected = world.in_process(Pregenerated, keys)
    for way in PRIVATE_WAYS.values():
        found = way(world, keys)
        assert_trees_equal(found.model, expected)
        assert [found.keys[z.space.name].array.tolist() for z in keys] == [
            z.array.tolist() for z in keys
        ]
