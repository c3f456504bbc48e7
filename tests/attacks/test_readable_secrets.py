"""Attack: another user of the machine reads files that hold secrets, where a folder was made by
hand and is open, was copied without its mode, or the umask is 0.

Planted hole: files as `open` makes them.
"""

import os
import stat

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from keyhole.cli.token import token
from keyhole.delivery.records import RecordField, Records
from keyhole.device.cache import SliceCache
from keyhole.files import kept_secret, replacing, write_all
from keyhole.server.client_states import ClientStates
from keyhole.service.spool import UpdateSpool
from keyhole.service.sum_files import SumFiles
from keyhole.service.sums import AggregatorSettings, Sums
from keyhole.wire.messages import SumOpening
from tests.service.sums.aggregators import COHORT, round_name, terms_of


@pytest.fixture
def shared(tmp_path):
    """A folder that everybody may enter, for a process that hides nothing by itself."""
    before = os.umask(0)
    tmp_path.chmod(0o777)
    yield tmp_path
    os.umask(before)


def readable(folder):
    """Files with content that others could read, if they got through the folders."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return [path.name for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077]


def made(folder):
    return sum(1 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("verb", sorted(name for name in token.commands if "-key" in name))
def test_keys(shared, verb):
    names = [
        param.name for param in token.commands[verb].params if param.param_type_name == "argument"
    ]
    files = [name for name in names if name != "party"]
    words = {name: str(shared / name) for name in files} | {"party": "0"}
    if verb == "aggregator-key":  # made of another key
        CliRunner().invoke(token, ["new-key", words["key_file"]], catch_exceptions=False)
    done = CliRunner().invoke(token, [verb, *(words[name] for name in names)])
    assert done.exit_code == 0, done.output
    assert made(shared) == len(files)
    assert set(readable(shared)) <= {"public_file"}


def test_the_salt_of_a_run(shared):
    assert len(kept_secret(shared / "run" / "salt", 16)) == 16
    assert (made(shared), readable(shared)) == (1, [])


def test_what_a_device_asked_for(shared):
    table = Records("word", 9, (RecordField("w", (10,), np.dtype("f4")),))
    records, sums = np.zeros((1, table.record_bytes), np.uint8), np.zeros(1, np.uint64)
    SliceCache(shared).keep([(table, np.array([1]), records, sums)])
    assert (made(shared), readable(shared)) == (1, [])


def test_what_a_client_keeps_between_rounds(shared):
    states = ClientStates(shared / "clients")
    states.offer({3: b"a state"})
    states.write(0)
    assert (made(shared), readable(shared)) == (1, [])


def test_updates(shared):
    spool = UpdateSpool(shared / "updates")
    spool.store(round_name(), "phone", b"an update")
    spool.close(round_name())
    assert (made(shared) > 1, readable(shared)) == (True, [])


def test_shares_and_names_at_an_aggregator(shared):
    files, opening = SumFiles(shared), SumOpening(0, terms_of().encode(), COHORT)
    sums = Sums(files, AggregatorSettings(0, min_clients=2))
    sums.open("trainer", round_name(), msgspec.json.encode(opening))
    files.spool.store(round_name(), COHORT[0], b"a share")
    files.close()
    assert made(shared) > 4
    assert readable(shared) == ["seal.pub"]  # which devices are given; its secret half is not


def test_a_secret_is_not_readable_while_it_is_written_or_after_a_crash(shared):
    path = shared / "secret"
    (shared / "secret.tmp").write_bytes(b"of a process that was killed")
    assert readable(shared) == ["secret.tmp"]
    with replacing(path, secret=True) as descriptor:
        write_all(descriptor, [b"word"])
        assert readable(shared) == []
    assert (path.read_bytes(), readable(shared)) == (b"word", [])


def test_files_as_they_are_made_by_default_would_be_read(shared):
    with replacing(shared / "salt") as descriptor:
        write_all(descriptor, [b"word"])
    assert readable(shared) == ["salt"]
