"""Run config, node config and projects: what is asked is what is read, and mistakes are told."""

import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from math import inf

import pytest
from click.testing import CliRunner
from flwr.app import Message

from benchmarks.engine_cells.local_deployment import QUIET, Children, environment
from keyhole.cli.flower import flower
from keyhole.device.device import Device
from keyhole.device.sums import _Line
from keyhole.engines.flower.client_app import _shares, make_client_app
from keyhole.engines.flower.config import (
    NodeConfig,
    RoundsConfig,
    read_spec,
    spec_config,
    write_project,
)
from keyhole.engines.flower.messages import TRAIN, RoundCall, assign, write
from keyhole.errors import InputError, NotAdmittedError, ServiceError
from keyhole.experiments.specs import name_of, spec_of
from keyhole.rounds.fields import flatten
from tests.engines.flower.in_process_grid import InProcessGrid
from tests.helpers import DIGEST, LONG

MIN = {"run": "/r", "rounds-directory": "/d", "service": "http://127.0.0.1:1"}
APP = ["app", "x", "--task", "so_tag", "--service", "http://127.0.0.1:1", "--run", "r"]
APP += ["--rounds-directory", "d"]
KEY = "ab" * 32
PAIR = f"http://127.0.0.1:2#{KEY},http://127.0.0.1:3#{KEY}"
SECURE = [*APP, "--aggregators", PAIR]
SECURE += ["--aggregator-tokens", "a,b"]
CALL = RoundCall(f"3-{DIGEST}", 3, 60.0, "http://127.0.0.1:1", (7,))


def test_what_a_run_config_leaves_out_is_as_documented():
    config = RoundsConfig.of(MIN)
    assert (config.round_seconds, config.min_nodes, config.token_key) == (300.0, 1, None)


@pytest.mark.parametrize(
    "change",
    [
        {"service": ""},
        {"run": 3},
        {"round-seconds": 0},
        {"round-seconds": "60"},
        {"min-nodes": 0},
        {"min-nodes": 1.5},
        {"node-seconds": True},
        {"delivery": "mail"},
        {"delivery": "pir"},
        {"second": "http://127.0.0.1:2"},
        {"aggregators": "http://127.0.0.1:2"},
        {"aggregators": "http://127.0.0.1:2 http://127.0.0.1:3"},
    ],
    ids=str,
)
def test_a_run_config_that_cannot_be_used_is_refused(change):
    with pytest.raises(InputError, match="run config has no"):
        RoundsConfig.of({**MIN, **change})


@pytest.mark.parametrize(
    "config", [{"client": "7"}, {"client": -1}, {"client": True}, {"insecure": 1}, {"ca": 3}]
)
def test_a_node_config_that_cannot_be_used_is_refused(config):
    with pytest.raises(InputError, match="node-config"):
        NodeConfig.of(config)


@pytest.mark.parametrize(
    ("config", "is_taken"),
    [
        ({}, True),
        ({"client": 7, "partition-id": 3}, True),
        ({"client": 8}, False),
        ({"delivery": "pir"}, False),
        ({"second": "https://b.example.org"}, False),
        ({"aggregators": "https://b.example.org https://c.example.org"}, False),
    ],
)
def test_a_node_takes_no_call_that_its_operator_does_not_allow(config, is_taken):
    node = NodeConfig.of(config)
    if is_taken:
        node.check(CALL)
    else:
        with pytest.raises(NotAdmittedError):
            node.check(CALL)


