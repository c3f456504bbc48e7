"""A published round is altered where it lies: by a disk, or by somebody who can write there.

A service that opens a round compares the root of the tree with the manifest, and reads no row: that
would be the whole model at every start. A row that does not hash to the tree is refused by the
device that gets it; `keyhole serve --verify` reads all before it listens.
"""

import numpy as np
import pytest
from click.testing import CliRunner

from keyhole import tree
from keyhole.cli.serve import serve
from keyhole.errors import DamageError, StorageError
from keyhole.service.reading import RoundsDirectory, verify_round
from tests.attacks.lying_service import believing
from tests.helpers import LAYOUTS
from tests.service.small_service import small_service

LAYOUT = LAYOUTS["rows"]
ROW, SIBLING, FAR = 3, 2, 5


def damaged(directory, round_id, name):
    """Turns one bit of a file of the round."""
    path = directory / "rounds" / round_id / "table-0" / name
    data = bytearray(path.read_bytes())
    record = len(data) // LAYOUT.spaces[0].num_keys
    at = ROW * record if name.endswith("seg-0.bin") else ROW * 32  # a number, or its leaf
    data[at] ^= 1
    with path.open("r+b") as file:  # in place: services have it mapped
        file.write(data)


@pytest.fixture
def service(tmp_path):
    with small_service(tmp_path) as made:
        made.published = made.publish(LAYOUT, seed=1)
        yield made


@pytest.mark.parametrize("name", ["seg-0.bin", "tree.bin"])
@pytest.mark.parametrize("when", ["before it is opened", "while it is served"])
def test_a_device_takes_no_row_of_a_damaged_disk(service, monkeypatch, name, when):
    round_id = service.published.published.id
    row = ROW if name == "seg-0.bin" else SIBLING  # whose proof has the leaf of the other one
    with service.device() as device:
        if when == "while it is served":
            device.fetch(round_id, {"row": [row]})
        damaged(service.directory, round_id, name)
        with pytest.raises(DamageError):
            device.fetch(round_id, {"row": [row]})
        believing(monkeypatch)  # the hole: devices that compare nothing
        (taken,) = tree.flatten(device.fetch(round_id, {"row": [row]}).model).values()
        (honest,) = tree.flatten(service.published.model()).values()
        assert np.array_equal(taken[0], honest[row]) == (name == "tree.bin")


@pytest.mark.parametrize("name", ["seg-0.bin", "tree.bin"])
def test_a_service_that_verifies_does_not_start_on_a_damaged_disk(service, name):
    round_id = service.published.published.id
    args = [str(service.directory), "--verify", "--port", "1"]  # a port that it never comes to take
    damaged(service.directory, round_id, name)
    done = CliRunner().invoke(serve, args)
    assert isinstance(done.exception, StorageError), done.output


def test_opening_alone_reads_no_row(service):
    """What is caught where: the page says so, and this holds it."""
    round_id = service.published.published.id
    damaged(service.directory, round_id, "seg-0.bin")
    rounds = RoundsDirectory(service.directory)
    with rounds.hold(round_id) as opened, pytest.raises(StorageError):
        verify_round(opened)
    rounds.close()


def test_the_other_rows_of_a_damaged_disk_are_served(service):
    round_id = service.published.published.id
    damaged(service.directory, round_id, "seg-0.bin")
    with service.device() as device:
        (taken,) = tree.flatten(device.fetch(round_id, {"row": [FAR]}).model).values()
    (honest,) = tree.flatten(service.published.model()).values()
    assert np.array_equal(taken[0], honest[FAR])
