"""Run config, node config and projects: what is asked is what is read, and mistakes are told."""

import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner
from flwr.app import Message

from keyhole.cli.flower import flower
from keyhole.engines.flower import RoundsConfig, make_client_app
from keyhole.engines.flower.messages import TRAIN, Call, write
from keyhole.engines.flower.node_config import NodeConfig
from keyhole.engines.flower.nodes import assign
from keyhole.engines.flower.processes import Children, environment
from keyhole.engines.flower.project import write_project
from keyhole.engines.flower.tasks import arm_config, read_arm
from keyhole.errors import InputError, NotAdmittedError, ServiceError
from keyhole.tasks.arms import arm_of
from tests.engines.flower.in_process_grid import InProcessGrid

LEAST = {"run": "/r", "rounds-directory": "/d", "service": "http://127.0.0.1:1"}
CALL = Call("3-0123456789abcdef", 3, 60.0, "http://127.0.0.1:1", (7,))


def test_what_a_run_config_leaves_out_is_as_documented():
    config = RoundsConfig.of(LEAST)
    assert (config.over_selection, config.least_nodes, config.token_key) == (1.3, 1, None)


@pytest.mark.parametrize(
    "change",
    [
        {"service": ""},
        {"run": 3},
        {"round-seconds": 0},
        {"round-seconds": "60"},
        {"over-selection": 0.9},
        {"least-nodes": 0},
        {"least-nodes": 1.5},
        {"least-updates": True},
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
        RoundsConfig.of({**LEAST, **change})


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
    "arm",
    [
        arm_of("emnist_2nn", sizes={"neurons": 16}, keys_per_client={"neuron": None}),
        arm_of(
            "so_tag", changes={"client_lr": 1e-5, "max_examples": None}, over="choosers", seed=9
        ),
        arm_of("so_word", negatives=0.5, shared_keys=True, sampling="cyclic"),
    ],
    ids=lambda arm: arm.name,
)
def test_an_arm_comes_back_from_the_run_config_of_a_project(tmp_path, arm):
    write_project(tmp_path, arm_config(arm))
    told = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    flat = {}
    for name, value in told.items():
        flat |= (
            {f"{name}.{k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    assert read_arm(flat) == arm


def test_settings_that_no_task_has_are_refused():
    with pytest.raises(InputError, match="got epochs"):
        read_arm({"task": "so_tag", "settings.epochs": 3})


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
    assert (config["settings"]["rounds"], config["over-selection"]) == (5, 1.3)


@pytest.mark.parametrize(
    "args",
    [
        ["local"],
        ["local", "so_tag", "--nodes", "0"],
        ["local", "so_tag", "--over-selection", "0.5"],
        ["local", "so_tag", "--round-seconds", "0"],
        ["local", "so_tag", "--delivery", "pir"],
        ["app", "x", "--task", "so_tag"],
    ],
    ids=" ".join,
)
def test_bad_flags_are_one_error(args):
    done = CliRunner().invoke(flower, args)
    assert done.exit_code == 2
    assert done.output.count("Error:") == 1


def test_an_unknown_task_is_refused_before_anything_starts(tmp_path):
    done = CliRunner().invoke(flower, ["local", "nonsense", "--out", str(tmp_path / "o")])
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "o").exists()


def _run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_help_does_not_wait_for_flower():
    code = (
        "import sys; from keyhole.cli.main import keyhole\n"
        "keyhole.main(['flower', 'local', '--help'], standalone_mode=False)\n"
        "sys.exit('flwr' in sys.modules or 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0


def test_children_are_quiet_and_end_with_the_block(tmp_path):
    env = environment(tmp_path)
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    with Children(tmp_path / "logs", env) as children:
        children.start("one", [sys.executable, "-c", "import time; time.sleep(60)"])
        assert children.is_alive("one")
    assert not children.is_alive("one")


def test_a_child_that_does_not_start_is_told_with_its_last_line(tmp_path):
    with Children(tmp_path / "logs", environment(tmp_path)) as children:
        children.start("one", [sys.executable, "-c", "raise SystemExit('no such port')"])
        with pytest.raises(ServiceError, match="one did not start: got no such port"):
            children.wait_for("one", lambda: False, 30.0)


def test_children_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from keyhole.engines.flower.processes import Children\n"
        f"children = Children(Path({str(tmp_path)!r}), os.environ).__enter__()\n"
        "children.start('one', [sys.executable, '-c', 'import time; print(1, flush=True); "
        "time.sleep(60)'])\n"
        "children.wait_for('one', lambda: children.log_of('one').read_text() != '')\n"
        "print(children.pid_of('one'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", done.stdout.decode()], capture_output=True, check=False
    )
    assert state.stdout.strip()[:1] in (b"", b"Z")
