"""A gateway, a relay and devices behind it, all on loopback in this process."""

from contextlib import contextmanager

from keyhole.private.oblivious.key_config import GatewayKey
from keyhole.serving.device.client import Client
from keyhole.serving.device.retrying import Clock, Retry
from keyhole.serving.relay.gateway_line import GatewayLine
from keyhole.serving.relay.gateway_routes import gateway_routes
from keyhole.serving.relay.mixing import Mix
from keyhole.serving.relay.relay import RelayApp
from keyhole.serving.relay.relayed_fetch import RelayedFetch
from keyhole.serving.service.app import App
from keyhole.serving.service.transport import serving
from tests.serving.recorder import Recorder
from tests.serving.small_service import Service

SETTINGS = {"keys_per_client": {"word": 4, "neuron": 3}}
MOST_ANSWER = 1 << 26


def line_to(url, token=None, **options):
    return GatewayLine(Client(url, retry=Retry(attempts=1), **options), token, MOST_ANSWER)


def client_of(url, attempts=3):
    """A device's client that does not wait between attempts."""
    return Client(url, retry=Retry(attempts=attempts, seed=0), clock=Clock(sleep=lambda _: None))


class Relayed:
    """What a test sees: `gateway` and `relay` record what arrives at them."""

    def __init__(self, directory, key=None, **options):
        self.service = Service(directory)
        self.key = key or GatewayKey.fresh()
        routes = gateway_routes(self.service.rounds, [self.key])
        self.service.app = App(self.service.rounds, extra_routes=[routes], **options)
        self.gateway = Recorder(self.service.app)

    def fetch(self, **options):
        return RelayedFetch(client_of(self.url), **options)

    def publish(self, **options):
        """A new round; returns its state, and its identifier."""
        state = self.service.publish(**{"settings": SETTINGS, **options})
        return state, state.published.id


@contextmanager
def relayed(directory, mix=None, token=None, **options):
    made = Relayed(directory, **options)
    service = made.service
    with service.publisher, serving(made.gateway) as service.url:
        app = RelayApp(line_to(service.url, token), mix=mix or Mix(seconds=0.0))
        made.relay = Recorder(app)
        with serving(made.relay) as made.url:
            yield made
    service.rounds.close()
