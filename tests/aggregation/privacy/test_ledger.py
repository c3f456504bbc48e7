"""The ledger: what it composes, what it refuses, and that its lines cannot be changed."""

import os
import stat
import threading
from hashlib import sha256
from math import inf

import pytest

from keyhole.aggregation.privacy.ledger import (
    Budget,
    Charge,
    Ledger,
    describe,
    read_ledger,
    totals_of,
)
from keyhole.errors import BudgetError, InputError, StorageError

pytest.importorskip("dp_accounting")


def entry(name="a", noise=1.0, population="shop", devices=("device-1",)):
    return Charge(name, population, noise, devices)


def test_sums_are_composed_as_gaussians(tmp_path):
    """One with z = 1 costs 4.887 at delta 1e-6; four are one with z = 1/2: 10.997."""
    ledger = Ledger(tmp_path / "ledger")
    for name in "abcd":
        assert ledger.charge(entry(name))
    assert ledger.totals.devices["device-1"].epsilon(1e-6) == pytest.approx(10.997, abs=1e-3)
    ledger.charge(entry("e", devices=("device-2",)))
    assert ledger.totals.devices["device-2"].epsilon(1e-6) == pytest.approx(4.887, abs=1e-3)
    assert ledger.totals.populations["shop"].sums == 5


def test_a_device_is_counted_over_all_populations(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.charge(entry("a", population="shop"))
    ledger.charge(entry("b", population="bank"))
    told = describe(ledger.totals)
    assert [each["sums"] for each in told["populations"]] == [1, 1]
    assert told["devices"][0]["sums"] == 2
    assert told["devices"][0]["epsilon"] == pytest.approx(7.286, abs=1e-3)


def test_a_sum_without_noise_has_no_bound(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.charge(entry(noise=0.0))
    assert ledger.totals.devices["device-1"].epsilon() == inf
    assert describe(ledger.totals)["devices"][0]["epsilon"] is None


def test_the_same_sum_is_noted_once(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.charge(entry())
    assert not ledger.charge(entry())
    ledger.close()
    again = Ledger(tmp_path / "ledger", Budget(5.0))
    assert not again.charge(entry())  # though another one would be beyond the budget
    again.check(entry())
    assert len(read_ledger(tmp_path / "ledger")) == 1


def test_what_is_beyond_the_budget_is_refused_and_not_noted(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Budget(7.3))
    ledger.charge(entry("a"))
    ledger.charge(entry("b"))
    for attempt in (ledger.charge, ledger.check):
        with pytest.raises(BudgetError) as refused:
            attempt(entry("c", devices=("device-1", "device-9")))
        assert "for 1 of 2 devices; expected 7.3 or less" in str(refused.value)
        assert "device-" not in str(refused.value)
    assert ledger.charge(entry("c", devices=("device-9",)))
    assert [each.sum for each in read_ledger(tmp_path / "ledger")] == ["a", "b", "c"]


def test_without_noise_any_budget_is_exceeded(tmp_path):
    with pytest.raises(BudgetError, match="epsilon inf"):
        Ledger(tmp_path / "ledger", Budget(1e6)).charge(entry(noise=0.0))


@pytest.mark.parametrize("budget", [(0.0, 1e-6), (-1.0, 1e-6), (1.0, 0.0), (1.0, 1.0)])
def test_a_budget_that_allows_nothing_is_refused(budget):
    with pytest.raises(InputError, match="allows nothing"):
        Budget(*budget)


@pytest.mark.parametrize("odd", [entry(noise=inf), entry(noise=float("nan")), entry(name="")])
def test_an_entry_that_says_nothing_is_refused(tmp_path, odd):
    ledger = Ledger(tmp_path / "ledger")
    with pytest.raises(InputError, match="says nothing"):
        ledger.charge(odd)
    assert read_ledger(tmp_path / "ledger") == []


def test_names_come_back_as_they_were(tmp_path):
    odd = entry('a"\n', population="läden\n{}", devices=("x" * 300, "é\\n"))
    Ledger(tmp_path / "ledger").charge(odd)
    assert read_ledger(tmp_path / "ledger") == [odd]


def test_its_owner_alone_reads_it(tmp_path):
    Ledger(tmp_path / "deep" / "ledger")
    assert stat.S_IMODE((tmp_path / "deep" / "ledger").stat().st_mode) == 0o600


@pytest.mark.parametrize("kept", range(1, 200, 7))
def test_what_a_crash_left_of_the_last_line_is_cut_off(tmp_path, kept):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.charge(entry("a"))
    whole = path.read_bytes()
    ledger.charge(entry("b"))
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[: min(kept, len(line) - 1)])
    assert [each.sum for each in read_ledger(path)] == ["a"]
    again = Ledger(path)
    assert path.read_bytes() == whole
    assert again.charge(entry("b"))
    assert path.read_bytes() == whole + line


@pytest.mark.parametrize("cut", range(17))
def test_a_head_that_was_cut_is_a_new_ledger(tmp_path, cut):
    (tmp_path / "ledger").write_bytes(b"keyhole-ledger 1\n"[:cut])
    assert Ledger(tmp_path / "ledger").charge(entry())
    assert len(read_ledger(tmp_path / "ledger")) == 1


def three_lines(path):
    ledger = Ledger(path)
    for name in "abc":
        ledger.charge(entry(name))
    return path.read_bytes().split(b"\n")[:-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:2], *lines[3:]],  # one left out
        lambda lines: [lines[0], lines[2], lines[1], lines[3]],  # two swapped
        lambda lines: [*lines[:2], lines[1], *lines[2:]],  # one doubled
        lambda lines: [*lines[:2], lines[2].replace(b'"noise":1.0', b'"noise":9.0'), lines[3]],
        lambda lines: [b"keyhole-ledger 2", *lines[1:]],
        lambda lines: [*lines[:3], b"garbage"],
        lambda lines: [lines[0], *lines[2:]],  # the first
    ],
)
def test_a_line_that_was_changed_is_refused_and_not_mended(tmp_path, change):
    path = tmp_path / "ledger"
    changed = b"\n".join(change(three_lines(path))) + b"\n"
    path.write_bytes(changed)
    for read in (Ledger, read_ledger):
        with pytest.raises(StorageError, match="is damaged: got another line"):
            read(path)
    assert path.read_bytes() == changed


