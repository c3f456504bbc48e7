"""`keyhole device`: takes part as a client of a task, or fetches slices."""

from dataclasses import replace

import numpy as np
import pytest
from click import UsageError
from click.testing import CliRunner

from keyhole.cli.device import _line_of, _take_part, device, fetch_of
from keyhole.cli.runs import run_settings
from keyhole.cli.screen import Notices
from keyhole.data.open import open_dataset
from keyhole.delivery.records import RecordField, Records
from keyhole.delivery.sources import FunctionSource
from keyhole.device.device import Device
from keyhole.device.take_part import Taken
from keyhole.errors import AccessError, InputError, KeyholeError, NotFoundError, StorageError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from keyhole.rounds.clients import ClientJob, choose_keys
from keyhole.rounds.cohorts import Draws
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import encode_report, encode_update
from keyhole.wire.sockets import Clock
from tests.helpers import DIGEST, LAYOUTS
from tests.service.scripted import answer, refusal, scripted
from tests.service.small_service import small_service

SIZES = {"neurons": 16, "hidden": 8}
OPEN = b'{"round": "7-%s", "number": 7, "phase": "open"}' % DIGEST.encode()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with small_service(tmp_path_factory.mktemp("rounds")) as made:
        yield made


@pytest.fixture
def token_file(service, tmp_path):
    path = tmp_path / "token"
    path.write_text(service.token("device-3") + "\n")
    return path


def run(*args):
    done = CliRunner().invoke(device, [str(arg) for arg in args])
    if isinstance(done.exception, KeyholeError):
        raise done.exception
    return done


def test_a_device_of_a_task_sends_what_its_client_sends_in_process(
    service, token_file, few_writers, environment, monkeypatch, tmp_path
):
    monkeypatch.setenv("KEYHOLE_CACHE", environment["KEYHOLE_CACHE"])
    spec = spec_of("emnist_2nn", sizes=SIZES, keys={"neuron": {"count": 8}}, seed=5)
    experiment = Experiment(spec, open_dataset(few_writers))
    plan, state = experiment.run_parts(0), experiment.start(0, None).state
    settings = run_settings(experiment, Draws("secret", bytes(32)), 0)
    published = service.publish_state(state, settings=settings).published
    task = ("--task", "emnist_2nn", "--client", 3, "--data", few_writers, "--seed", 5)
    done = run(
        service.url, "--token-file", token_file, "--rounds", 1, "--cache", tmp_path / "c", *task
    )
    assert done.exit_code == 0, done.output
    assert "round 0: 8 keys" in done.output
    layout, clients, t = state.layout, experiment.clients, published.manifest.number
    keys = choose_keys(3, t, layout, clients, plan)
    report = ClientJob.of(5, 0, t, 3, keys, state.select(keys)).run(clients)
    named = layout.keys_by_space(keys), digest_of(published.id)
    expected = encode_report(report) + encode_update(layout, report.update, *named)
    assert service.stored(published.id) == {"device-3": expected}


@pytest.mark.parametrize("has_both", [False, True])
def test_a_secure_sum_takes_the_trainers_key_or_the_operators_word(service, tmp_path, has_both):
    key = tmp_path / "trainer.pub"
    key.write_text(service.trainer.public.encode())
    pins = ("--trainer-key", key, "--trust-service") if has_both else ()
    sums = ("--aggregators", "http://127.0.0.1:8#a,http://127.0.0.1:9#b")
    done = run("http://127.0.0.1:7", "--task", "so_tag", *sums, *pins)
    assert done.exit_code == 2
    assert "--aggregators goes with --trainer-key FILE" in " ".join(done.output.split())
    alone = run("http://127.0.0.1:7", "--task", "so_tag", "--trust-service")
    assert "--trust-service goes with --aggregators" in " ".join(alone.output.split())


def test_slices_of_a_table_go_to_a_file(service, tmp_path):
    state = service.publish(LAYOUTS["rows"])
    out = tmp_path / "rows.npz"
    done = run(service.url, "--table", "row", "--slices", "3,1", "--out", out)
    assert done.exit_code == 0, done.output
    with np.load(out) as found:
        np.testing.assert_array_equal(found["w"], state.model()["w"][[3, 1]])


