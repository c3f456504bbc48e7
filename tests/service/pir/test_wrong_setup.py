"""A second server that is not set up as the first: told at once, and not taken for a lag."""

from contextlib import ExitStack

import pytest

from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.private import QueryFetch
from keyhole.device.take_part import Participant, keep_taking_part
from keyhole.errors import ServiceError
from keyhole.service.access import Access
from keyhole.service.app import App
from keyhole.service.private import query_routes
from keyhole.service.relay import RelayApp
from keyhole.service.transport import serving
from keyhole.wire.private import QuerySettings, role_named
from tests.helpers import LAYOUTS
from tests.service.pir.one_service import PirService
from tests.service.pir.pair import second_device
from tests.service.relay.relayed import line_to
from tests.service.small_service import small_service

LAYOUT = LAYOUTS["rows"]


def answering(role, **settings):
    """Makes the routes of a server of private retrieval."""
    return lambda rounds: [query_routes(rounds, QuerySettings(role_named(role), **settings))]


def second_app(stack, first, extra):
    """A service with these routes over the rounds of the first, or a relay to it."""
    if extra == "relay":
        return RelayApp(line_to(stack, first.url))
    return App(first.rounds, access=Access(open_queries=True), extra_routes=extra(first.rounds))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (lambda rounds: (), "no such path at server 1"),
        ("relay", "no such path at server 1"),
        (answering("one", max_keys=3), "no such scheme of private retrieval at server 1"),
        (answering("1"), "cannot be retrieved from in private at server 1"),
        (answering("1", max_keys=2), "queries padded to 3 keys and 2 keys"),
    ],
    ids=["no private retrieval", "a relay", "another scheme", "no --pir-keys", "other --pir-keys"],
)
def test_a_second_server_that_is_set_up_wrongly_ends_the_device_with_the_reason(
    tmp_path, second, told
):
    with ExitStack() as stack:
        first = stack.enter_context(small_service(tmp_path, extra=answering("0", max_keys=3)))
        first.publish(LAYOUT)
        url = stack.enter_context(serving(second_app(stack, first, second)))
        device, other = first.device(), second_device(url)
        stack.enter_context(device)
        stack.enter_context(other)
        habit = Participant(
            lambda known: {"row": [5, 2]},
            lambda known, fetched: pytest.fail("trained although nothing was fetched"),
            QueryFetch(TwoServerPir(), (other,)),
        )
        missed = []
        with pytest.raises(ServiceError, match="not set up alike") as caught:
            keep_taking_part(device, habit, on_miss=missed.append)
    assert missed == []
    assert told in caught.value.got


@pytest.mark.parametrize(("asked", "got"), [("one-server", "one-server"), ("x-y", "another")])
def test_a_scheme_that_is_not_served_is_told_with_the_one_that_is(asked, got):
    service = PirService()
    answer = service.ask("GET", f"/v1/rounds/{service.round.id}/tables/1/pir/{asked}")
    facts = answer.json()["error"]
    assert (facts["got"], facts["allowed"]) == (got, "two-server at this service")
