"""A device is the wheel in an empty environment, with what the lock has for the base and no more.

Packages come, by hash, from where the machine's settings of pip say.
"""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
import lock
from build_wheel import build_wheel
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from tests.helpers import LONG, ROOT
from tests.service.pir.pair import pair
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import services
from tests.shell import run_as_typed

ABSENT = ["jax", "jaxlib", "numba", "llvmlite", "scipy", "matplotlib", "uvicorn", "rich"]
MAX_BYTES = 80e6
PYTHONS = ["3.11", "3.12", "3.13"]
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"

ROW = kh.KeySpace("row", 500)
MODEL = {
    "bias": np.full(3, 0.5, np.float32),
    "w": (np.arange(500 * 12).reshape(500, 12) % 1000 / 1024).astype(np.float32),
}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
KEYS = {0: [7, 499, 3, 41], 1: [41, 8, 100, 7]}


def find_python(series):
    """The program of a series of Python, None where there is none on this machine."""
    if series == OWN:
        return sys.executable
    found = shutil.which(f"python{series}")
    runs = found and subprocess.run([found, "-c", ""], capture_output=True, check=False)
    return found if runs and runs.returncode == 0 else None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"), epoch=1_700_000_000)


@pytest.fixture(scope="module", params=PYTHONS)
def thin(request, wheel, tmp_path_factory):
    """The directory of an environment that holds the wheel and what it needs."""
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"no Python {request.param} here")
    made = tmp_path_factory.mktemp("thin")
    subprocess.run([python, "-m", "venv", "--without-pip", made / "env"], check=True)
    listed = made / "base.txt"
    listed.write_text("".join(each.requirement() for each in lock.pick(ROOT, ["base"])))
    pip = [sys.executable, "-m", "pip", "--python", made / "env" / "bin" / "python", "install"]
    options = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, "--no-deps", "--require-hashes", "-r", listed], check=True)
    subprocess.run([*pip, *options, "--no-index", "--no-deps", wheel], check=True)
    return made / "env"


def run(thin, *command, told=None, check=True):
    """A program of the environment, away from the checkout and what tests import."""
    done = subprocess.run(
        [thin / "bin" / command[0], *map(str, command[1:])],
        cwd=thin,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        input=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG,
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


@pytest.mark.slow
def test_what_a_device_needs_takes_less_than_80_megabytes(thin):
    (site,) = thin.glob("lib/python*/site-packages")
    files = [path for path in site.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    of_numpy = sum(path.stat().st_size for path in files if "numpy" in str(path.relative_to(site)))
    print(f"{size / 1e6:.1f} MB, NumPy {of_numpy / 1e6:.1f} MB")
    assert size < MAX_BYTES
    code = (
        "from importlib.util import find_spec; from importlib.metadata import distributions\n"
        f"print([name for name in {ABSENT} if find_spec(name)])\n"
        "print(sorted(each.name.lower().replace('_', '-') for each in distributions()))"
    )
    absent, installed = run(thin, "python", "-c", code).stdout.splitlines()
    assert absent == "[]"
    allowed = {each.name for each in lock.pick(ROOT, ["base"])} | {"keyhole"}
    assert set(json.loads(installed.replace("'", '"'))) <= allowed


@pytest.mark.slow
def test_commands_of_a_device_run_and_others_name_the_extra_they_lack(thin):
    assert "device" in run(thin, "keyhole", "--help").stdout
    assert run(thin, "keyhole", "device", "--help").stdout
    run(thin, "keyhole", "token", "new-key", thin / "operator.key")
    issue = "token", "issue", "--key", thin / "operator.key", "--device", "device-7"
    assert run(thin, "keyhole", *issue).stdout.startswith("kh2.")
    wanting = {"train": "train", "demo": "train", "plan": "train", "serve": "serve"}
    for verb, extra in wanting.items():
        given = {"train": ["so_tag"], "serve": [thin, "--token-key", thin / "operator.key"]}.get(
            verb, []
        )
        done = run(thin, "keyhole", verb, *given, check=False)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"keyhole: keyhole {verb} needs more than is installed: got no ")
        assert line.endswith(f"pip install 'keyhole[{extra}]'")
    code = "import keyhole as kh; kh.KeySpace('word', 9); kh.train(None, rounds=1)"
    told = run(thin, "python", "-c", code, check=False).stderr
    assert "InputError: keyhole.train needs more than is installed: got no" in told


def told_of(client, both, sums, key_file):
    """What a device is told: where its services are, its tokens and keys."""
    name = device_name(client)
    lines = [] if sums is None else [(sums.urls[p], sums.device_token(p, name)) for p in (0, 1)]
    return json.dumps(
        {
            "url": both.urls[0],
            "token": both.service.token(name),
            "second": None if sums is None else both.urls[1],
            "aggregators": lines,
            "seals": [] if sums is None else [sums.public(party).hex() for party in (0, 1)],
            "trainer_key": str(key_file),
            "keys": KEYS[client],
            "adds": (client + 1) / 4,
        }
    )


def expected_model():
    """The step of the mean of both updates, from the definitions."""
    keys = ROW.place(KEYS)
    slices = kh.generalized_select(kh.at_server(MODEL), keys, LAYOUT.select)
    adds = kh.at_clients({client: np.float32((client + 1) / 4) for client in KEYS})
    updates = kh.map_clients(
        lambda sub, more: {name: leaf + more for name, leaf in sub.items()}, slices, adds
    )
    mean = kh.deselect_mean(updates, keys, LAYOUT.deselect).value
    return {name: MODEL[name] - mean[name] for name in MODEL}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["clear", "private"])
