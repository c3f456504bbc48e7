"""Private fetching when things go wrong: nothing is sent twice, and no lie is believed."""

from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from keyhole import tree
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device import private
from keyhole.device.device import Assignment
from keyhole.device.private import QueryFetch
from keyhole.device.take_part import Participant, keep_taking_part, take_part
from keyhole.errors import ServiceError, StaleError, TooLateError
from keyhole.service.publishing import Publisher
from keyhole.service.routes import WHOLE_BODY
from keyhole.wire.assignment import Wait
from keyhole.wire.http import REFUSAL
from keyhole.wire.sockets import Clock
from tests.delivery.pir.mutations import HEAD_BYTES, body_of, flipped, with_body
from tests.helpers import LAYOUTS, assert_trees_equal
from tests.service.clients import client_of
from tests.service.fault_proxy import CUT, FLIP, HALF_CLOSE, RESET, FaultProxy
from tests.service.pir.pair import ONE, pair, second_device
from tests.service.recorder import Recorder
from tests.service.scripted import answer, scripted
from tests.service.small_service import random_state

LAYOUT, KEYS = LAYOUTS["rows"], {"row": [5, 2, 5]}
SETTINGS = {"keys_per_client": {"row": 3}}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with pair(tmp_path_factory.mktemp("rounds")) as made:
        yield made


@pytest.fixture
def proxy(both):
    with FaultProxy(int(both.urls[1].rpartition(":")[2])) as made:
        yield made


@pytest.fixture
def fetch(proxy):
    """Fetches through the proxy from the second server."""
    with second_device(f"http://127.0.0.1:{proxy.port}") as second:
        yield QueryFetch(TwoServerPir(), (second,))


def questions(both, starts):
    """The messages that arrived at each server."""
    pairs = zip(both.recorders, starts, strict=True)
    return [[bytes(s[3]) for s in r.seen[start:] if s[3]] for r, start in pairs]


def pieces(message):
    """Eight bytes from every place of what a message says, its head aside."""
    body = body_of(message)
    return {body[i : i + 8] for i in range(len(body) - 7)}


@pytest.mark.parametrize("where", ["before", "within"])
@pytest.mark.parametrize("kind", [CUT, RESET, HALF_CLOSE, FLIP])
def test_a_broken_reply_is_asked_for_anew_with_new_secrets(both, proxy, fetch, kind, where):
    state = both.service.publish(LAYOUT, settings=SETTINGS)
    path = f"/v1/rounds/{state.published.id}/tables/0/pir/two-server"
    with both.device() as device:
        proxy.arm()
        fetch.others[0].client.get(path, limit=1024)
        params = proxy.passed
        fetch(device, state.published.id, KEYS)
        # The reply comes behind the params, over the same connection.
        proxy.arm(kind, at=params if where == "before" else proxy.passed - params - 5)
        starts = [len(recorder.seen) for recorder in both.recorders]
        found = fetch(device, state.published.id, KEYS)
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
    sent = questions(both, starts)
    assert [len(messages) for messages in sent] == [2, 2]
    for first, second in sent:
        assert first[:HEAD_BYTES] == second[:HEAD_BYTES]  # of the same params
        assert not pieces(first) & pieces(second)
    assert not pieces(sent[0][0]) & pieces(sent[1][1])
    assert found.traffic.bytes_up == sum(len(m) for messages in sent for m in messages)


@pytest.mark.parametrize("may_repeat", [True, False])
def test_a_line_that_died_while_it_rested_does_not_send_a_message_twice(may_repeat):
    good = answer(200, b"good")
    with scripted(good, None, good) as script, client_of(script) as client:
        ask = {"headers": {}, "token": None, "limit": 100, "may_repeat": may_repeat}
        assert client.exchange("POST", "/x", b"first", **ask).status == 200
        got = client.exchange("POST", "/x", b"message", **ask)
    bodies = [body for _, _, body in script.asked]
    assert bodies == [b"first", *[b"message"] * (2 if may_repeat else 1)]
    assert bool(got.problem) != may_repeat


def test_a_server_that_never_gives_a_whole_reply_is_given_up(both, proxy, fetch):
    state = both.service.publish(LAYOUT, settings=SETTINGS)
    with both.device() as device:
        device.known(state.published.id)
        proxy.arm()
        fetch(device, state.published.id, KEYS)
        at = proxy.passed - 5
        again = lambda: proxy.arm(CUT, 5, again)  # noqa: E731 - every further answer, too
        proxy.arm(CUT, at, again)
        starts = [len(recorder.seen) for recorder in both.recorders]
        with pytest.raises(ServiceError, match="no usable answer"):
            fetch(device, state.published.id, KEYS)
    assert all(len(set(m)) == len(m) == 4 for m in questions(both, starts))


