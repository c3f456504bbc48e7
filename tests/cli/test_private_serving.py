"""`keyhole serve --pir` and `keyhole device --delivery`: private retrieval between programs."""

import asyncio
from contextlib import closing, contextmanager

import httpx
import pytest
from click.testing import CliRunner

from keyhole.cli.device import device
from keyhole.cli.runs import run_settings
from keyhole.cli.serve import check_tables, extra_routes, serve
from keyhole.cli.token import token
from keyhole.data.open import open_dataset
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.delivery.relay.ohttp import GatewayKey
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from keyhole.rounds.cohorts import Draws
from keyhole.service.app import App
from keyhole.service.gateway import gateway_routes
from keyhole.service.publishing import Publisher
from keyhole.service.relay import GatewayLink, Mix, RelayApp
from keyhole.service.transport import serving
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Retry
from tests.helpers import LAYOUTS, LONG, assert_trees_equal
from tests.service.memory_rounds import MemoryRounds
from tests.service.pir.pair import ONE, TWO, pair
from tests.service.service_process import service
from tests.service.small_service import random_state, small_service

TASK = ("--task", "so_tag", "--rounds", "1")
# Where nobody listens without TLS: what is not refused before is refused there, and ends as well.
NOWHERE = ("--host", "0.0.0.0", "--port", "0")


@pytest.mark.slow
def test_two_programs_answer_one_device_each_with_half_a_question(tmp_path):
    layout = LAYOUTS["rows"]
    state = random_state(layout)
    with Publisher(tmp_path) as publisher:
        published = publisher.publish_state(state, number=0, settings={}, durable=False)
        sized = ("--pir-keys", "row=3")
        with (
            service(tmp_path, "--pir", 0, "--open-queries", *sized) as first,
            service(tmp_path, "--pir", 1, "--open-queries", *sized) as second,
            Device(first.url) as device,
            Device(second.url) as other,
        ):
            found = QueryFetch(TwoServerPir(), (other,))(device, published.id, {"row": [5, 0]})
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
            path = f"{first.url}/v1/rounds/{published.id}/tables/0/pir"
            params = httpx.get(f"{path}/two-server", timeout=LONG)
            assert PirParams.decode(params.content).max_keys == 3
            assert params.headers["keyhole-server"] == "0"
            assert httpx.get(f"{path}/one-server", timeout=LONG).status_code == 404


@pytest.mark.parametrize(
    ("pir", "keys", "server", "limit"),
    [("0", ("3",), 0, 3), ("1", ("2", "word=9"), 1, 9), ("one", ("other=3", "5"), 0, 5)],
)
def test_a_server_has_the_role_and_the_numbers_of_its_options(pir, keys, server, limit):
    rounds = MemoryRounds()
    opened = rounds.open()
    options = {"pir": pir, "pir_keys": keys, "pir_memory_mb": 1, "gateway_key": None}
    options |= {"token_key": None, "open_queries": True, "admission": None}
    app = App(rounds, extra_routes=extra_routes(options, workers=1)(rounds))

    async def params():
        scheme = "one-server" if pir == "one" else "two-server"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(f"/v1/rounds/{opened.id}/tables/1/pir/{scheme}")

    answer = asyncio.run(params())
    assert answer.headers["keyhole-server"] == str(server)
    assert PirParams.decode(answer.content).max_keys == limit


def test_a_service_with_a_gateway_key_is_a_gateway_beside(tmp_path):
    key = tmp_path / "key"
    assert CliRunner().invoke(token, ["gateway-key", str(key)]).exit_code == 0
    rounds = MemoryRounds()
    rounds.open()
    options = {"pir": "0", "pir_keys": ("3",), "pir_memory_mb": 1, "gateway_key": key}
    options |= {"token_key": None, "open_queries": True, "admission": None}
    app = App(rounds, extra_routes=extra_routes(options, workers=1)(rounds))

    async def keys():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/v1/gateway/keys")

    answer = asyncio.run(keys())
    assert answer.headers["content-type"] == "application/ohttp-keys"
    # What devices are given by hand is what the gateway tells those that ask.
    assert CliRunner().invoke(token, ["gateway-config", str(key)]).stdout_bytes == answer.content
    key.chmod(0o644)
    with pytest.raises(InputError, match="by others"):
        extra_routes(options, workers=1)


@pytest.mark.parametrize("content", [None, b"", b"not keys"])
def test_a_file_without_gateway_keys_is_named_before_anything_is_asked(tmp_path, content):
    file = tmp_path / "gateway.config"
    if content is not None:
        file.write_bytes(content)
    relay = ("--delivery", "relay", "--relay", "http://127.0.0.1:9", "--gateway-config", str(file))
    done = CliRunner().invoke(device, ["http://127.0.0.1:9", *TASK, *relay])
    assert isinstance(done.exception, InputError)
    assert str(file) in str(done.exception)


