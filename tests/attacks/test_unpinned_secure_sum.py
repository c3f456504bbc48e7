"""A slice service gives one device a round of its own, with a secure sum of its own.

It may open sums at the aggregators as a trainer of its own, and invents the other clients: what
both honest aggregators add up is the victim's update. A device that pins the trainer's key takes no
such round, and one that pins none takes no part in secure sums.
"""

from contextlib import ExitStack

import numpy as np
import pytest

from keyhole import tree
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.exchange import combine, facts_of
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.device.sums import SumSend
from keyhole.device.take_part import Participant, take_part
from keyhole.errors import AccessError, ViolationError
from keyhole.service.transport import serving
from keyhole.wire.assignment import device_name
from keyhole.wire.manifest import digest_of
from keyhole.wire.signing import SigningKey
from tests.service.recorder import Recorder
from tests.service.small_service import small_service
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import LAYOUT, make_plan, make_state, services

VICTIM, INVENTED = 0, 1
KEYS = [3, 77, 400]
SUM = TwoServers(Rounding(), min_clients=2)


class Attack:
    """A service that signs its rounds itself, or not at all, and two honest aggregators."""

    def __init__(self, service, pair, signing_key):
        self.service, self.pair, self.recorder = service, pair, Recorder(service.app)
        self.inbox = services(pair)
        told = self.inbox.open(0, [VICTIM, INVENTED], LAYOUT, make_plan(aggregate=SUM))
        service.publisher._signing_key = signing_key
        settings = {**told, "keys_per_client": {"row": len(KEYS)}}
        self.round = service.publish_state(make_state(), settings=settings).published.id
        self.inbox.begin(self.round)

    def take_part(self, client, value, **options):
        """A device whose update is `value` everywhere; what the service sees is recorded."""
        habit = Participant(
            choose=lambda known: {"row": KEYS},
            train=lambda known, got: tree.map_leaves(lambda x: np.full_like(x, value), got.model),
        )
        name = device_name(client)
        with ExitStack() as stack:
            url = stack.enter_context(serving(self.recorder))
            lines = [stack.enter_context(self.pair.device(party, name)) for party in (0, 1)]
            send = SumSend(*lines, (self.pair.public(0), self.pair.public(1)))
            device = stack.enter_context(self.service.device(url, name=name, **options))
            take_part(device, Participant(habit.choose, habit.train, send=send))

    def opened(self):
        """The sum of the two, which the attacker opens as the trainer that it is."""
        self.pair.close(self.round)
        self.pair.wait(self.round, ("ready",))
        params = self.inbox._now().params
        facts = facts_of(SUM, params, digest_of(self.round))
        shares = [self.pair.trainer(party).share(self.round, facts) for party in (0, 1)]
        return combine(SUM, params, shares)


@pytest.fixture(params=["signed by the service", "unsigned"])
def attack(request, tmp_path):
    with small_service(tmp_path / "rounds") as service, aggregators(tmp_path / "sums") as pair:
        key = SigningKey.fresh() if request.param == "signed by the service" else None
        yield Attack(service, pair, key)


@pytest.mark.parametrize("pins", [True, False])
def test_a_device_takes_no_part_and_shows_nothing(attack, pins):
    trainer = attack.service.trainer.public if pins else None
    error, said = (AccessError, "not the trainer's") if pins else (ViolationError, "--trainer-key")
    with pytest.raises(error, match=said):
        attack.take_part(VICTIM, 1.5, trainer_key=trainer)
    seen = {route for _, route in attack.recorder.routes()}
    assert seen == {"checkin", "current", "manifest"}
    assert attack.pair.trainer(0).status(attack.round).devices == []


def test_a_device_that_trusts_the_service_gives_its_update_away(attack):
    """The hole, which has a name: `--trust-service`."""
    attack.take_part(VICTIM, 1.5, trust_service=True)
    attack.take_part(INVENTED, 0.0, trust_service=True)
    bias, rows = attack.opened()
    np.testing.assert_array_equal(bias.rows.ravel(), np.full(3, 1.5, np.float32))
    (touched,) = np.nonzero(rows.rows.any(axis=1))
    assert rows.keys[touched].tolist() == KEYS
    assert (rows.rows[touched] == 1.5).all()


def test_shares_are_refused_where_nobody_asked_before(attack):
    """Also by who sends without taking part in a round."""
    name = device_name(VICTIM)
    with ExitStack() as stack:
        lines = [stack.enter_context(attack.pair.device(party, name)) for party in (0, 1)]
        send = SumSend(*lines, (attack.pair.public(0), attack.pair.public(1)))
        device = stack.enter_context(attack.service.device(name=name))
        told = device.check_in()
        with pytest.raises(ViolationError, match="--trust-service"):
            send(device, told, {}, {})
