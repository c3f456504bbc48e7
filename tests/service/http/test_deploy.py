"""The configurations of docs/deploy.md, run as they stand there; names on docs/operate.md exist."""

import json
import re
import threading
import time
from contextlib import ExitStack
from http import HTTPStatus
from importlib import import_module

import click
import numpy as np
import pytest

from keyhole.crypto.merkle import TreeShape, proof_length
from tests.helpers import DIGEST, LONG
from tests.service.fronts import (
    BEFORE,
    BINARY,
    KEY,
    NUM_KEYS,
    OPERATE,
    Answer,
    blocks,
    is_error,
    nginx_before,
    origin_of,
    put_in,
    query,
)
from tests.service.hand_made import content_of, write_round


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rounds")
    name = write_round(directory, 5, num_keys=NUM_KEYS, width=4, per_segment=5_000)
    with origin_of(directory, name) as made:
        yield made


@pytest.fixture(scope="module", params=["nginx", "varnish"])
def door(request, origin, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with BEFORE[request.param](origin.door.port, folder) as made:
        yield made


CACHED = {
    "manifest": "manifest",
    "broadcast": "broadcast",
    "slice": f"tables/0/slices/{KEY}",
    "segment": "tables/0/segments/3",
    "proof": "tables/0/segments/3/proof",
}


@pytest.mark.parametrize(("route", "rest"), CACHED.items())
def test_the_second_get_is_answered_without_the_service(door, origin, route, rest):
    direct = origin.door.ask("GET", origin.url(rest))
    before = origin.count(route)
    first, second = (door.ask("GET", origin.url(rest)) for _ in range(2))
    assert first.body == second.body == direct.body
    assert first.status == second.status == direct.status == 200
    assert origin.count(route) == before + 1
    assert second.headers["x-cache"] == "HIT"
    for name in ("etag", "cache-control", "content-type"):
        assert second.headers[name] == direct.headers[name]


def test_whoever_has_it_is_told_so(door, origin):
    url = origin.url("tables/0/segments/4")
    tag = door.ask("GET", url).headers["etag"]
    again = door.ask("GET", url, headers={"if-none-match": tag})
    assert (again.status, again.body) == (304, b"")
    assert door.ask("GET", url, headers={"if-none-match": '"another"'}).status == 200


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_part_of_a_segment_is_that_part(door, origin, is_warm):
    url = origin.url(f"tables/0/segments/{5 + is_warm}")
    whole = origin.door.ask("GET", url).body
    if is_warm:
        door.ask("GET", url)
    part = door.ask("GET", url, headers={"range": "bytes=100-299"})
    assert (part.status, part.body) == (206, whole[100:300])


@pytest.mark.parametrize("method", ["POST", "QUERY"])
def test_queries_pass_through_uncached(door, origin, method):
    body, url = query(KEY, 3, KEY, 49_999), origin.url("slices")
    direct = origin.door.ask(method, url, body, BINARY)
    before = origin.count("slices")
    for _ in range(2):
        through = door.ask(method, url, body, BINARY)
        assert (through.status, through.body) == (200, direct.body)
    nodes = proof_length(TreeShape(NUM_KEYS), np.array(sorted({KEY, 3, 49_999})))
    assert len(direct.body) == 4 * 16 + 32 * nodes
    assert origin.count("slices") == before + 2


@pytest.mark.parametrize("method", ["POST", "QUERY"])
def test_a_query_of_the_largest_size_passes(door, origin, method):
    keys = np.random.default_rng(0).integers(NUM_KEYS, size=65_536)
    url, body = origin.url("slices"), query(*keys)
    through = door.ask(method, url, body, BINARY)
    assert through.status == 200
    assert through.body == origin.door.ask(method, url, body, BINARY).body


def test_the_current_round_is_never_cached(door, origin):
    before = origin.count("current")
    for _ in range(2):
        shown = json.loads(door.ask("GET", "/v1/rounds/current").body)
        assert shown == {"round": origin.round, "number": 5, "phase": "open", "trailing": []}
    assert origin.count("current") == before + 2


def test_errors_of_the_service_keep_their_shape(door, origin):
    post = [("POST", origin.url("slices"))]
    assert is_error(door.ask(*post[0], query(NUM_KEYS), BINARY), 400)
    assert is_error(door.ask(*post[0], b"nonsense", BINARY), 400)
    assert is_error(door.ask(*post[0], query(1), {"content-type": "text/plain"}), 415)
    assert is_error(door.ask("GET", origin.url("tables/0/slices/50000")), 404)
    assert is_error(door.ask("GET", f"/v1/rounds/6-{DIGEST}/manifest"), 404)
    assert is_error(door.ask("DELETE", origin.url("manifest")), 405)
    assert is_error(door.ask("POST", origin.url("updates"), b"", BINARY), 401)
    assert is_error(door.ask("POST", "/v1/checkin"), 404)


def test_a_token_reaches_the_service(door, origin):
    headers = {**BINARY, "authorization": f"Bearer {origin.token}"}
    answer = door.ask("POST", origin.url("updates"), b"nonsense", headers)
    assert is_error(answer, 404)  # with a token: tables of select functions take no updates
    assert "takes no updates" in json.loads(answer.body)["error"]["wrong"]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_what_is_for_the_operator_is_not_for_the_world(door, path):
    assert is_error(door.ask("GET", path), HTTPStatus.NOT_FOUND)


def logged(door, mark):
    """The access log, once it holds a line of this request."""
    until = time.monotonic() + LONG
    while mark not in (text := door.read_log()):
        assert time.monotonic() < until, "the access log does not show the request"
        time.sleep(0.05)
    return text


@pytest.mark.parametrize("kind", ["nginx", "varnish"])
def test_keys_of_a_query_are_in_no_access_log(kind, origin, tmp_path):
    with BEFORE[kind](origin.door.port, tmp_path) as door:
        for method in ("POST", "QUERY"):
            door.ask(method, origin.url("slices"), query(KEY), BINARY)
            assert str(KEY) not in logged(door, method)
        door.ask("GET", origin.url(f"tables/0/slices/{KEY}"))
        # As the page says: the URL has the key; nginx is told to hide it, Varnish shows it.
        assert (str(KEY) in logged(door, "tables/0/slices/")) == (kind == "varnish")


def stampede(door, origin, url, count):
    """`count` GETs that have all been sent before the service answers the first."""
    answers, ready = [], threading.Barrier(count + 1)

    def fetch():
        connection = door.connect()
        connection.request("GET", url)
        ready.wait(LONG)
        answers.append(connection.getresponse().read())
        connection.close()

    threads = [threading.Thread(target=fetch) for _ in range(count)]
    origin.free.clear()
    for thread in threads:
        thread.start()
    ready.wait(LONG)
    origin.free.set()
    for thread in threads:
        thread.join(LONG)
    return answers


def test_a_stampede_on_a_cold_segment_asks_the_service_once(door, origin):
    before = origin.count("segment")
    answers = stampede(door, origin, origin.url("tables/0/segments/8"), 50)
    expected = content_of(origin.directory, origin.round)["table-0/seg-8.bin"]
    assert answers == [expected] * 50
    assert origin.count("segment") == before + 1


@pytest.mark.parametrize("kind", ["nginx", "varnish"])
def test_a_service_that_is_down_is_an_error_of_the_same_shape(kind, origin, tmp_path):
    with origin_of(origin.directory, origin.round) as doomed:
        stack = ExitStack()
        door = stack.enter_context(BEFORE[kind](doomed.door.port, tmp_path))
        warm = door.ask("GET", doomed.url("manifest"))
    with stack:
        refused = door.ask("POST", origin.url("slices"), query(1), BINARY)
        assert is_error(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        assert door.ask("GET", origin.url("manifest")).body == warm.body  # from the cache


def test_too_many_requests_of_one_address_are_an_error_of_the_same_shape(origin, tmp_path):
    with nginx_before(origin.door.port, tmp_path) as door:
        connection = door.connect()
        for _ in range(2000):
            connection.request("GET", origin.url("manifest"))  # nginx has it: far above 50 a second
            response = connection.getresponse()
            answer = Answer(response.status, dict(response.getheaders()), response.read())
            if answer.status != 200:
                break
        connection.close()
    assert is_error(answer, 429)
    assert answer.headers["retry-after"] == "1"


def test_a_body_beyond_the_limit_is_an_error_of_the_same_shape(origin, tmp_path):
    with nginx_before(origin.door.port, tmp_path) as door:
        headers = {**BINARY, "content-length": str(65 << 20)}
        assert is_error(door.ask("POST", origin.url("updates"), b"", headers), 413)


@pytest.fixture
def replica(tmp_path):
    """One that has not pulled the newest round yet."""
    (tmp_path / "edge").mkdir()
    with origin_of(tmp_path / "edge", write_round(tmp_path / "edge", 4)) as made:
        yield made


def replicas_before(replica, origin):
    """The upstream of the page, of one replica and the coordinator."""
    places = {
        "server 10.0.0.21:8100;": f"server 127.0.0.1:{replica.door.port};",
        "server 10.0.0.22:8100;": "",
        "10.0.0.10:8100 backup": f"127.0.0.1:{origin.door.port} backup",
    }
    return put_in(blocks("nginx")[1], places)


def test_a_round_that_a_replica_does_not_have_yet_comes_from_the_coordinator(
    origin, replica, tmp_path
):
    with nginx_before(origin.door.port, tmp_path, replicas_before(replica, origin)) as door:
        assert door.ask("GET", replica.url("manifest")).status == 200
        assert replica.count("manifest") == 1
        for method in ("POST", "QUERY"):
            answer = door.ask(method, origin.url("slices"), query(KEY), BINARY)
            assert answer.status == 200
        assert replica.count("slices") == 2  # it was asked first
        assert is_error(door.ask("GET", f"/v1/rounds/9-{DIGEST}/manifest"), 404)


@pytest.mark.parametrize("kind", ["nginx", "varnish"])
def test_which_round_is_current_only_the_coordinator_is_asked(kind, origin, replica, tmp_path):
    slices = replicas_before(replica, origin) if kind == "nginx" else replica.door.port
    with BEFORE[kind](origin.door.port, tmp_path, slices) as door:
        for _ in range(3):
            answer = door.ask("GET", "/v1/rounds/current")
            assert json.loads(answer.body)["round"] == origin.round
        assert replica.count("current") == 0
        assert door.ask("GET", replica.url("manifest")).status == 200
        assert replica.count("manifest") == 1


def commands():
    """Every `keyhole` command line of both pages."""
    found = blocks("sh") + blocks("sh", OPERATE)
    joined = [block.replace("\\\n", " ") for block in found]
    lines = [line for block in joined for line in block.splitlines()]
    lines += re.findall(r"ExecStart=\S*/(keyhole .*)", OPERATE)
    return [line for line in lines if line.startswith("keyhole ")]


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_pages_have_the_options_that_they_give(line):
    _, name, *rest = line.split()
    command = getattr(import_module(f"keyhole.cli.{name}"), name)
    if isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    for option in [part for part in rest if part.startswith("--")]:
        assert option in {name for each in command.params for name in each.opts}, line
