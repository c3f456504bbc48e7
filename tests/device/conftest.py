"""A service, a device of it, and a proxy between them that breaks what it is told to break."""

import pytest

from keyhole.wire import sockets as paced_socket
from tests.service.fault_proxy import FaultProxy
from tests.service.small_service import small_service


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with small_service(tmp_path_factory.mktemp("rounds")) as made:
        yield made


@pytest.fixture
def device(service):
    with service.device() as made:
        yield made


@pytest.fixture(scope="module")
def proxy(service):
    with FaultProxy(service.port) as made:
        yield made


@pytest.fixture
def proxied(service, proxy):
    """A device behind the proxy."""
    proxy.arm()
    with service.device(f"http://127.0.0.1:{proxy.port}") as made:
        yield made


class ByHand:
    """A clock that goes as a test moves it, and `step` seconds with every look."""

    now = step = 0.0

    def monotonic(self):
        self.now += self.step
        return self.now


@pytest.fixture
def by_hand(monkeypatch):
    """The clock of paced sockets, so that tests of their limits hold on any machine."""
    clock = ByHand()
    monkeypatch.setattr(paced_socket, "time", clock)
    return clock