@pytest.mark.parametrize(
    "content",
    [b"kh2.a token of the device", b"\xff\xfe\x00" * 30, b"[" * 100_000, b"keyhole-led\0"],
)
def test_a_file_that_is_no_ledger_is_refused_and_nothing_of_it_is_cut_off(tmp_path, content):
    """It has no line that was written to its end, and so looked like one that a crash had cut."""
    path = tmp_path / "device.token"
    path.write_bytes(content)
    for read in (Ledger, read_ledger):
        with pytest.raises(StorageError, match="is damaged: got another line 1"):
            read(path)
    assert path.read_bytes() == content


def test_an_entry_that_is_nested_too_deep_is_refused(tmp_path):
    path, text = tmp_path / "ledger", b"[" * 100_000
    path.write_bytes(
        b"keyhole-ledger 1\n" + sha256(text).hexdigest().encode() + b" " + text + b"\n"
    )
    with pytest.raises(StorageError, match="another line 2"):
        Ledger(path)


def test_two_that_are_open_at_once_see_each_other(tmp_path):
    one, other = (Ledger(tmp_path / "ledger", Budget(7.3)) for _ in range(2))
    assert one.charge(entry("a"))
    assert not other.charge(entry("a"))
    assert other.charge(entry("b"))
    with pytest.raises(BudgetError):
        one.charge(entry("c"))


def test_threads_double_nothing(tmp_path):
    ledger, names = Ledger(tmp_path / "ledger"), [f"{n}" for n in range(40)]

    def note():
        for name in names:
            ledger.charge(entry(name))

    threads = [threading.Thread(target=note) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.sum for each in read_ledger(tmp_path / "ledger")) == sorted(names)
    assert totals_of(read_ledger(tmp_path / "ledger")) == ledger.totals


def test_a_full_disk_notes_nothing_and_leaves_the_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.charge(entry("a"))
    before, real = path.read_bytes(), os.writev

    def half(descriptor, buffers):
        real(descriptor, [bytes(buffers[0])[:20]])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.writev", half)
    with pytest.raises(StorageError, match="No space left"):
        ledger.charge(entry("b"))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert ledger.charge(entry("b"))