def test_devices_without_extras_take_part_in_a_round(way, thin, tmp_path):
    """Two of them, to the model that the definitions give: in the clear, and by private retrieval
    from two servers with shares for two aggregators."""
    with pair(tmp_path / "rounds") as both, aggregators(tmp_path / "sums") as pair_of_sums:
        sums = pair_of_sums if way == "private" else None
        stop = threading.Event()
        inbox = SpoolInbox(both.service.spool) if sums is None else services(sums, stop=stop)
        kind = Served(both.service.publisher, inbox, poll=0.01, stop=stop, named=True)
        plan = RunParts(
            cohorts=Cohorts(2, 2),
            keys_per_client={"row": 4},
            aggregate=PLAIN if sums is None else TwoServers(Rounding(), min_clients=2),
        )
        state = ServerState.dense(LAYOUT, MODEL, SGD(1.0))
        nobody = Clients(2, lambda client: client, lambda *_: None, lambda *_: None)
        training = start_run(state, nobody, plan, kind=kind)
        trainer = threading.Thread(target=lambda: list(training.rounds(1)))
        trainer.start()
        key_file = tmp_path / "trainer.pub"
        key_file.write_text(both.service.trainer.public.encode())
        program = Path(__file__).with_name("thin_device.py")
        try:
            ran = [
                run(thin, "python", program, told=told_of(client, both, sums, key_file))
                for client in KEYS
            ]
        except BaseException:
            stop.set()
            raise
        finally:
            trainer.join()
    for each in ran:
        met = json.loads(each.stdout)
        assert met["keys"] == 4
        assert met["loaded"] == []
    found = state.model()
    for name, leaf in expected_model().items():
        np.testing.assert_array_equal(found[name], leaf)


FILMS = """
import keyhole as kh
import numpy as np

film = kh.KeySpace("film", 500)
start = {"films": np.zeros((500, 4), np.float32)}


class Scores:
    layout = kh.Layout.of(start, kh.Cut(film, {"films": 0}))

    def init(self, seed):
        return start

    def predict(self, params, batch):
        return params["films"][batch["film"]].sum(axis=1)

    def trainer(self, settings, slots):
        def train(params, data, rng):
            error = 1 / (1 + np.exp(-self.predict(params, data))) - data["liked"]
            update = np.zeros_like(params["films"])
            np.add.at(update, data["film"], np.float32(settings.client_lr) * error[:, None])
            return {"films": update}

        return train


data = kh.data.at_devices(inputs={"film": "film"}, target="liked")
TASK = kh.Task(Scores(), data, name="films")
"""

# A service and a trainer with all extras, and two devices without any.
COMMANDS = """
mkdir rounds && keyhole token new-key operator.key
keyhole serve rounds --token-key operator.key --again 1 &
for name in ann ben; do keyhole token issue --key operator.key --device $name >$name.token; done
THIN device http://127.0.0.1:8100 --token-file ann.token --task films:TASK \
--data ann.csv --rounds 2 &
THIN device http://127.0.0.1:8100 --token-file ben.token --task films:TASK \
--data ben.csv --rounds 2 &
keyhole train films:TASK --devices rounds --sampling check-in --cohort 2 --rounds 2 --keys top \
--m 20 --client-lr 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("thin", [OWN], indirect=True)
def test_the_command_trains_a_task_that_needs_no_jax(thin, tmp_path):
    """On the trainer's Python: of another series, the same code has another digest."""
    (tmp_path / "films.py").write_text(FILMS)
    for seed, name in enumerate(("ann", "ben")):
        rng = np.random.default_rng(seed)
        rows = (f"{rng.integers(500)},{rng.integers(2)}" for _ in range(30))
        (tmp_path / f"{name}.csv").write_text("\n".join(["film,liked", *rows]))
    code, printed = run_as_typed(
        COMMANDS.replace("THIN", f"env -u PYTHONPATH {thin}/bin/keyhole"), tmp_path
    )
    assert code == 0, printed
    (folder,) = (tmp_path / "keyhole-runs").iterdir()
    assert [len(record.staleness) for record in kh.open_run(folder).records()] == [2, 2]