def test_a_node_shows_the_aggregators_own_tokens_and_not_those_of_the_call(tmp_path):
    for party in (0, 1):
        (tmp_path / f"at-{party}").touch(0o600)
        (tmp_path / f"at-{party}").write_text(f"own-{party}")
    config = {"aggregator-tokens": f"{tmp_path}/at-0 {tmp_path}/at-1", "ledger": f"{tmp_path}/l"}
    both = tuple(f"http://127.0.0.1:{port}#{'ab' * 32}" for port in (2, 3))
    call, shown = replace(CALL, aggregators=both, sum_tokens_0=("a",), sum_tokens_1=("b",)), []

    def connect(url, token):
        shown.append(token)
        return Device(url, token=token)

    send = _shares(call, 7, connect, NodeConfig.of(config))
    assert shown == ["own-0", "own-1"]
    lines = [_Line(0, send.first, call.round, "a"), _Line(1, send.second, call.round, "b")]
    assert [line.token for line in lines] == shown


def test_a_refusal_of_a_node_is_a_flower_error_with_one_sentence():
    grid = InProcessGrid({5: (make_client_app(lambda client, context: None), {"client": 8}, {})})
    names = grid.push_messages([Message(write(CALL), 5, TRAIN, ttl=10.0)])
    grid.close()
    (reply,) = grid.pull_messages(names)
    assert reply.error.reason.startswith("NotAdmittedError: this node does not take part")
    assert "\n" not in reply.error.reason


def test_every_client_has_one_node_and_loads_are_even():
    stands = {1: None, 2: None, 3: 0, 4: None}
    found = assign(range(10), stands, silent={4})
    assert sorted(c for clients in found.values() for c in clients) == list(range(10))
    assert found[3] == [0]
    assert {node: len(clients) for node, clients in found.items()} == {3: 1, 1: 5, 2: 4}
    assert assign([5], {4: None}, silent={4}) == {4: [5]}
    assert assign([5], {3: 0}) == {}


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("emnist_2nn", {"sizes.neurons": 16, "keys.neuron.count": None}),
        spec_of("so_tag", {"client.lr": 1e-5, "client.max_examples": None}),
        spec_of("so_word", {"client.negatives": 0.5, "cohort.sampling": "cyclic"}),
        spec_of(
            "so_tag",
            aggregation={"name": "secure-sparse", "value_clip": 2.5, "ring_bits": 16},
            privacy={"noise": 0.5, "clip": 1.0, "budget": 8.0},
        ),
        spec_of("so_tag", privacy={"noise": 0.0, "clip": inf}),
    ],
    ids=name_of,
)
def test_a_run_comes_back_from_the_run_config_of_a_project(tmp_path, spec):
    write_project(tmp_path, spec_config(spec))
    told = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert read_spec(flatten(told)) == spec


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"spec.client.steps": 3}, "unknown field `steps` - at `client`"),
        ({"spec.privacy.epsilon": 3}, "- at `privacy`"),
        ({"spec.client.lr": "high"}, "Expected `float`, got `str` - at `client.lr`"),
        ({"spec.seed": 9}, "goes to every node: got spec.seed"),
        ({"spec.version": 1}, "another version: got version 1"),
        ({"spec.version": 0}, "another version: got version unknown"),
    ],
)
def test_fields_that_no_run_has_are_refused(told, said):
    with pytest.raises(InputError) as refused:
        read_spec({"spec.version": 6, "spec.task": "so_tag", **told})
    assert said in str(refused.value)


def test_a_project_is_not_written_over(tmp_path):
    write_project(tmp_path, {"task": "so_tag"})
    with pytest.raises(InputError, match="holds a project"):
        write_project(tmp_path, {})


def test_the_command_writes_a_project_without_the_address_of_a_package_index(tmp_path):
    options = ["--task", "so_tag", "--service", "https://s.example.org", "--run", "r"]
    args = ["app", str(tmp_path / "p"), *options, "--rounds-directory", "d", "--rounds", "5"]
    done = CliRunner().invoke(flower, args)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "p" / "pyproject.toml").read_text()
    assert "index" not in text
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    assert (config["spec"]["rounds"], config["spec"]["cohort"]["over_selection"]) == (5, 1.3)


