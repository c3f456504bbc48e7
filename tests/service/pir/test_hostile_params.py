"""Params are what servers say: how much they can make a device do, and what they learn by it."""

import tracemalloc
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest

import keyhole as kh
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.private import QueryFetch
from keyhole.errors import InputError, ServiceError
from tests.helpers import LAYOUTS, LONG, assert_trees_equal, zeros
from tests.service.pir.pair import ONE, TWO, pair
from tests.service.recorder import Recorder

LAYOUT, KEYS = LAYOUTS["rows"], {"row": [5, 2, 5]}
SETTINGS = {"keys_per_client": {"row": 3}}


class Probing(Recorder):
    """A server that names a number of keys of its own, to see whether a device fails."""

    async def __call__(self, scope, receive, send):
        async def probe(message):
            body = message.get("body", b"")
            if body[:4] == b"KHT3":
                message = {**message, "body": replace(PirParams.decode(body), max_keys=2).encode()}
            await send(message)

        await super().__call__(scope, receive, probe)


def fetching(stack, both, **options):
    """How a device fetches from one server or from two."""
    if len(both.urls) == 1:
        return QueryFetch(OneServerPir(), **options)
    fetch = both.fetch(**options)
    stack.enter_context(fetch.others[0])
    return fetch


def posted(both):
    return [
        path
        for recorder in both.recorders
        for method, path, *_ in recorder.seen
        if method == "POST"
    ]


@pytest.mark.parametrize(
    ("roles", "settings", "pinned"),
    [
        (TWO, SETTINGS, {}),
        (TWO, {}, {"row": 3}),
        (TWO, {"keys_per_client": {"row": 2}}, {"row": 3}),
        (ONE, SETTINGS, {}),
        (ONE, {}, {"row": 3}),
    ],
)
def test_servers_that_pad_to_another_number_than_the_public_one_are_not_asked(
    tmp_path, roles, settings, pinned
):
    """Not even if they agree: devices with more keys than a query holds would fail, and show it."""
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path, roles, wrap=Probing, max_keys=3))
        state = both.service.publish(LAYOUT, settings=settings)
        device = stack.enter_context(both.device())
        fetch = fetching(stack, both, max_keys=pinned)
        with pytest.raises(ServiceError, match="another number of keys"):
            fetch(device, state.published.id, KEYS)
        assert posted(both) == []


def test_a_number_that_only_one_server_names_is_not_taken(tmp_path):
    with pair(tmp_path, ONE, max_keys=3) as both, both.device() as device:
        state = both.service.publish(LAYOUT)
        with pytest.raises(InputError, match="not known to how many keys"):
            QueryFetch(OneServerPir())(device, state.published.id, KEYS)
        assert posted(both) == []
        found = QueryFetch(OneServerPir(), max_keys={"row": 3})(device, state.published.id, KEYS)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_a_number_that_two_servers_agree_on_is_taken_where_the_round_names_none(tmp_path):
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path, max_keys=3))
        state, device = both.service.publish(LAYOUT), stack.enter_context(both.device())
        found = fetching(stack, both)(device, state.published.id, KEYS)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_what_the_round_says_holds_whatever_an_operator_says(tmp_path):
    with pair(tmp_path, max_keys=2) as both:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        assert both.params(state.published.id, 0).max_keys == 3


@pytest.mark.parametrize(
    ("roles", "num_keys", "max_keys", "max_answer"),
    [(TWO, 20_000, 10_000, 100_000), (ONE, 4096, 4095, 30_000)],
    ids=["two servers", "one server"],
)
def test_terms_that_ask_for_too_much_cost_a_device_no_memory(
    tmp_path, roles, num_keys, max_keys, max_answer
):
    """To make a question under these params takes 2 MB or more, with two servers and with one."""
    rows = kh.Cut(kh.KeySpace("row", num_keys), {"w": 0})
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path, roles))
        settings = {"keys_per_client": {"row": max_keys}}
        state = both.service.publish(kh.Layout.of(zeros(w=(num_keys, 1)), rows), settings=settings)
        device = stack.enter_context(both.device(max_answer=max_answer))
        device.known(state.published.id)
        path = f"/v1/rounds/{state.published.id}/tables/0/pir/{roles[0].delivery.about.path_name}"
        for url in both.urls:  # what it takes a service to make its table is not meant
            httpx.get(url + path, timeout=LONG).raise_for_status()
        fetch, peak = fetching(stack, both), 0
        tracemalloc.start()
        try:
            with pytest.raises(ServiceError, match="longer than this device takes"):
                fetch(device, state.published.id, {"row": [1]})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 0 < peak < 1_000_000
        asked = [path for recorder in both.recorders for _, path, *_ in recorder.seen]
        assert not any(path.endswith("/hint") for path in asked)


def test_messages_of_all_tables_together_are_within_what_a_device_takes(tmp_path):
    """Each of them would be; but all are held at once."""
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path))
        settings = {"keys_per_client": {"word": 2, "neuron": 2}}
        state = both.service.publish(LAYOUTS["two key spaces"], settings=settings)
        lengths = [
            TwoServerPir().lengths(both.params(state.published.id, place).encode())
            for place in (1, 2)
        ]
        limit = max(sum(each.query for each in lengths), sum(each.reply for each in lengths))
        fetch, keys = fetching(stack, both), {"word": [1], "neuron": [1]}
        fetch(stack.enter_context(both.device(max_answer=limit)), state.published.id, keys)
        before, tight = len(posted(both)), stack.enter_context(both.device(max_answer=limit - 1))
        with pytest.raises(ServiceError, match="the whole of all private"):
            fetch(tight, state.published.id, keys)
        assert len(posted(both)) == before