@pytest.mark.parametrize("kind", [CUT, FLIP])
def test_a_hint_goes_on_where_it_was_cut_and_is_fetched_again_if_damaged(tmp_path, kind):
    with pair(tmp_path, ONE) as both, FaultProxy(int(both.urls[0].rpartition(":")[2])) as proxy:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        with both.device(url=f"http://127.0.0.1:{proxy.port}") as device:
            proxy.arm(kind, at=20_000)  # far behind all that is not the hint
            found = QueryFetch(OneServerPir())(device, state.published.id, KEYS)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        hints = [dict(s[4]) for s in both.recorders[0].seen if s[1].endswith("/hint")]
        assert len(hints) == 2
        assert (b"range" in hints[1]) == (kind == CUT)


class Careless(Recorder):
    """A server whose line damages a few messages on their way in."""

    damages = 2

    async def __call__(self, scope, receive, send):
        is_damaged = scope.get("method") == "POST" and self.damages > 0
        self.damages -= is_damaged
        if is_damaged and WHOLE_BODY in scope:
            scope[WHOLE_BODY] = flipped(scope[WHOLE_BODY], 3)

        async def receive_damaged():
            message = await receive()
            body = message.get("body", b"")
            return {**message, "body": flipped(body, 3)} if is_damaged and body else message

        await super().__call__(scope, receive_damaged, send)


def test_a_message_that_is_refused_is_asked_anew_with_new_secrets(tmp_path):
    with pair(tmp_path, wrap=Careless) as both, both.device() as device:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        fetch = both.fetch()
        both.recorders[0].damages = 0
        with fetch.others[0]:
            found = fetch(device, state.published.id, KEYS)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        sent = [m for messages in questions(both, [0, 0]) for m in messages]
        assert len(set(sent)) == len(sent) == 6
        assert both.metric(1, 'keyhole_refused_total{kind="MalformedError"}') == 2


