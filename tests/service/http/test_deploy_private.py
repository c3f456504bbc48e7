"""Private ways behind the configurations of the pages, and how a gateway gets a new key."""

import subprocess
from contextlib import ExitStack, closing, contextmanager

import pytest
from click.testing import CliRunner

from keyhole.cli.main import keyhole
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.delivery.relay.ohttp import decode_configs, load_gateway_keys
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.device.relayed import RelayedFetch
from keyhole.service.app import App
from keyhole.service.gateway import gateway_routes
from keyhole.service.relay import GatewayLink, Mix, RelayApp
from keyhole.service.transport import serving
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Clock, Retry
from tests.helpers import LONG, assert_trees_equal
from tests.service.fronts import (
    BEFORE,
    BINARY,
    OPERATE,
    Door,
    blocks,
    certificate,
    is_error,
    needed,
    nginx_before,
    put_in,
    running,
    temporary_paths,
)
from tests.service.pir.pair import pair
from tests.service.relay.relayed import SETTINGS, Relayed
from tests.service.sockets import held_port

KEYS = {"word": [5, 0], "neuron": [1]}
QUICK = {"retry": Retry(attempts=3, seed=0), "clock": Clock(sleep=lambda _: None)}


@contextmanager
def fronts_of(kind, urls, tmp_path):
    """Devices that reach each service through a front of its own."""
    with ExitStack() as stack:
        devices = []
        for place, url in enumerate(urls):
            folder = tmp_path / f"front-{place}"
            folder.mkdir()
            door = stack.enter_context(BEFORE[kind](int(url.rpartition(":")[2]), folder))
            options = {"ca": folder / "tls.crt"} if door.tls else {}
            scheme = "https://localhost" if door.tls else "http://127.0.0.1"
            devices.append(stack.enter_context(Device(f"{scheme}:{door.port}", **options, **QUICK)))
        yield devices


@pytest.mark.parametrize("kind", ["nginx", "varnish"])
def test_private_queries_pass_the_fronts_and_no_cache_answers_them(kind, tmp_path):
    with pair(tmp_path / "rounds") as both:
        state = both.service.publish(settings=SETTINGS)
        with fronts_of(kind, both.urls, tmp_path) as (first, second):
            for times in (1, 2):
                found = QueryFetch(TwoServerPir(), (second,))(first, state.published.id, KEYS)
                expected = state.select(tuple(found.keys.values()))
                assert_trees_equal(found.model, expected)
                # PirParams and queries of each of two tables, all the way to each server.
                assert [asked_of(one) for one in both.recorders] == [(2 * times, 2 * times)] * 2


def asked_of(recorder):
    """How many params and how many queries have arrived."""
    methods = [method for method, path, *_ in recorder.seen if "/pir/" in path]
    return methods.count("GET"), methods.count("POST")


def test_a_query_beyond_the_limit_is_an_error_of_the_same_shape(tmp_path):
    with pair(tmp_path / "rounds") as both:
        name = both.service.publish(settings=SETTINGS).published.id
        (tmp_path / "front").mkdir()
        port = int(both.urls[0].rpartition(":")[2])
        with nginx_before(port, tmp_path / "front") as door:
            headers = {**BINARY, "content-length": str(65 << 20)}
            path = f"/v1/rounds/{name}/tables/0/pir/two-server"
            assert is_error(door.ask("POST", path, b"", headers), 413)


