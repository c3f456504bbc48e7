"""A node of Flower that pins the trainer's key takes part in that trainer's rounds alone."""

import time

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from keyhole import tree
from keyhole.device.take_part import Participant
from keyhole.engines.flower.client_app import make_client_app
from keyhole.engines.flower.config import NodeConfig, RoundsConfig
from keyhole.engines.flower.messages import TRAIN, NodeReport, RoundCall, read, write
from keyhole.engines.flower.server_app import _publisher
from keyhole.errors import InputError
from keyhole.wire.assignment import device_name
from keyhole.wire.settings import sum_settings
from keyhole.wire.signing import SigningKey
from tests.engines.flower.in_process_grid import InProcessGrid
from tests.service.small_service import LAYOUT, random_state, small_service

CLIENT, NODE = 7, 5
HABIT = Participant(
    choose=lambda known: {space.name: [0] for space in LAYOUT.spaces},
    train=lambda known, fetched: tree.map_leaves(np.zeros_like, fetched.model),
)


@pytest.fixture
def service(tmp_path):
    with small_service(tmp_path / "rounds") as made:
        yield made


@pytest.fixture
def pinned(service, tmp_path):
    path = tmp_path / "trainer.pub"
    path.write_text(service.trainer.public.encode())
    return str(path)


def report_of(service, round_id, config, **more):
    """What a node says of a round that it was called to."""
    told = {"now": time.time(), "seconds": 60.0, "round_id": round_id}
    token = service.keyring.issue("round", device_name(CLIENT), **told)
    call = RoundCall(round_id, 0, 60.0, service.url, (CLIENT,), (token,), **more)
    app = make_client_app(lambda client, context: HABIT)
    grid = InProcessGrid({NODE: (app, config, {})})
    names = grid.push_messages([Message(write(call), NODE, TRAIN, ttl=60.0)])
    grid.close()
    (reply,) = grid.pull_messages(names)
    return read(reply.content, NodeReport)


def test_a_node_takes_part_in_a_round_that_its_trainer_signed(service, pinned):
    round_id = service.publish(number=0).published.id
    assert report_of(service, round_id, {"trainer-key": pinned}).outcomes == ("sent",)
    assert list(service.stored(round_id)) == [device_name(CLIENT)]


@pytest.mark.parametrize("by", ["somebody else", "nobody"])
def test_a_node_takes_no_part_in_a_round_that_it_did_not(service, pinned, by):
    service.publisher._signing_key = SigningKey.fresh() if by == "somebody else" else None
    round_id = service.publish(number=0).published.id
    report = report_of(service, round_id, {"trainer-key": pinned})
    assert report.outcomes == ("failed",)
    assert report.reasons[0].startswith("the round is not the trainer's")
    assert service.stored(round_id) == {}
    without = report_of(service, round_id, {})  # the hole: a node that pins none
    assert without.outcomes == ("sent",)


def test_a_node_without_the_key_takes_no_part_in_a_secure_sum(service):
    round_id = service.publish(number=0, settings=sum_settings(b"terms")).published.id
    sums = {"aggregators": ("http://127.0.0.1:9#" + "ab" * 32,) * 2}
    (reason,) = report_of(service, round_id, {}, **sums).reasons
    assert reason.startswith("a secure sum whose round nobody vouches for")
    (later,) = report_of(service, round_id, {"trust-service": True}, **sums).reasons
    assert "nobody vouches" not in later  # it went on, to terms that are none
    assert NodeConfig.of({"trust-service": True}).trust_service
    with pytest.raises(InputError, match="unusable trust-service"):
        NodeConfig.of({"trust-service": "yes"})


def test_the_server_signs_its_rounds_with_the_key_of_the_run_config(tmp_path):
    key, path = SigningKey.fresh(), tmp_path / "sign.key"
    path.touch(0o600)
    path.write_text(key.encode())
    config = {"run": "r", "rounds-directory": str(tmp_path / "rounds"), "service": "http://a.b"}
    with _publisher(RoundsConfig.of({**config, "signing-key": str(path)})) as publisher:
        made = publisher.publish_state(random_state(LAYOUT), number=0, durable=False)
        signature = tmp_path / "rounds" / "rounds" / made.id / "manifest.sig"
        key.public.check(made.id, signature.read_bytes())
    with _publisher(RoundsConfig.of(config)) as publisher:
        made = publisher.publish_state(random_state(LAYOUT), number=1, durable=False)
        assert not (tmp_path / "rounds" / "rounds" / made.id / "manifest.sig").exists()
