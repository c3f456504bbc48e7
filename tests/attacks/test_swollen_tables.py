"""Attack: a round whose manifest holds a few bytes that unpack to more than a device has memory.

Choices of keys may read tables that a round brings, packed. Whoever names the round to a device
could make it allocate three gigabytes for each three megabytes of such a table. The planted hole is
a limit that is no limit.
"""

import tracemalloc
import zlib
from base64 import b64encode

import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.wire import settings
from keyhole.wire.settings import facts_in
from tests.helpers import LAYOUTS
from tests.service.small_service import small_service

ENTRIES = 6_000_000  # of 12 bytes
TABLES = 6
BOUND = 3 * (128 << 20)  # what was unpacked, and what is made of it


def swollen():
    body = np.ones(ENTRIES, "<u8").tobytes() + bytes(4 * ENTRIES)
    return b64encode(zlib.compress(body, 9)).decode()


@pytest.fixture
def told(tmp_path):
    """The settings of such a round, as a device has them from a service."""
    text = swollen()
    assert len(text) < 200_000
    norms = {f"space {number}": text for number in range(TABLES)}
    with small_service(tmp_path) as service, service.device() as device:
        service.publish(LAYOUTS["rows"], settings={"key_norms": norms})
        return device.manifest(device.check_in()).settings


def peak_of(told):
    """The error, and the most bytes that were held."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            facts_in(told)
        return str(caught.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_device_refuses_the_round_before_it_has_unpacked_it(told):
    error, peak = peak_of(told)
    assert "what a round tells of keys makes no sense" in error
    assert peak < BOUND


def test_without_a_limit_it_holds_all_of_it(told, monkeypatch):
    monkeypatch.setattr(settings, "_MAX_UNPACKED", 1 << 40)
    tracemalloc.start()
    norms, _ = facts_in(told)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(len(table.keys) for table in norms.values()) == TABLES * ENTRIES
    assert peak > BOUND