@pytest.mark.parametrize("name", ["file", "allow_pickle", "arr_0", "a/b"])
def test_a_parameter_may_have_any_name(service, tmp_path, name):
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    records = Records("row", 3, (RecordField(name, (2,), table.dtype),))
    source = FunctionSource(records, table, lambda x, z: {name: x[z]})
    service.publisher.publish([source], layout=None, number=service.next_number(), step=0)
    out = tmp_path / "rows.npz"
    done = run(service.url, "--table", "row", "--slices", "2,0", "--out", out)
    assert done.exit_code == 0, done.output
    with np.load(out) as found:
        np.testing.assert_array_equal(found[name], table[[2, 0]])


def test_a_file_that_cannot_be_written_is_told(service, tmp_path):
    service.publish(LAYOUTS["rows"])
    out = tmp_path / "missing" / "rows.npz"
    with pytest.raises(StorageError, match=r"cannot write rows.npz: got No such file"):
        run(service.url, "--table", "row", "--slices", "3,1", "--out", out)


@pytest.mark.parametrize("url", ["https://a..b", f"https://{'a' * 64}.org"])
def test_a_url_that_cannot_be_one_is_told(url):
    with pytest.raises(InputError, match="not the URL"):
        run(url, "--table", "row", "--slices", "1", "--out", "x.npz")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--task", "so_tag", "--table", "row"),
        ("--table", "row"),
        ("--table", "row", "--slices", "x", "--out", "o.npz"),
        ("--task", "so_tag", "--cert", "c.pem"),
        ("--task", "so_tag", "--client", "-1"),
    ],
)
def test_options_that_do_not_fit_are_refused(service, args):
    assert run(service.url, *args).exit_code == 2


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff", b"x" * 5000])
def test_a_file_without_a_token_is_refused(service, tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="no token"):
        run(service.url, "--task", "so_tag", "--token-file", path)


def test_a_service_that_fails_is_told_before_it_is_asked_again(tmp_path):
    with scripted(answer(503), refusal(404, "NotFoundError")) as script:
        args = ["--table", "row", "--slices", "1", "--out", str(tmp_path / "x.npz")]
        done = CliRunner().invoke(device, [f"http://127.0.0.1:{script.port}", *args])
    assert isinstance(done.exception, NotFoundError)
    assert done.stderr == "service: status 503, trying again\n"


@pytest.mark.parametrize(
    ("way", "names"),
    [
        ({"delivery": "pir", "second": "http://127.0.0.1:9"}, ["second server"]),
        ({"delivery": "relay", "relay": "http://127.0.0.1:9"}, ["relay"]),
        ({"delivery": "pregenerated"}, []),
    ],
)
def test_whoever_else_is_asked_has_a_name_in_what_is_told(way, names):
    keys = ("second", "relay", "second_token_file", "relay_token_file", "gateway_config")
    keys += ("anonymous", "max_bytes")
    connected = []

    def connect(name, url, token_file):
        connected.append(name)
        return Device(url, token=token_file)

    fetch_of({**dict.fromkeys(keys), **way}, connect)
    assert connected == names


def ways_of(**options):
    """The deliveries that a device with these options allows, and the one of rounds without any."""
    names = "second", "relay", "second_token_file", "relay_token_file", "gateway_config"
    blank = dict.fromkeys((*names, "anonymous", "delivery", "max_bytes"))
    found = fetch_of({**blank, **options}, lambda name, url, token_file: Device(url))
    return set(found.by_name), found.usual


def test_a_device_without_a_name_fetches_in_no_way_that_shows_it():
    """A round that says a plainer way is refused, and so is one of a service that says none."""
    assert {"pregenerated", "broadcast", "pir-one-server"} <= ways_of()[0]
    assert ways_of(anonymous=True) == ({"pir-one-server"}, "pir-one-server")
    assert ways_of(anonymous=True, second="http://127.0.0.1:9") == ({"pir"}, "pir")
    for options in ({"relay": "http://127.0.0.1:9"}, {"delivery": "pregenerated"}):
        with pytest.raises(UsageError, match="--anonymous"):
            ways_of(anonymous=True, **options)