@pytest.mark.parametrize(
    "args",
    [
        ["app"],
        ["app", "x", "--task", "so_tag"],
        [*APP, "--min-nodes", "0"],
        [*APP, "--over-selection", "0.5"],
        [*APP, "--round-seconds", "0"],
        [*APP, "--dp-noise", "1", "--dp-clip", "1"],
        [*APP, "--ring-bits", "16"],
        [*SECURE, "--dp-noise", "1"],
        [*SECURE, "--value-clip", "1", "--dp-noise", "1", "--dp-clip", "1"],
        [*APP, "--aggregators", "http://127.0.0.1:1"],
        [*APP, "--aggregator-tokens", "a,b"],
        [*APP, "--aggregation", "secure-sparse"],
        [*APP, "--trim", "0.1"],
        [*APP, "--popular", "word=100"],
        [*APP, "--delivery", "pir", "--popular-share", "0.5"],
        [*SECURE, "--aggregation", "median"],
        [*SECURE, "--max-update-norm", "1", "--above-norm", "clip"],
    ],
    ids=" ".join,
)
def test_bad_flags_are_one_error(args):
    done = CliRunner().invoke(flower, args)
    assert done.exit_code == 2
    assert done.output.count("Error:") == 1


def test_the_command_names_a_robust_sum_and_the_bound_in_the_project(tmp_path):
    args = ["--aggregation", "trimmed-mean", "--trim", "0.3", "--norm-alarm", "4"]
    args += ["--max-update-norm", "2.5", "--above-norm", "clip"]
    done = CliRunner().invoke(flower, ["app", str(tmp_path / "p"), *APP[2:], *args])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "p" / "pyproject.toml").read_text()
    told = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]["spec"]["aggregation"]
    assert (told["name"], told["trim"], told["norm_alarm"]) == ("trimmed-mean", 0.3, 4.0)
    assert (told["max_update_norm"], told["above_norm"]) == (2.5, "clip")


def test_the_command_names_the_services_of_a_secure_round_in_the_project(tmp_path):
    urls = PAIR
    args = ["--delivery", "pir", "--second", "http://127.0.0.1:4", "--aggregators", urls]
    args += ["--aggregator-tokens", "a,b", "--dp-noise", "0.5", "--dp-clip", "1"]
    done = CliRunner().invoke(flower, ["app", str(tmp_path / "p"), *APP[2:], *args])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "p" / "pyproject.toml").read_text()
    told = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    config = RoundsConfig.of(told)
    assert (config.delivery, config.second) == ("pir", "http://127.0.0.1:4")
    assert config.aggregators == tuple(urls.split(","))
    assert [path.name for path in config.aggregator_tokens] == ["a", "b"]
    assert told["spec"]["aggregation"]["name"] == "secure-sparse"
    assert told["spec"]["privacy"]["noise"] == 0.5


def test_the_command_names_popular_keys_and_what_asks_for_them_in_the_project(tmp_path):
    args = ["--delivery", "pir-one-server", "--popular", "word=100", "--popular-share", "0.8"]
    done = CliRunner().invoke(flower, ["app", str(tmp_path / "p"), *APP[2:], *args])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "p" / "pyproject.toml").read_text()
    told = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]["spec"]
    assert told["popular"] == {"keys": {"word": "100"}, "share": 0.8}
    assert told["delivery"] == "pir-one-server"


@pytest.mark.parametrize(
    "args",
    [
        ["--delivery", "pir"],
        ["--aggregators", PAIR],
        ["--aggregators", "http://127.0.0.1:2,http://127.0.0.1:3", "--aggregator-tokens", "a,b"],
    ],
)
def test_services_that_are_missing_are_told_before_a_project_is_written(tmp_path, args):
    done = CliRunner().invoke(flower, ["app", str(tmp_path / "p"), *APP[2:], *args])
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "p").exists()


def test_an_unknown_task_is_refused_before_a_project_is_written(tmp_path):
    args = ["nonsense" if word == "so_tag" else word for word in APP[2:]]
    done = CliRunner().invoke(flower, ["app", str(tmp_path / "p"), *args])
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "p").exists()


