"""A gateway, a relay and devices behind it, all on loopback in this process."""

from contextlib import ExitStack, closing, contextmanager

from keyhole.delivery.relay.ohttp import GatewayKey
from keyhole.device.relayed import RelayedFetch
from keyhole.service.app import App
from keyhole.service.gateway import gateway_routes
from keyhole.service.relay import GatewayLink, Mix, RelayApp
from keyhole.service.transport import serving
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Clock, Retry
from tests.service.recorder import Recorder
from tests.service.small_service import Service

SETTINGS = {"keys_per_client": {"word": 4, "neuron": 3}}
MAX_ANSWER = 1 << 26


def line_to(stack, url, token=None, **options):
    """A line of a relay, closed with the stack."""
    line = GatewayLink(HttpClient(url, retry=Retry(attempts=1), **options), token, MAX_ANSWER)
    return stack.enter_context(closing(line))


class Relayed:
    """What a test sees: `gateway` and `relay` record what arrives at them."""

    def __init__(self, directory, stack, key=None, **options):
        self.stack = stack
        self.service = Service(directory)
        self.key = key or GatewayKey.fresh()
        routes = gateway_routes(self.service.rounds, [self.key])
        self.service.app = App(self.service.rounds, extra_routes=[routes], **options)
        self.gateway = Recorder(self.service.app)

    def client(self, url=None):
        """A device's client of the relay, or of another; it does not wait between attempts."""
        clock = Clock(sleep=lambda _: None)
        made = HttpClient(url or self.url, retry=Retry(attempts=3, seed=0), clock=clock)
        return self.stack.enter_context(closing(made))

    def device(self, url=None, **options):
        made = self.service.device(url, **{"token": None, **options})
        return self.stack.enter_context(closing(made))

    def fetch(self, url=None, **options):
        return RelayedFetch(self.client(url), **options)

    def publish(self, **options):
        """A new round; returns its state, and its identifier."""
        state = self.service.publish(**{"settings": SETTINGS, **options})
        return state, state.published.id


@contextmanager
def relayed(directory, mix=None, token=None, **options):
    with ExitStack() as stack:
        made = Relayed(directory, stack, **options)
        service = made.service
        stack.callback(service.rounds.close)
        stack.enter_context(service.publisher)
        service.url = stack.enter_context(serving(made.gateway))
        app = RelayApp(line_to(stack, service.url, token), mix=mix or Mix(seconds=0.0))
        made.relay = Recorder(app)
        made.url = stack.enter_context(serving(made.relay))
        yield made
