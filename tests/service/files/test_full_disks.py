"""A disk that is full, at any page: one clear error, nothing lost, and it goes on with more room.

What is written for secure sums, signed rounds and devices without a name: shares, lists, receipts,
finished sums, the ledger, keys, and tokens that were taken.
"""

import resource
from contextlib import contextmanager

import numpy as np
import pytest
from click.testing import CliRunner

from keyhole.aggregation.privacy.ledger import Charge, Ledger, read_ledger
from keyhole.cli.main import keyhole
from keyhole.errors import KeyholeError, ReplayError, StorageError
from keyhole.service.admission import AdmissionFiles
from keyhole.service.sum_files import sealing_key
from tests.helpers import eventually
from tests.service.files.disks import leave_room
from tests.service.sums.aggregators import (
    COHORT,
    aggregators,
    bodies_of,
    plain_sum,
    round_name,
    rows_of,
    terms_of,
)

ROUND = round_name()


@contextmanager
def full(disk, pages):
    """A disk with room for some pages, and no more."""
    leave_room(disk, pages)
    try:
        yield
    finally:
        (disk / "filler").unlink()


def refusal(act):
    """What is said where something cannot be written; None where it can."""
    try:
        act()
    except KeyholeError as error:
        said = str(error)
        assert "No space left on device" in said or "507" in said, said
        assert "\n" not in said
        assert not [name for name in COHORT if name in said]
        return said
    return None


def sum_on(disk, pair, number, pages):
    """One sum whose every step meets a full disk first; returns how many were refused there."""
    name = b"%d" % number
    round_id, terms, told = round_name(name, number), terms_of(name, minimum=4), []
    rows = [rows_of(terms, seed) for seed in range(len(COHORT))]

    def first_full(act):
        with full(disk, pages):
            said = refusal(act)
        if said is not None:
            told.append(said)
            act()  # with room, the same again

    first_full(lambda: pair.open(round_id, terms))
    for seed, device in enumerate(COHORT):
        for party, body in enumerate(bodies_of(terms, rows[seed], seed, round_id)):
            first_full(lambda p=party, d=device, b=body: pair.send(p, round_id, d, b))
    with full(disk, pages):
        said = refusal(lambda: pair.close(round_id))
        eventually(lambda: is_at_rest(pair, round_id), seconds=1.0)
    if said is not None:
        told.append(said)
    pair.close(round_id)
    assert [one.phase for one in pair.wait(round_id)] == ["ready", "ready"]
    for found, expected in zip(pair.combined(round_id, terms), plain_sum(terms, rows), strict=True):
        np.testing.assert_array_equal(found, expected)
    for party in (0, 1):
        first_full(lambda p=party: pair.trainer(p).forget(round_id))
    return len(told)


def is_at_rest(pair, round_id):
    """Whether both aggregators are done, or wait for room."""
    found = [pair.trainer(party).status(round_id) for party in (0, 1)]
    return all(one.phase == "ready" or "StorageError" in one.waiting for one in found)


def test_a_sum_is_made_whatever_step_finds_the_disks_of_both_aggregators_full(small_disk):
    pages = [0, 2, 8]
    with aggregators(small_disk / "sums", min_clients=4) as pair:
        told = [sum_on(small_disk, pair, number, each) for number, each in enumerate(pages)]
    assert told[0] == 2 * len(COHORT) + 1 + 1 + 2  # open, shares, close, forget at each
    assert told == sorted(told, reverse=True)
    for party in (0, 1):
        entries = read_ledger(small_disk / "sums" / str(party) / "ledger")
        assert len({entry.sum for entry in entries}) == len(entries) == len(pages)
        assert {entry.devices for entry in entries} == {tuple(COHORT)}


def test_an_aggregator_that_finds_no_room_at_its_first_start_makes_its_key_later(small_disk):
    """Half a key would be in the way for ever."""
    for party in (0, 1):
        with full(small_disk, party), pytest.raises(StorageError, match="No space left"):
            sealing_key(small_disk / str(party))
        made = sealing_key(small_disk / str(party))
        with full(small_disk, 0):  # a start with a full disk goes on where there is a key
            assert sealing_key(small_disk / str(party)).public == made.public


@pytest.mark.parametrize("verb", ["new-key", "gateway-key"])
def test_a_key_that_finds_no_room_leaves_no_half_of_itself(small_disk, verb):
    command = ["token", verb, str(small_disk / "made.key")]
    with full(small_disk, 0):
        assert refusal(lambda: CliRunner().invoke(keyhole, command, catch_exceptions=False))
    assert CliRunner().invoke(keyhole, command).exit_code == 0
    assert (small_disk / "made.key").read_bytes()


def charge(number):
    devices = tuple(f"device-{n}" for n in range(1000))  # three pages and more
    return Charge(f"sum-{number}", "population", 1.0, devices)


def test_a_ledger_on_a_full_disk_loses_and_doubles_nothing(small_disk):
    path, ledger = small_disk / "ledger", None
    for number in range(4):
        for pages in (0, 1):
            with full(small_disk, pages), pytest.raises(StorageError, match="No space left"):
                (ledger or Ledger(path)).charge(charge(number))
        ledger = ledger or Ledger(path)
        for each in (ledger, Ledger(path)):  # what is there, for this process and another
            assert [entry.sum for entry in read_ledger(path)][number:] == []
            assert len(each.totals.names) == number
        assert [ledger.charge(charge(number)), Ledger(path).charge(charge(number))] == [True, False]
    assert [entry.sum for entry in read_ledger(path)] == [f"sum-{n}" for n in range(4)]


def test_a_ledger_that_may_not_grow_loses_and_doubles_nothing(tmp_path):
    ledger, before = Ledger(tmp_path / "ledger"), resource.getrlimit(resource.RLIMIT_FSIZE)
    ledger.charge(charge(0))
    size = (tmp_path / "ledger").stat().st_size
    for more in (0, 1, 70, 9000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, before[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                ledger.charge(charge(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [entry.sum for entry in read_ledger(tmp_path / "ledger")] == ["sum-0"]
    assert ledger.charge(charge(1))
    assert [entry.sum for entry in read_ledger(tmp_path / "ledger")] == ["sum-0", "sum-1"]


def test_tokens_that_could_not_be_written_down_are_not_taken(small_disk):
    """None of them, also where there is room for some: they can be shown again."""
    files, many = AdmissionFiles(small_disk), [bytes([n]) * 32 for n in range(200)]
    files.spend(ROUND, [bytes([255]) * 32])  # in a page that has room for 127 more
    with full(small_disk, 0), pytest.raises(StorageError, match="No space left"):
        files.spend(ROUND, many)
    another = AdmissionFiles(small_disk)  # of a process that reads what is in the file
    another.spend(ROUND, many)
    for each in (files, another, AdmissionFiles(small_disk)):
        with pytest.raises(ReplayError):
            each.spend(ROUND, many[-1:])


def test_what_is_signed_for_a_device_is_written_down_or_not_signed(small_disk):
    files = AdmissionFiles(small_disk)
    with full(small_disk, 0):
        assert refusal(lambda: files.signer(ROUND)) is not None
    files.signer(ROUND)
    with full(small_disk, 0):
        assert refusal(lambda: files.claim(ROUND, COHORT[0], b"blinded")) is not None
    for each in (files, AdmissionFiles(small_disk)):
        each.claim(ROUND, COHORT[0], b"others, since the first were not signed")
        assert each.signer(ROUND).public == files.signer(ROUND).public
    assert not list((small_disk / "admission" / ROUND).glob(".*"))
