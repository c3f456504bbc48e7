"""Attack: a trainer asks each round for devices with more examples, and looks who stays away.

A device says how many examples it has where its operator lets it, as a power of two. One that ends
where a round asks for more than it has says so to everybody, to the number. The planted hole is a
device that holds itself to what the round asks for.
"""

import pytest

from keyhole.cli import own_data
from keyhole.errors import InputError
from tests.cli.conftest import environment  # noqa: F401 - a fixture
from tests.cli.test_own_data import publish, service, shop, take_part  # noqa: F401 - fixtures

EXAMPLES = 4  # of tests/cli/test_own_data.py


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """JAX may have been started by other tests."""
    monkeypatch.setattr("keyhole.rounds.cores.use_one_thread", lambda: None)


def asked_for(service, task, count):  # noqa: F811
    """What a device does in a round for devices of at least `count` examples."""
    published = publish(service, task, min_examples=count)
    done = take_part(service, task)
    assert done.exit_code == 0, done.output
    return list(service.stored(published.id))


@pytest.mark.parametrize("count", [1, EXAMPLES, EXAMPLES + 1, 1000])
def test_a_device_takes_part_whatever_number_is_asked_for(service, shop, count):  # noqa: F811
    assert asked_for(service, shop, count) == ["ward.north-3"]


def test_a_device_that_stays_away_tells_its_number(service, shop, monkeypatch):  # noqa: F811
    monkeypatch.setattr(own_data, "for_any_number", lambda spec: spec)
    assert asked_for(service, shop, EXAMPLES) == ["ward.north-3"]
    with pytest.raises(InputError, match="no client has this many examples"):
        asked_for(service, shop, EXAMPLES + 1)