@contextmanager
def nginx_before_relay(url, folder):
    """The server block of docs/operate.md for the operator of a relay."""
    program, tls = needed("nginx", "nginx"), certificate(folder)
    with held_port() as port:
        configure_relay(url, folder, port)
        command = [program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"]
        command += ["-g", f"daemon off; pid {folder}/nginx.pid;"]
        with running(command, port, folder / "nginx.out"):
            yield Door(port, tls)


def configure_relay(url, folder, port):
    changes = {
        "http://127.0.0.1:8101": url,
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/keyhole/": f"{folder}/",
    }
    (block,) = blocks("nginx", OPERATE)
    text = put_in(block, changes)
    whole = f"events {{}}\nhttp {{\n{temporary_paths(folder)}{text}}}\n"
    (folder / "nginx.conf").write_text(whole)


def test_sealed_requests_pass_the_fronts_of_relay_and_gateway(tmp_path):
    with ExitStack() as stack:
        made = Relayed(tmp_path / "rounds", stack)
        stack.enter_context(made.service.publisher)
        state, name = made.publish()
        made.service.url = stack.enter_context(serving(made.gateway))
        for folder in ("gateway", "relay"):
            (tmp_path / folder).mkdir()
        port = int(made.service.url.rpartition(":")[2])
        gateway = stack.enter_context(nginx_before(port, tmp_path / "gateway"))
        ca = {"ca": tmp_path / "gateway" / "tls.crt"}
        front = f"https://localhost:{gateway.port}"
        line = GatewayLink(HttpClient(front, retry=Retry(attempts=1), **ca), None, 1 << 26)
        app = RelayApp(stack.enter_context(closing(line)), mix=Mix(seconds=0.0))
        url = stack.enter_context(serving(app))
        door = stack.enter_context(nginx_before_relay(url, tmp_path / "relay"))
        ca = {"ca": tmp_path / "relay" / "tls.crt"}
        client = stack.enter_context(closing(HttpClient(f"https://localhost:{door.port}", **ca)))
        found = RelayedFetch(client)(made.device(made.service.url), name, KEYS)
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        assert door.ask("GET", "/metrics").status == 404
        assert not (tmp_path / "relay" / "access.log").exists()


def run_page(block, folder):
    """Runs a block of the page, line by line; services are restarted by the test."""
    for line in block.replace("/etc/keyhole", str(folder)).splitlines():
        if line.startswith("keyhole "):
            done = CliRunner().invoke(keyhole, line.split()[1:])
            assert done.exit_code == 0, (line, done.output, done.exception)
        elif not line.startswith("systemctl "):
            subprocess.run(["sh", "-ec", line], check=True, timeout=LONG)


@contextmanager
def gateway_with(keys, service):
    """The gateway after a restart, and a relay before it."""
    routes = gateway_routes(service.rounds, load_gateway_keys(keys))
    with ExitStack() as stack:
        url = stack.enter_context(serving(App(service.rounds, extra_routes=[routes])))
        line = GatewayLink(HttpClient(url, retry=Retry(attempts=1)), None, 1 << 26)
        app = RelayApp(stack.enter_context(closing(line)), mix=Mix(seconds=0.0))
        relay = stack.enter_context(serving(app))
        yield (
            stack.enter_context(Device(url, **QUICK)),
            stack.enter_context(closing(HttpClient(relay, **QUICK))),
        )


def test_a_gateway_gets_a_new_key_while_devices_use_the_old_one(tmp_path):
    change, drop = [block for block in blocks("sh", OPERATE) if "systemctl" in block]
    run_page("keyhole token gateway-key /etc/keyhole/gateway.key", tmp_path)
    run_page(
        "keyhole token gateway-config /etc/keyhole/gateway.key /etc/keyhole/gateway.config",
        tmp_path,
    )
    old = (tmp_path / "gateway.config").read_bytes()
    with ExitStack() as stack:
        made = Relayed(tmp_path / "rounds", stack)
        stack.enter_context(made.service.publisher)
        _, name = made.publish()
        run_page(change, tmp_path)
        new = (tmp_path / "gateway-2.config").read_bytes()
        assert [one.key_id for one in decode_configs(new)] == [2, 1]
        with gateway_with(tmp_path / "gateway.key", made.service) as (device, relay):
            for pinned in (old, new, None):
                assert RelayedFetch(relay, pinned)(device, name, KEYS).keys
        run_page(drop, tmp_path)
        with gateway_with(tmp_path / "gateway.key", made.service) as (device, relay):
            for pinned in (new, None):
                assert RelayedFetch(relay, pinned)(device, name, KEYS).keys
            late = RelayedFetch(relay, old)(device, name, KEYS)
            assert not any(map(len, late.keys.values()))