class Garbler(Recorder):
    """A server whose line damages a few replies on their way out."""

    garbles = 0

    async def __call__(self, scope, receive, send):
        async def garble(message):
            body = message.get("body", b"")
            if self.garbles and scope.get("method") == "POST" and body:
                self.garbles -= 1
                message = {**message, "body": flipped(body, 8 * len(body) // 2)}
            await send(message)

        await super().__call__(scope, receive, garble)


class Liar(Recorder):
    """A server whose replies about some tables are wrong, in a way that their check does not show.

    Attributes:
        lies: what the paths of its lies have in them; None is honest.
    """

    lies = None

    async def __call__(self, scope, receive, send):
        async def lie(message):
            body = message.get("body", b"")
            is_lie = self.lies is not None and self.lies in scope["path"]
            if is_lie and body[:4] == b"KHP2" and body != REFUSAL:
                rows = body_of(body)
                message = {**message, "body": with_body(body, flipped(rows, 8 * len(rows) - 1))}
            await send(message)

        await super().__call__(scope, receive, lie)


@pytest.mark.parametrize("liar", [0, 1])
def test_a_device_trains_without_what_a_server_lied_about(tmp_path, liar):
    trained = []

    def train(known, fetched):
        trained.append(len(fetched.keys["row"]))
        return tree.map_leaves(np.zeros_like, fetched.model)

    with pair(tmp_path, wrap=Liar) as both, second_device(both.urls[1]) as second:
        state = both.service.publish(LAYOUT, settings={"keys_per_client": {"row": 1}})
        both.recorders[liar].lies = "/pir/"
        habit = Participant(
            lambda known: {"row": [4]},
            train,
            QueryFetch(TwoServerPir(), (second,)),
        )
        with both.device() as device:
            taken = take_part(device, habit)
        assert (trained, taken.missing, taken.wrong) == ([0], 1, 1)
        assert len(both.service.stored(state.published.id)) == 1
        # Nothing is asked again: the query, and the update at the service.
        assert [len(m) for m in questions(both, [0, 0])] == [2, 1]


@pytest.mark.parametrize("table", [1, 2])
def test_a_lie_about_one_table_leaves_out_its_keys_and_is_not_seen(tmp_path, table):
    layout = LAYOUTS["two key spaces"]
    with pair(tmp_path, wrap=Liar) as both, both.device() as device:
        state = both.service.publish(layout, settings={"keys_per_client": {"word": 2, "neuron": 2}})
        both.recorders[0].lies = f"/tables/{table}/pir/"
        fetch = both.fetch()
        keys = {"word": [1, 2], "neuron": [3, 4]}
        with fetch.others[0]:
            found = fetch(device, state.published.id, keys)
        left = {name: list(z) for name, z in found.keys.items()}
        assert left.keys() == keys.keys()
        assert sum(map(len, left.values())) == 3  # the last row of a reply is of one key
        assert found.wrong == 1
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        for recorder in both.recorders:
            asked = [path for _, path, _, body, _ in recorder.seen if body and "/pir/" in path]
            assert [path.split("/")[-3] for path in asked] == ["1", "2"]


def test_a_reply_that_cannot_be_read_is_asked_for_anew_and_the_others_are_not(tmp_path):
    layout = LAYOUTS["two key spaces"]
    with pair(tmp_path, wrap=Garbler) as both, both.device() as device:
        state = both.service.publish(layout, settings={"keys_per_client": {"word": 2, "neuron": 2}})
        both.recorders[1].garbles = 1
        fetch = both.fetch()
        with fetch.others[0]:
            found = fetch(device, state.published.id, {"word": [1], "neuron": [3]})
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        sent = [
            (path.split("/")[-3], body) for _, path, _, body, _ in both.recorders[1].seen if body
        ]
        assert [table for table, _ in sent] == ["1", "2", "1"]
        assert not pieces(bytes(sent[0][1])) & pieces(bytes(sent[2][1]))


def no_training(second):
    return Participant(
        lambda known: KEYS,
        lambda known, fetched: pytest.fail("trained although the servers differ"),
        QueryFetch(TwoServerPir(), (second,)),
    )


def test_a_second_server_that_has_another_round_stops_the_fetch(tmp_path):
    first, other = tmp_path / "first", tmp_path / "other"
    with Publisher(other) as publisher, pair(first, other_directory=other) as both:
        publisher.publish_state(random_state(LAYOUT, 1), number=0, settings=SETTINGS, durable=False)
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        with (
            both.device() as device,
            second_device(both.urls[1]) as second,
            pytest.raises((StaleError, TooLateError)),
        ):
            take_part(device, no_training(second))
        assert both.service.stored(state.published.id) == {}
        assert questions(both, [0, 0]) == [[], []]


def test_a_device_waits_for_a_second_server_that_is_behind(tmp_path):
    """A mirror that has not pulled the round yet: the device misses a turn, and comes back."""
    first, other = tmp_path / "first", tmp_path / "other"
    state, missed = random_state(LAYOUT), []
    with Publisher(other) as publisher, pair(first, other_directory=other) as both:
        both.service.publish_state(state, settings=SETTINGS)

        def sleep(_):
            if missed:
                publisher.publish_state(state, number=0, settings=SETTINGS, durable=False)

        with both.device(clock=Clock(sleep=sleep)) as device, second_device(both.urls[1]) as second:
            zero = Participant(
                lambda known: KEYS,
                lambda known, fetched: tree.map_leaves(np.zeros_like, fetched.model),
                QueryFetch(TwoServerPir(), (second,)),
            )
            taken = keep_taking_part(device, zero, rounds=1, on_miss=missed.append)
        assert (taken, len(missed)) == (1, 1)
        assert "no such round at server 1" in str(missed[0])
        assert list(both.service.stored(state.published.id)) == ["phone"]


def test_servers_that_pad_to_different_numbers_stop_the_fetch(tmp_path):
    """The round does not say, so each operator does."""
    first, other = pair(tmp_path, max_keys=3), tmp_path / "x"
    with first as one, pair(other, other_directory=tmp_path, max_keys=2) as two:
        state = one.service.publish(LAYOUT)
        with (
            one.device() as device,
            second_device(two.urls[1]) as second,
            pytest.raises(ServiceError, match="padded to 3 keys and 2 keys"),
        ):
            take_part(device, no_training(second))
        assert one.service.stored(state.published.id) == {}


@pytest.mark.parametrize("servers", [(0, 0), (1, 1), (1, 0)])
def test_a_server_in_the_place_of_the_other_is_told_before_anything_is_sent(both, servers):
    """Whoever named one server as both would show it every key."""
    state = both.service.publish(LAYOUT, settings=SETTINGS)
    starts = [len(recorder.seen) for recorder in both.recorders]
    first, second = (second_device(both.urls[server]) for server in servers)
    with first, second, pytest.raises(ServiceError, match="another server"):
        QueryFetch(TwoServerPir(), (second,))(first, state.published.id, KEYS)
    assert questions(both, starts) == [[], []]


def test_a_second_service_that_is_a_moment_behind_is_no_round_missed():
    """It lets the device in under its token once its copy has come."""
    mine, slept = Assignment("2-d6", 2), list[float]()
    told = [Wait(1.0), Assignment("1-aa", 1), mine]
    second = SimpleNamespace(
        token_for=lambda round_id: "token",
        check_in=lambda: told.pop(0),
        clock=Clock(sleep=slept.append),
        stop=Event(),
    )
    assert private._joined(second, "2-d6") is mine
    assert slept == [0.5, 1.0]
    told[:] = [Wait(1.0)] * 9
    with pytest.raises(StaleError, match="does not let this device take part"):
        private._joined(second, "2-d6")
