"""`keyhole device --data MINE`: a device of any name trains a task on its own examples."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import keyhole as kh
import keyhole.device.take_part as take_part_module
from keyhole.cli.device import device
from keyhole.cli.own_data import OwnData
from keyhole.errors import InputError, KeyholeError
from keyhole.experiments import task_named
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from keyhole.identity import identity_of
from keyhole.wire.assignment import CheckIn
from tests.service.small_service import small_service

TASK = """
import keyhole as kh
import numpy as np
from keyhole.models.dense import masked_mean


def predict(params, batch):
    return params["score"][batch["item"]]


def loss(params, batch, mask):
    return masked_mean((predict(params, batch) - batch["label"]) ** 2, mask)


model = kh.Model(
    init=lambda seed: {"score": np.zeros(60, np.float32)},
    loss=loss,
    predict=predict,
    cuts=(kh.Cut(kh.KeySpace("item", 60), {"score": 0}),),
)
data = kh.data.at_devices(inputs={"item": "item"}, target="label")
TASK = kh.Task(model, data, name="shop")
"""
SETTINGS = {"nonce": "0" * 32, "keys_per_client": {"item": 5}, "delivery": "pregenerated"}


@pytest.fixture
def service(tmp_path):
    with small_service(tmp_path / "rounds") as made:
        yield made


@pytest.fixture
def shop(tmp_path, monkeypatch, environment, request):
    """A folder with the task, this device's examples and its token; the module has a name of its
    own, since Python keeps modules."""
    monkeypatch.setenv("KEYHOLE_CACHE", environment["KEYHOLE_CACHE"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"shop_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TASK)
    rows = [{"item": item, "label": float(item % 3)} for item in (7, 3, 7, 59)]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    yield f"{name}:TASK"
    sys.modules.pop(name, None)


def take_part(service, task, *more):
    Path("token").write_text(service.token("ward.north-3"))
    args = [service.url, "--token-file", "token", "--task", task, "--data", "mine.jsonl"]
    done = CliRunner().invoke(device, [*args, "--rounds", "1", *more])
    if isinstance(done.exception, KeyholeError):
        raise done.exception
    return done


def publish(service, task, trained=None, min_examples=1):
    """Publishes a round of the task as its trainer does, who has no example."""
    keys = {"item": {"choice": "top", "count": 5}}
    cohort = {"sampling": "check-in", "size": 1}
    client = {"min_examples": min_examples}
    spec = spec_of(task, keys=keys, cohort=cohort, client=client)
    data = kh.data.at_devices(inputs={"item": "item"}, target="label")
    experiment = Experiment(spec, data)
    told = experiment.spec.for_devices()
    told = told if trained is None else told | {"task": trained}
    state = experiment.start(0, None, _Rounds()).state
    return service.publish_state(state, settings={**SETTINGS, "spec": told}).published


class _Rounds:
    """Rounds that nobody makes."""

    def prepare(self, parts, directory):
        return parts


def test_it_sends_an_update_of_its_own_keys(service, shop):
    published = publish(service, shop)
    done = take_part(service, shop)
    assert done.exit_code == 0, done.output
    assert "round 0: 3 keys" in done.output  # items 7, 3 and 59
    assert list(service.stored(published.id)) == ["ward.north-3"]


def test_another_code_than_the_rounds_is_refused_with_both_identities(service, shop):
    trained = {"name": shop, "identity": "TaskKind 0123456789abcdef"}
    published = publish(service, shop, trained)
    with pytest.raises(InputError) as refused:
        take_part(service, shop)
    mine = identity_of(task_named(shop))
    assert trained["identity"] in str(refused.value)
    assert mine in str(refused.value)
    assert "which a device gets from its trainer" in str(refused.value)
    assert service.stored(published.id) == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), CheckIn()),
        (("--tell-examples", "--memory-mb", "700"), CheckIn(memory_mb=512, examples=4)),
    ],
)
def test_it_says_how_much_it_has_only_if_told_to(tmp_path, shop, flags, said, monkeypatch):
    noted = []

    def note(name, told, seconds):
        noted.append((name, told))

    def check_in(made, *_, **__):
        made.check_in()

    monkeypatch.setattr(take_part_module, "keep_taking_part", check_in)
    with small_service(tmp_path / "empty", note=note) as made:
        take_part(made, shop, *flags)
    assert noted == [("ward.north-3", said)]


def test_a_task_of_all_clients_takes_no_examples_of_one(shop):
    own = OwnData(
        {"task": "so_tag", "data": "mine.jsonl", "trust": (), "token_file": None, "hold_out": None}
    )
    with pytest.raises(InputError, match="pass --client N"):
        _ = own.examples


def test_examples_that_cannot_be_read_show_before_the_service_is_asked(shop):
    args = ["http://127.0.0.1:9", "--task", shop, "--data", "nowhere.csv"]
    refused = CliRunner().invoke(device, args).exception
    assert isinstance(refused, InputError)
    assert "no examples: got no file nowhere.csv" in str(refused)


def test_examples_or_a_client_must_be_named(service, shop):
    done = CliRunner().invoke(device, [service.url, "--task", shop])
    assert done.exit_code == 2
    assert "pass --data" in done.output


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("item,label\n60,1\n", "beyond key space 'item': got 60; expected 0..59"),
        ("item,label\n7,1\n3,nan\n", "target 'label' has no value in row 1"),
        (
            "item,label,price\n7,1,2\n3,1,nan\n",
            "'price' of mine.csv has no number in row 2, counted",
        ),
        ("item,label\n", "no examples of this device: got mine.csv with item, label and no rows"),
        ("item,label\n7,1\n", "lack a column that the task reads: got mine.csv with item, label; "),
    ],
)
def test_examples_that_cannot_be_trained_on_show_before_a_check_in(tmp_path, shop, rows, said):
    """A round that has drawn the device would wait for it to its end."""
    path = tmp_path / f"{shop.partition(':')[0]}.py"
    path.write_text(TASK.replace("masked_mean((", 'masked_mean(batch["price"] * ('))
    Path("mine.csv").write_text(rows)
    args = ["http://127.0.0.1:9", "--task", shop, "--data", "mine.csv"]
    refused = CliRunner().invoke(device, args).exception
    assert isinstance(refused, InputError)
    assert said in str(refused)


def test_the_only_example_of_a_device_is_trained_on_and_not_measured_with(shop, monkeypatch):
    Path("mine.csv").write_text("item,label\n7,1\n")
    options = {"task": shop, "data": "mine.csv", "trust": (), "token_file": None, "hold_out": 0.2}
    monkeypatch.setattr("keyhole.cli.own_data._started", lambda *_: spec_of(shop))
    clients = OwnData(options).clients(None)
    assert (clients.measure, clients.held, clients.data(0)["item"].tolist()) == (None, None, [7])