def test_a_device_says_once_that_it_waits_and_why_it_missed_a_round(capsys):
    wait = answer(200, b'{"wait": 4.26}')
    now = answer(200, OPEN)
    late = refusal(410, "TooLateError", "the round is over")
    options = {"task": "so_tag", "data": None, "client": 0, "rounds": None}
    options |= {"trust": (), "seed": None, "states": None}
    with (
        scripted(wait, now, wait, late, late, wait, refusal(401, "AccessError")) as script,
        Device(f"http://127.0.0.1:{script.port}", clock=Clock(sleep=lambda _: None)) as made,
        pytest.raises(AccessError),
    ):
        _take_part(made, Device.fetch, options, Notices(), Device.send)
    first, second = capsys.readouterr().err.splitlines()
    why = "this device is not in the cohort of round 7, or sent its update before this start"
    assert first == f"{why}, asking again in 4.3 s"
    assert second.startswith("missed a round: the round is over: got 1")


def test_what_is_told_is_news_again_after_a_round(capsys):
    notices = Notices()
    for _ in range(2):
        for seconds in range(3):
            notices.tell(f"in {seconds} s", kind="wait")
        notices.forget()
    assert capsys.readouterr().err == "in 0 s\n" * 2


def test_what_is_shown_of_a_round_does_not_tell_which_rows_were_missing_or_wrong():
    taken = Taken(f"0-{DIGEST}", 0, 10, 0, 1, 1, 0)
    assert "10 keys" in _line_of(taken)
    assert _line_of(replace(taken, measures=True)).startswith("round 0 measures the model: 10 keys")
    assert _line_of(replace(taken, keys=8, missing=2, wrong=2)) == _line_of(taken)


def test_the_token_of_another_client_is_refused_before_the_service_is_asked(token_file):
    args = ("--task", "so_tag", "--token-file", token_file, "--client", 4)
    with scripted() as script, pytest.raises(InputError) as refused:
        run(f"http://127.0.0.1:{script.port}", *args)
    assert "for device-3; expected a token for device-4; pass the --client" in str(refused.value)


def test_a_token_for_another_kind_of_service_is_refused_before_one_is_asked(service, token_file):
    urls = ",".join(f"http://127.0.0.1:9#{digit * 64}" for digit in "ab")
    args = ("--task", "so_tag", "--token-file", token_file, "--client", 3, "--trust-service")
    with pytest.raises(InputError, match="for slices; expected a token for aggregator"):
        run(service.url, *args, "--aggregators", urls, "--aggregator-tokens", f"{token_file},x")


def test_another_task_than_the_run_s_is_one_error(service, token_file, few_writers):
    settings = {"nonce": "0" * 32, "keys_per_client": {"row": 1}}
    spec = spec_of("emnist_2nn").for_devices()
    service.publish(LAYOUTS["rows"], settings={**settings, "spec": spec})
    args = ("--task", "emnist_cnn", "--token-file", token_file, "--client", 3, "--rounds", 1)
    with pytest.raises(InputError, match="runs another task: got --task emnist_cnn; expected emni"):
        run(service.url, *args)


@pytest.mark.parametrize("spec", [None, {"version": 1}, {"version": 6, "task": "so_tag"}])
def test_a_round_that_does_not_say_how_to_train_is_refused(service, token_file, spec):
    settings = {"nonce": "0" * 32, "keys_per_client": {"row": 1}, "spec": spec}
    service.publish(LAYOUTS["rows"], settings=settings)
    args = ("--task", "so_tag", "--token-file", token_file, "--client", 3, "--rounds", 1)
    with pytest.raises(InputError, match="the record of a run that the round carries"):
        run(service.url, *args)


@pytest.mark.parametrize("flag", ["--client-lr", "--batch-size", "--m", "--keys", "--size"])
def test_a_device_cannot_be_told_another_way_to_train(flag):
    assert flag not in {name for param in device.params for name in param.opts}


def test_a_round_without_a_plan_cannot_be_taken_part_in_as_a_client(service, token_file):
    service.publish(LAYOUTS["rows"])
    task = ("--task", "so_tag", "--client", 3)
    args = (service.url, *task, "--token-file", token_file, "--rounds", 1)
    with pytest.raises(InputError, match="run of a population"):
        run(*args)
    with pytest.raises(AccessError):
        run(service.url, "--task", "so_tag", "--client", 3, "--rounds", 1)
