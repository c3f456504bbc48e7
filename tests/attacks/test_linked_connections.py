"""Attack: a server of private queries watches over which connection a device without a name asks.

Blind tokens hide who asks. A device that shows its name and then a blind token over one connection
has told who it is, also behind an address that many share; and one that comes back over the
connection of the round before has told that it is the same. The planted hole is a device that goes
on with the connections it has.
"""

from contextlib import ExitStack, nullcontext
from functools import partial

import pytest

from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.cache import SliceCache
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.service.access import Access, Keyring
from keyhole.service.admission import AdmissionFiles, BlindAdmission, KeysOf, admission_routes
from keyhole.service.app import App
from keyhole.service.private import query_routes
from keyhole.service.transport import serving
from keyhole.wire.assignment import claims_in
from keyhole.wire.http import HttpClient
from keyhole.wire.private import QuerySettings, role_named
from tests.helpers import LAYOUTS
from tests.service.pir.pair import second_device
from tests.service.small_service import Service

LAYOUT = LAYOUTS["rows"]
KEYS = {"row": [5, 0]}


class Watcher:
    """An honest service, whose operator notes what came over which connection."""

    def __init__(self, app):
        self.app, self.seen = app, []

    def __getattr__(self, name):
        return getattr(self.app, name)

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            shown = dict(scope["headers"]).get(b"authorization", b"").decode()
            told = claims_in(shown.removeprefix("Bearer ")).get("device", "")
            what = "redeem" if scope["path"].endswith("/redeem") else told
            self.seen.append((scope["client"], what, scope["path"]))
        await self.app(scope, receive, send)

    def names(self):
        """What was told over each connection: names, guests and blind tokens."""
        found = {}
        for client, told, _ in self.seen:
            found.setdefault(client, set()).add(told)
        return [told - {""} for told in found.values() if told - {""}]


def with_admission(rounds, role, directory, keys):
    settings = QuerySettings(role_named(role), max_keys=3)
    admission = BlindAdmission(AdmissionFiles(directory), keys)
    place = settings.role.server
    return [query_routes(rounds, settings), admission_routes(rounds, admission, place)]


def fetched_without_a_name(folder, roles, delivery, rounds=2):
    """What each server saw of a device that fetches in some rounds, one after the other."""
    ring = Keyring((b"k" * 32,))
    with ExitStack() as stack:
        make = partial(with_admission, role=roles[0], directory=folder / "first", keys=None)
        service = Service(folder / "rounds", make, access=Access(ring))
        service.keyring = ring
        stack.enter_context(service.publisher)
        stack.callback(service.rounds.close)
        watchers = [Watcher(service.app)]
        service.url = stack.enter_context(serving(watchers[0]))
        others = []
        for role in roles[1:]:
            client = HttpClient(service.url)
            stack.callback(client.close)
            extra = with_admission(service.rounds, role, folder / role, KeysOf(client))
            access = Access(Keyring((b"2" * 32,)))
            watchers.append(Watcher(App(service.rounds, access=access, extra_routes=extra)))
            url = stack.enter_context(serving(watchers[-1]))
            others.append(stack.enter_context(second_device(url)))
        cache = SliceCache(folder / "cache", min_record=0)
        device = stack.enter_context(service.device(name="phone-17", cache=cache))
        fetch = QueryFetch(delivery, tuple(others), {"row": 3}, anonymous=True)
        for number in range(rounds):
            service.publish(LAYOUT, number=number)
            fetch(device, device.check_in(), KEYS)
        return watchers


WAYS = {
    "two servers": (("0", "1"), TwoServerPir()),
    "one server": (("one",), OneServerPir()),
}


def guests(told):
    return {name for name in told if name.startswith("guest-")}


@pytest.mark.parametrize("way", WAYS)
def test_no_connection_tells_whose_queries_came_over_it(tmp_path, way):
    for watcher in fetched_without_a_name(tmp_path, *WAYS[way]):
        told = watcher.names()
        assert sum(map(len, map(guests, told))) == 2  # it did ask without a name, in two rounds
        assert not [each for each in told if "phone-17" in each and each != {"phone-17"}]
        assert all(len(guests(each)) <= 1 for each in told)  # nor that both rounds are of one


@pytest.mark.parametrize("way", WAYS)
def test_one_connection_for_all_tells_who_asks(tmp_path, monkeypatch, way):
    monkeypatch.setattr(Device, "nameless", lambda self: nullcontext(self))  # noqa: PLW0108
    first, *others = fetched_without_a_name(tmp_path, *WAYS[way])
    assert any({"phone-17", "redeem"} <= told and guests(told) for told in first.names())
    assert all(any(len(guests(told)) == 2 for told in each.names()) for each in others)
