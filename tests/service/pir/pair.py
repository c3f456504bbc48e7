"""Two services of private retrieval on loopback, over one directory of rounds."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.service.access import Access
from keyhole.service.app import App
from keyhole.service.private import query_routes
from keyhole.service.reading import RoundsDirectory
from keyhole.service.transport import serving
from keyhole.wire.private import QuerySettings, role_named
from keyhole.wire.sockets import Clock, Retry
from tests.service.recorder import Recorder
from tests.service.small_service import Service

TWO = role_named("0"), role_named("1")
ONE = (role_named("one"),)


@dataclass
class Pair:
    """A service that coordinates and is server 0, and one that is server 1 and no more.

    Attributes:
        service: the first, of tests/service/small_service.py.
        recorders: what arrived at each.
        urls: of each.
    """

    service: Service
    recorders: list = field(default_factory=list)
    urls: list = field(default_factory=list)

    def device(self, name="phone", url=None, **options):
        return self.service.device(url or self.urls[0], name, **options)

    def fetch(self, url=None, **options):
        """How a device of the pair fetches; `second` of it is to be closed."""
        return QueryFetch(TwoServerPir(), (second_device(url or self.urls[1]),), **options)

    def params(self, round_id, place, server=0):
        path = f"/v1/rounds/{round_id}/tables/{place}/pir/two-server"
        with second_device(self.urls[server]) as device:
            return PirParams.decode(bytes(device.client.get(path, limit=1024).body))

    def metric(self, server, name):
        """A count of one of both services."""
        page = self.recorders[server].app.metrics.page().decode()
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def second_device(url, **options):
    """A device without a token, which does not wait between attempts."""
    quick = {"retry": Retry(attempts=4, seed=0), "clock": Clock(sleep=lambda _: None)}
    return Device(url, **{**quick, **options})


@contextmanager
def pair(directory, roles=TWO, other_directory=None, second=None, wrap=Recorder, **settings):
    """Both services; `settings` are those of private retrieval at both.

    Args:
        directory: of rounds.
        roles: of the services.
        other_directory: of the second, if it is another.
        second: options of the second `App`.
        wrap: what stands before each.
        settings: of private retrieval at both.
    """
    with ExitStack() as stack:
        service = Service(
            directory, lambda rounds: [query_routes(rounds, QuerySettings(roles[0], **settings))]
        )
        stack.enter_context(service.publisher)
        stack.callback(service.rounds.close)
        apps = [service.app]
        for role in roles[1:]:
            # A clock that runs with every look: a service never sees a round of a moment ago.
            rounds = RoundsDirectory(other_directory or directory, clock=count(step=0.1).__next__)
            stack.callback(rounds.close)
            routes = query_routes(rounds, QuerySettings(role, **settings))
            more = {"access": Access(open_queries=True), **(second or {})}
            apps.append(App(rounds, extra_routes=[routes], **more))
        made = Pair(service, [wrap(app) for app in apps])
        made.urls = [stack.enter_context(serving(recorder)) for recorder in made.recorders]
        service.url = made.urls[0]
        yield made
