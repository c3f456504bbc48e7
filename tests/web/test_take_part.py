"""The device in JavaScript takes part in rounds of the services that there are."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

import keyhole as kh
from keyhole.delivery import delivery_named
from keyhole.device.take_part import PopulationClient, Taken, take_part
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_for_device
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.rounds.spec import DeviceSpec
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Keyring
from keyhole.service.transport import Listen, serving
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import Ask, decode_update, encode_query, split_report
from keyhole.wire.settings import bound_of
from tests.device.test_wrong_clocks import DAY, Shifted
from tests.helpers import LONG, ROOT
from tests.service.pir.pair import pair
from tests.service.recorder import Recorder
from tests.service.service_process import service as served
from tests.service.small_service import Service, random_model
from tests.web.node import needs_node
from tests.web.posts import dataset_of

pytestmark = needs_node

WORDS, TAGS, COUNT = 300, 6, 5
CLIENT = {
    "algorithm": "FedAvg",
    "batch_size": 4,
    "clip_norm": None,
    "epochs": 1,
    "lr": 0.5,
    "max_examples": None,
    "min_examples": 1,
    "momentum": 0.0,
    "negatives": 0.0,
    "proximal": 0.01,
}
SPEC = {
    "version": 6,
    "task": "so_tag",
    "sizes": {"words": WORDS, "tags": TAGS},
    "client": CLIENT,
    "keys": {"word": {"choice": "top", "count": COUNT, "shared": False}},
}
SETTINGS = {"nonce": "0" * 32, "keys_per_client": {"word": COUNT}, "spec": SPEC}
LAYOUT = Layout.of(
    {"kernel": np.zeros((WORDS, TAGS), np.float32), "bias": np.zeros(TAGS, np.float32)},
    Cut(KeySpace("word", WORDS), {"kernel": 0}),
)
POSTS = [
    {"words": [3, 9, 9, 250], "tags": [1]},
    {"words": [3, 9, 17], "tags": [0, 5]},
    {"words": [3, 40, 41, 42, 1000], "tags": [99]},
]
CHOSEN = [3, 9, 17, 40, 41]  # by number of posts, ties to the smaller one


def node_device(**told):
    """A device in Node; returns what it printed, line by line."""
    command = ["node", str(ROOT / "tests" / "web" / "take_part.mjs")]
    told = {"posts": POSTS, "rounds": 1, **told}
    done = subprocess.run(
        [*command, json.dumps(told)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert not done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def published(directory, wrap=Recorder, **settings):
    """Two services of one round of the tag model."""
    with pair(directory, wrap=wrap) as found:
        state = ServerState.dense(LAYOUT, random_model(LAYOUT), SGD(lr=1.0))
        found.published = found.service.publish_state(
            state, settings={**SETTINGS, **settings}
        ).published
        yield found


def sent(found, name="phone"):
    """The update that arrived of a device, and its keys."""
    body = found.service.stored(found.published.id)[name]
    report, rest = split_report(body, bound_of(SETTINGS))
    return report, *decode_update(rest, LAYOUT, COUNT, digest_of(found.published.id))


@pytest.mark.parametrize("way", ["pregenerated", "pir"])
def test_a_round_is_taken_part_in_by_either_way(tmp_path, way):
    """Both bring the same slices, so that the update is the same up to the order of examples."""
    with published(tmp_path, delivery=way) as found:
        private = {"second": found.urls[1], "secondToken": ""} if way == "pir" else {}
        pinned = found.service.trainer.public.raw.hex()
        token = found.service.token()
        (taken,) = node_device(url=found.urls[0], token=token, trainerKey=pinned, **private)
        assert (taken["number"], taken["words"], taken["missing"]) == (0, COUNT, 0)
        assert taken["isPrivate"] == delivery_named(way).about.is_private
        report, update, keys = sent(found)
        assert keys["word"].array.tolist() == CHOSEN
        assert report.metrics["loss"] == pytest.approx(taken["loss"])
        assert np.abs(update["kernel"]).sum(axis=1).all()
        bias = encode_query([Ask(0, np.array([0]))])
        named = [body for one in found.recorders for body in one.bodies("/slices")]
        assert (named == [bias]) == (way == "pir")  # no key is named in private
    # One step of the three posts: the gradient that the page of the wire describes.
    start = random_model(LAYOUT)
    expected = np.zeros(TAGS)
    for post in POSTS:
        words = [word for word in set(post["words"]) if word in CHOSEN]
        scores = start["bias"] + start["kernel"][words].sum(axis=0)
        expected += 1 / (1 + np.exp(-scores)) - np.isin(np.arange(TAGS), post["tags"])
    np.testing.assert_allclose(update["bias"], 0.5 * expected / 3, rtol=1e-4, atol=1e-6)


def test_its_update_is_that_of_the_device_in_python(tmp_path):
    """Both take part in a round with the same posts; each step has all, in whatever order."""
    spec = {**SPEC, "client": {**CLIENT, "epochs": 3}}
    with published(tmp_path, spec=spec) as found:
        node_device(url=found.urls[0], token=found.service.token())
        clients = Experiment(
            spec_for_device(DeviceSpec.read(spec)), dataset_of(POSTS, WORDS, TAGS)
        ).clients
        participant = PopulationClient(0, lambda settings: clients).participant()
        with found.device("laptop") as device:
            assert isinstance(take_part(device, participant), Taken)
        phone, update, keys = sent(found, "phone")
        laptop, expected, named = sent(found, "laptop")
    assert sorted(named["word"].array) == sorted(keys["word"].array)
    order = [named["word"].array.tolist().index(key) for key in keys["word"].array]
    np.testing.assert_allclose(update["bias"], expected["bias"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(update["kernel"], expected["kernel"][order], rtol=1e-5, atol=1e-7)
    assert phone.metrics["loss"] == pytest.approx(laptop.metrics["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"delivery": "pir"}, "does not allow: got pir"),
        ({"sum_terms": "AA=="}, "in shares of two aggregators"),
        ({"popular": {"word": ["10", 0.5]}}, "popular keys apart"),
        ({"spec": {**SPEC, "task": "films"}}, "trains in a way that this device does not know"),
        ({"spec": {**SPEC, "version": 7}}, "got a spec of version 7"),
        (
            {"spec": {**SPEC, "task": {"name": "films:TASK", "identity": "TASK 12ab"}}},
            "got the task films:TASK, code with the identity TASK 12ab; expected the task so_tag",
        ),
    ],
)
def test_a_round_that_it_cannot_or_must_not_take_part_in_is_refused(tmp_path, settings, reason):
    with published(tmp_path, **settings) as found:
        (told,) = node_device(url=found.urls[0], token=found.service.token())
        assert told["kind"] == "ViolationError"
        assert reason in told["error"]
        assert not found.service.stored(found.published.id)
        assert not found.recorders[0].bodies("/slices")


def test_a_round_of_another_trainer_is_refused(tmp_path):
    with published(tmp_path) as found:
        (told,) = node_device(url=found.urls[0], token=found.service.token(), trainerKey="11" * 32)
    assert "not signed by the trainer" in told["error"]


def test_servers_in_the_wrong_order_are_told(tmp_path):
    """Both halves of a query at one server would show it all keys."""
    with published(tmp_path, delivery="pir") as found:
        token = found.service.token()
        (told,) = node_device(url=found.urls[0], token=token, second=found.urls[0], secondToken="")
        assert "got server 0; expected server 1" in told["error"]
        assert not any(found.recorders[0].bodies("/pir/two-server"))


@contextmanager
def one_service(directory, **options):
    """A service with a round of the tag model, and what publishes the next one."""
    service = Service(directory, **options)
    state = ServerState.dense(LAYOUT, random_model(LAYOUT), SGD(lr=1.0))
    with service.publisher:
        service.publish_state(state, settings=SETTINGS)
        yield service, lambda: service.publish_state(state, settings=SETTINGS)
    service.rounds.close()


@pytest.mark.slow
def test_a_service_that_was_away_is_asked_again(tmp_path):
    with one_service(tmp_path) as (service, publish):
        with serving(service.app) as url:
            told = {"url": url, "token": service.token(), "posts": POSTS, "rounds": 2}
            command = ["node", str(ROOT / "tests" / "web" / "take_part.mjs"), json.dumps(told)]
            device = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert json.loads(device.stdout.readline())["number"] == 0
        assert "got no answer (5 attempts)" in json.loads(device.stdout.readline())["missed"]
        publish()
        with serving(service.app, Listen(port=int(url.rpartition(":")[2]))):
            *_, last = device.communicate(timeout=LONG)[0].splitlines()
    assert json.loads(last)["number"] == 1
    assert device.returncode == 0


def test_a_service_with_a_wrong_clock_is_asked_again_while_the_token_is_good(tmp_path):
    clock = Shifted(40 * DAY, looks=2)
    with one_service(tmp_path, clock=clock) as (service, _), serving(service.app) as url:
        first, *_, last = node_device(url=url, token=service.token())
        assert "the token is expired, or not yet good" in first["missed"]
        assert last["number"] == 0
        issue = service.keyring.issue
        expired = issue("device", "phone", now=time.time() - 40 * DAY, seconds=DAY)
        (told,) = node_device(url=url, token=expired)
        assert told["kind"] == "UntimelyError"


@pytest.mark.slow
def test_a_trainer_gets_the_updates_of_devices_in_node(tmp_path):
    """Two operators' `keyhole serve` and a trainer, as processes; the keys travel in private."""
    rounds, key = tmp_path / "rounds", tmp_path / "operator.key"
    rounds.mkdir()
    keyhole = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]
    subprocess.run([*keyhole, "token", "new-key", str(key)], check=True, capture_output=True)
    tokens = Keyring.load(key)
    first = served(rounds, "--token-key", key, "--pir", "0", "--again", "0.3")
    with first as one, served(rounds, "--pir", "1", "--open-queries") as other:
        asked = ["--m", "40", "--size", "words=500", "--size", "tags=10", "--delivery", "pir"]
        asked += ["--rounds", "2", "--cohort", "2", "--sampling", "check-in", "--force"]
        trainer = subprocess.Popen(
            [*keyhole, "train", "so_tag", *asked, "--devices", rounds, "--out", tmp_path / "run"],
            stderr=subprocess.PIPE,
            text=True,
        )
        rng = np.random.default_rng(0)
        told = [
            {
                "url": one.url,
                "second": other.url,
                "secondToken": "",
                "token": tokens.issue("device", f"tab-{n}", now=time.time(), seconds=600),
                "rounds": 2,
                "posts": [
                    {"words": rng.zipf(1.3, 30).clip(1, 499).tolist(), "tags": [int(n)]}
                    for _ in range(20)
                ],
            }
            for n in range(2)
        ]
        command = ["node", str(ROOT / "tests" / "web" / "take_part.mjs")]
        devices = [
            subprocess.Popen([*command, json.dumps(each)], stdout=subprocess.PIPE, text=True)
            for each in told
        ]
        printed = [each.communicate(timeout=LONG)[0] for each in devices]
        errors = trainer.communicate(timeout=LONG)[1]
    assert trainer.returncode == 0, errors
    taken = [[json.loads(line) for line in text.splitlines()] for text in printed]
    assert [[each["number"] for each in lines] for lines in taken] == [[0, 1]] * 2
    assert all(each["isPrivate"] and not each["missing"] for lines in taken for each in lines)
    (folder,) = (tmp_path / "run").iterdir()
    records = kh.open_run(folder).records()
    assert [len(record.staleness) for record in records] == [2, 2]