@contextmanager
def services_for(delivery, directory):
    """A service, and the options with which a device fetches from it."""
    if delivery == "relay":
        key = GatewayKey.fresh()
        with small_service(directory, extra=lambda r: [gateway_routes(r, [key])]) as made:
            line = GatewayLink(HttpClient(made.url, retry=Retry(attempts=1)), None, 1 << 20)
            with closing(line), serving(RelayApp(line, mix=Mix(seconds=0.0))) as url:
                yield made, ["--relay", url]
        return
    with pair(directory, ONE if delivery == "pir-one-server" else TWO) as both:
        yield both.service, ["--second", both.urls[1]] if delivery == "pir" else []


@pytest.mark.parametrize(
    "delivery",
    [
        pytest.param("broadcast", marks=pytest.mark.slow),
        "pir",
        pytest.param("pir-one-server", marks=pytest.mark.slow),
        "relay",
    ],
)
def test_a_device_of_a_task_sends_the_same_update_however_it_fetches(
    few_writers, environment, monkeypatch, tmp_path, delivery
):
    monkeypatch.setenv("KEYHOLE_CACHE", environment["KEYHOLE_CACHE"])
    changes = {"seed": 5, "trial": 2, "keys.neuron.count": 8}
    spec = spec_of("emnist_2nn", changes, sizes={"neurons": 16, "hidden": 8})
    experiment = Experiment(spec, open_dataset(few_writers))
    told, state = (
        run_settings(experiment, Draws("secret", bytes(32)), 0),
        experiment.start(2, None).state,
    )
    task = ["--task", "emnist_2nn", "--client", "3", "--data", str(few_writers), "--rounds", "1"]
    updates = {}
    for is_private in (False, True):
        with services_for(delivery, tmp_path / f"rounds-{is_private}") as (service, needed):
            published = service.publish_state(state, settings=told).published
            way = ["--delivery", delivery, *needed] if is_private else []
            file = tmp_path / "token"
            file.write_text(service.token("device-3"))
            done = CliRunner().invoke(device, [service.url, "--token-file", str(file), *task, *way])
            assert done.exit_code == 0, (done.output, done.exception)
            updates[is_private] = service.stored(published.id)
    assert set(updates[False]) == {"device-3"}
    assert updates[False] == updates[True]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--pir", "2", "--open-queries"), "--pir"),
        (("--pir", "0", "--open-queries", "--workers", "2"), "leave out --workers"),
        (("--gateway-key", "KEY", "--workers", "2"), "leave out --workers"),
        (("--pir", "0", "--open-queries", "--pir-keys", "x"), "1 or more"),
        (("--pir", "0", "--open-queries", "--pir-keys", "row=0"), "1 or more"),
        (("--pir-keys", "3"), "--pir-keys needs --pir"),
        (("--pir-memory-mb", "64"), "--pir-memory-mb needs --pir"),
    ],
)
def test_options_of_a_server_that_do_not_fit_are_refused(tmp_path, options, told):
    key = tmp_path / "key"
    CliRunner().invoke(token, ["gateway-key", str(key)])
    given = [str(key) if option == "KEY" else option for option in options]
    done = CliRunner().invoke(serve, [str(tmp_path), *NOWHERE, *given])
    assert done.exit_code == 2, done.output
    assert told in done.output


@pytest.mark.parametrize("name", ["nosuch", "broadcast"])
def test_numbers_of_keys_for_a_table_that_is_not_there_are_refused(tmp_path, name):
    with Publisher(tmp_path) as publisher:
        state = random_state(LAYOUTS["rows"])
        publisher.publish_state(state, number=0, settings={}, durable=False)
        given = ["--pir", "0", "--open-queries", "--pir-keys", f"{name}=4", "--pir-keys", "row=4"]
        done = CliRunner().invoke(serve, [str(tmp_path), *NOWHERE, *given])
    assert isinstance(done.exception, InputError)
    assert f"got {name!r}; expected 'row'" in str(done.exception)


def test_numbers_of_keys_wait_for_the_first_round():
    rounds = MemoryRounds()
    check_tables({"pir_keys": ("nosuch=4", "3")}, rounds)
    rounds.open()
    check_tables({"pir_keys": ("word=4", "3")}, rounds)
    with pytest.raises(InputError, match="expected 'word'"):
        check_tables({"pir_keys": ("nosuch=4",)}, rounds)


@pytest.mark.parametrize(
    "options",
    [
        ("--delivery", "pir"),
        ("--delivery", "relay"),
        ("--delivery", "broadcast", "--second", "http://127.0.0.1:9"),
        ("--second", "http://127.0.0.1:9"),
        ("--relay", "http://127.0.0.1:9"),
        ("--delivery", "pir-one-server", "--second-token-file", "x"),
        ("--delivery", "pir", "--second", "http://127.0.0.1:9", "--gateway-config", "x"),
        ("--delivery", "other"),
    ],
)
def test_a_delivery_without_what_it_needs_is_refused_and_nothing_is_fetched(
    options, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("token")
    done = CliRunner().invoke(device, ["http://127.0.0.1:9", *TASK, *options])
    assert done.exit_code == 2, done.output


def test_slices_of_a_table_are_fetched_in_the_clear_and_not_otherwise():
    args = ["http://127.0.0.1:9", "--table", "row", "--slices", "1", "--out", "x.npz"]
    done = CliRunner().invoke(device, [*args, "--delivery", "broadcast"])
    assert done.exit_code == 2
    assert "in the clear" in done.output
