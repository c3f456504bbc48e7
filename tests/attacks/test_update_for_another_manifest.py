"""An update in the clear is sent again into a round that it was not made for.

Who stands where TLS ends has recorded it and has a token of the device: in a later round of the
run, or in the round of the same number of another run, it would move a model that the device never
saw. The digest of the manifest in its head keeps it out.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from keyhole import tree
from keyhole.device.take_part import Participant, take_part
from keyhole.errors import StaleError
from keyhole.server.inputs import UNBOUND
from keyhole.service import app, inbox
from keyhole.service.inbox import SpoolInbox
from keyhole.service.transport import serving
from keyhole.wire.http import OCTETS
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import decode_update, encode_update
from tests.service.recorder import Recorder
from tests.service.small_service import LAYOUT, small_service

KEYS = {space.name: [0, 1] for space in LAYOUT.spaces}
WHOLE = Participant(
    choose=lambda known: KEYS,
    train=lambda known, fetched: tree.map_leaves(np.ones_like, fetched.model),
)


def recorded_update(service):
    """What a device sends in the newest round, as the one on the way sees it."""
    recorder = Recorder(service.app)
    with serving(recorder) as url, service.device(url) as device:
        take_part(device, WHOLE)
    (body,) = recorder.bodies("/updates")
    return body


def replay(service, body):
    """Sends recorded bytes into the newest round of a service, with a token of the device there."""
    with service.device() as device:
        told = device.check_in()
        path = f"/v1/rounds/{told.round}/updates"
        limit = 1 << 16
        got = device.client.send(path, body, token=told.token, limit=limit, content_type=OCTETS)
    return json.loads(bytes(got.body))


@pytest.fixture
def runs(tmp_path):
    """Two runs of one layout; each has published its round 0."""
    with small_service(tmp_path / "one") as one, small_service(tmp_path / "two") as two:
        for seed, service in enumerate((one, two)):
            service.publish(seed=seed)
        yield one, two


def target_of(runs, where):
    """The service whose newest round the update was not made for."""
    one, two = runs
    if where == "another run":
        return two, two.rounds.current(newest=True).round
    return one, one.publish(seed=7).published.id


@pytest.mark.parametrize("where", ["another run", "a later round"])
def test_an_update_for_another_manifest_is_refused(runs, where):
    body = recorded_update(runs[0])
    service, round_id = target_of(runs, where)
    with pytest.raises(StaleError, match="made for another manifest") as refused:
        replay(service, body)
    assert refused.value.http_status == 400
    assert service.stored(round_id) == {}


def test_the_two_rounds_of_the_runs_have_one_number(runs):
    assert [service.rounds.current(newest=True).number for service in runs] == [0, 0]


def test_a_trainer_does_not_add_what_a_service_should_have_refused(runs):
    """Where a service without the check has stored it."""
    body = recorded_update(runs[0])
    service, round_id = target_of(runs, "another run")
    service.spool.store(round_id, "device-3", body)
    reads = SpoolInbox(service.spool)
    reads._round = 0, LAYOUT, SimpleNamespace(bound=UNBOUND)
    assert reads.result(round_id, 3, "sent", None).outcome == "refused"


@pytest.mark.parametrize("where", ["another run", "a later round"])
def test_a_service_that_does_not_compare_takes_it(runs, where, monkeypatch):
    """The hole: any digest will do."""

    def believe(body, layout, max_keys, manifest):
        return decode_update(body, layout, max_keys, body[8:40])

    monkeypatch.setattr(app.messages, "decode_update", believe)
    monkeypatch.setattr(inbox, "decode_update", believe)
    body = recorded_update(runs[0])
    service, round_id = target_of(runs, where)
    assert replay(service, body) == {"update": "stored"}
    assert service.stored(round_id) == {"phone": body}


def test_one_who_alters_messages_can_make_it_one_of_another_round(runs):
    """The admission: nothing of an update in the clear is signed, and the digest least of all."""
    one, two = runs
    update, keys = decode_update(
        recorded_update(one), LAYOUT, 1 << 16, digest_of(one.rounds.current(newest=True).round)
    )
    round_id = two.rounds.current(newest=True).round
    altered = encode_update(LAYOUT, update, keys, digest_of(round_id))
    assert replay(two, altered) == {"update": "stored"}