def _run(code, env=None):
    """What a fresh Python prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, timeout=LONG, check=False, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_help_does_not_wait_for_flower():
    loaded = _run(
        "import sys; from keyhole.cli.main import keyhole\n"
        "keyhole.main(['flower', 'app', '--help'], standalone_mode=False)\n"
        "print(*sys.modules)"
    )
    assert not {"flwr", "jax"} & set(loaded)


def test_a_node_starts_without_what_its_round_does_not_need():
    """Flower starts a process for every message: what it imports is paid in every round."""
    loaded = _run(
        "import sys, keyhole.engines.flower.client_app, keyhole.device.take_part\n"
        "print(*sys.modules)"
    )
    assert not {"numba", "jax", "keyhole.aggregation", "keyhole.experiments"} & set(loaded)


# Tells what would have been sent; nothing is.
_OUTWARD = """
import urllib.request, requests, threading
from flwr.supercore import telemetry, update_check
def seen(what, *args, **kwargs):
    print(what, flush=True)
    raise OSError
urllib.request.urlopen = lambda *a, **k: seen("telemetry")
requests.post = lambda *a, **k: seen("update-check")
try: telemetry.create_event(telemetry.EventType.PING, None)
except OSError: pass
threading.excepthook = lambda args: None
update_check.warn_if_flwr_update_available("flwr")
"""


def test_what_we_start_has_no_usage_statistics_and_asks_for_no_newer_version(tmp_path):
    env = environment(tmp_path)
    assert _run(_OUTWARD, env) == []
    aloud = {name: value for name, value in env.items() if name not in QUIET}
    assert sorted(_run(_OUTWARD, aloud)) == ["telemetry", "update-check"]


def test_children_are_quiet_and_end_with_the_block(tmp_path):
    env = environment(tmp_path)
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    with Children(tmp_path / "logs", env) as children:
        children.start("one", [sys.executable, "-c", "import time; time.sleep(1000)"])
        assert children.is_alive("one")
    assert not children.is_alive("one")


def test_what_children_start_in_sessions_of_their_own_ends_with_the_block(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "one = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "print(subprocess.Popen(one, start_new_session=True).pid, flush=True)\n"
        "time.sleep(1000)"
    )
    with Children(tmp_path / "logs", environment(tmp_path)) as children:
        children.start("one", [sys.executable, "-c", code])
        log = children.log_of("one")
        children.wait_for("one", lambda: log.read_text().endswith("\n"))
    assert _has_ended(log.read_text())


def _has_ended(pid):
    """Whether a process ends long before it would by itself; a busy kernel takes a while."""
    until = time.monotonic() + LONG
    while True:
        command = ["ps", "-o", "stat=", "-p", pid.strip()]
        state = subprocess.run(command, capture_output=True, check=False).stdout.strip()[:1]
        if state in (b"", b"Z") or time.monotonic() >= until:
            return state in (b"", b"Z")
        time.sleep(0.05)


def test_a_child_that_does_not_start_is_told_with_its_last_line(tmp_path):
    with Children(tmp_path / "logs", environment(tmp_path)) as children:
        children.start("one", [sys.executable, "-c", "raise SystemExit('no such port')"])
        with pytest.raises(ServiceError, match="one did not start: got no such port"):
            children.wait_for("one", lambda: False, LONG)


def test_children_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks.engine_cells.local_deployment import Children\n"
        f"children = Children(Path({str(tmp_path)!r}), os.environ).__enter__()\n"
        "children.start('one', [sys.executable, '-c', 'import time; print(1, flush=True); "
        "time.sleep(1000)'])\n"
        "children.wait_for('one', lambda: children.log_of('one').read_text() != '')\n"
        "print(children.pid_of('one'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=LONG, check=False
    )
    assert _has_ended(done.stdout.decode())
