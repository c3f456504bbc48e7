"""Attack: a few connections announce long bodies, send nothing, and so take the room of all others.

Anyone who reaches the port may send sealed requests to a gateway, and private queries to a service
with `--open-queries`; one device of a relay has a token there. Updates of devices, other queries
and other devices' sealed requests find room all the same. The planted hole is one room for all, in
which everyone has what he announces.
"""

import time
from contextlib import (
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)

import httpx
import pytest

from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.delivery.relay.ohttp import REQUEST_TYPE, GatewayKey
from keyhole.service.access import Keyring
from keyhole.service.gateway import gateway_routes
from keyhole.service.guards import Guards, _counted
from keyhole.service.limits import Limits
from keyhole.service.private import QueryRoutes, query_routes
from keyhole.service.relay import GatewayLink, RelayApp, relay_access
from keyhole.service.transport import serving
from keyhole.wire.http import OCTETS, HttpClient
from keyhole.wire.private import GATEWAY_PATH, RELAY_PATH, QuerySettings, query_path, role_named
from tests.helpers import LAYOUTS, with_slow
from tests.service.small_service import small_service
from tests.service.sockets import connect

MAX_BODY, CONNECTIONS = 1 << 20, 9
LIMITS = Limits(max_body=MAX_BODY, max_held=4 * MAX_BODY, body_seconds=600.0)
PATIENCE = 20.0  # seconds; where there is no room, an answer takes `body_seconds`
RING = Keyring((b"r" * 32,))


@contextmanager
def flood(url, path, kind, token=""):
    """Connections of one sender that announce as much as a body may have, and send none of it."""
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-type: {kind}"]
    lines += [f"authorization: Bearer {token}"] * bool(token)
    head = "\r\n".join([*lines, f"content-length: {MAX_BODY}", "", ""]).encode()
    with ExitStack() as stack:
        made = [stack.enter_context(connect(url)) for _ in range(CONNECTIONS)]
        for connection in made:
            connection.sendall(head)
        for connection in made:  # each was refused, or is waited for
            connection.settimeout(0.2)
            with suppress(TimeoutError):
                connection.recv(1)
        yield


def post(url, path, kind, token, patience):
    """The status of the answer to a short body that is nothing; 0 where none comes."""
    headers = {"content-type": kind, "authorization": f"Bearer {token}"}
    try:
        return httpx.post(url + path, content=b"?", headers=headers, timeout=patience).status_code
    except httpx.ReadTimeout:
        return 0


def at_a_gateway(rounds):
    return gateway_routes(rounds, [GatewayKey.fresh(1)])


def at_open_queries(rounds):
    return query_routes(rounds, QuerySettings(role_named("0"), max_keys=3))


PATHS = {
    at_a_gateway: lambda _: GATEWAY_PATH,
    at_open_queries: lambda r: query_path(r, 0, TwoServerPir()),
}
KINDS = {at_a_gateway: REQUEST_TYPE, at_open_queries: OCTETS}
WHERE = pytest.mark.parametrize("where", [at_a_gateway, at_open_queries])


def during(folder, where, patience=PATIENCE):
    """What is answered to a device's update, and to another private message, during a flood."""
    with small_service(folder, extra=lambda rounds: [where(rounds)], limits=LIMITS) as service:
        service.publish(LAYOUTS["rows"])
        with service.device() as device:
            told = device.check_in()
        path, kind = PATHS[where](told.round), KINDS[where]
        with flood(service.url, path, kind):
            update = post(
                service.url, f"/v1/rounds/{told.round}/updates", OCTETS, told.token, patience
            )
            return update, post(service.url, path, kind, told.token, patience)


@pytest.mark.parametrize("where", with_slow([at_a_gateway, at_open_queries], [at_open_queries]))
def test_updates_of_devices_find_room(tmp_path, where):
    update, _ = during(tmp_path, where)
    assert update == 400  # it was read


def test_so_do_private_queries(tmp_path):
    _, query = during(tmp_path, at_open_queries)
    assert query == 400


@contextmanager
def relay(folder):
    with ExitStack() as stack:
        made = small_service(folder, extra=lambda rounds: [at_a_gateway(rounds)])
        service = stack.enter_context(made)
        service.publish(LAYOUTS["rows"])
        link = GatewayLink(HttpClient(service.url), None, MAX_BODY)
        stack.enter_context(closing(link))
        app = RelayApp(link, access=relay_access(RING), limits=LIMITS)
        yield stack.enter_context(serving(app))


def token(name):
    return RING.issue("device", name, now=time.time(), seconds=600.0, audience="relay")


def test_other_devices_of_a_relay_find_room(tmp_path):
    with relay(tmp_path) as url, flood(url, RELAY_PATH, REQUEST_TYPE, token("evil")):
        assert post(url, RELAY_PATH, REQUEST_TYPE, token("phone"), PATIENCE) == 400


@pytest.fixture
def one_room_for_all(monkeypatch):
    honest = Guards.body

    @asynccontextmanager
    async def body(guards, request, limit=None, gate=None):
        async with honest(guards, request, limit) as found:
            yield found

    monkeypatch.setattr(Guards, "body", body)
    monkeypatch.setattr(Guards, "batch_turn", lambda *_: nullcontext())
    monkeypatch.setattr(QueryRoutes, "_limit", lambda *_: MAX_BODY)


@WHERE
@pytest.mark.usefixtures("one_room_for_all")
def test_in_one_room_for_all_they_wait_for_nothing(tmp_path, where):
    assert during(tmp_path, where, patience=1.0) == (0, 0)


@pytest.mark.usefixtures("one_room_for_all")
def test_and_so_do_other_devices_of_a_relay(tmp_path):
    with relay(tmp_path) as url, flood(url, RELAY_PATH, REQUEST_TYPE, token("evil")):
        assert post(url, RELAY_PATH, REQUEST_TYPE, token("phone"), 1.0) == 0


SAME = [
    ("2001:db8::1", "2001:db8::ffff:0:1"),  # one machine, which has the whole network
    ("::ffff:192.0.2.7", "192.0.2.7"),
    ("fe80::1%eth0", "fe80::1"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_a_machine_counts_once_whatever_addresses_it_has(one, other):
    assert _counted(one) == _counted(other) != ""
    assert _counted(one) != _counted("2001:db8:0:1::1")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "unknown"]
)
def test_a_proxy_of_this_machine_is_not_counted(address):
    assert _counted(address) == ""
