"""What is damaged on an aggregator's disk is one error that names the file, and changes nothing."""

from contextlib import closing

import msgspec
import pytest

from keyhole.errors import StorageError, TooLateError
from keyhole.service.admission import AdmissionFiles
from keyhole.service.spool import UpdateSpool
from keyhole.service.sum_files import SumFiles, sealing_key
from keyhole.service.sums import AggregatorSettings, Sums
from keyhole.wire.messages import SumOpening
from tests.service.sums.aggregators import COHORT, round_name, terms_of

ROUND, TERMS = round_name(), terms_of()
BODY = msgspec.json.encode(SumOpening(0, TERMS.encode(), COHORT))
KEPT = msgspec.json.decode(BODY) | {"terms": "AAAA"}
DAMAGES = {
    "empty": b"",
    "not text": b"\xff\xfe\x00" * 20,
    "nested": b"[" * 100_000,
    "another": b'{"owner": 3}',
    "params": msgspec.json.encode({"owner": "trainer", "opening": KEPT}),
}


def opened(directory):
    """An aggregator that has a sum, as a process that is started again."""
    return Sums(SumFiles(directory), AggregatorSettings(0, min_clients=2))


@pytest.fixture
def directory(tmp_path):
    sums = opened(tmp_path)
    assert sums.open("trainer", ROUND, BODY) == "opened"
    sums.files.close()
    return tmp_path


def damage(path, content):
    """Puts something else in the place of a file; None stands for a directory."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def refuses(directory, ask):
    """Whether an aggregator that is started again refuses, and says it in one sentence."""
    with closing(opened(directory).files) as files:
        sums = Sums(files, AggregatorSettings(0, min_clients=2))
        with pytest.raises(StorageError) as refused:
            ask(sums)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("content", [*DAMAGES.values(), None], ids=[*DAMAGES, "a directory"])
@pytest.mark.parametrize("file", ["opening", "failed"])
def test_a_damaged_sum_is_refused_and_stays_as_it_is(directory, file, content):
    path = directory / "sums" / ROUND / file
    damage(path, content)
    said = refuses(directory, lambda sums: sums.status("trainer", ROUND))
    assert said.startswith((f"{file} of a sum is damaged", f"cannot read {file}"))
    assert content is None or path.read_bytes() == content


def test_a_damaged_receipt_is_refused(directory):
    folder = directory / "sums" / ROUND
    for name in ("share", "receipt"):
        (folder / name).write_bytes(b"something else")
    said = refuses(directory, lambda sums: sums.status("trainer", ROUND))
    assert said.startswith("receipt of a sum is damaged")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", ROUND.encode() + b" ove", None])
def test_a_name_that_was_damaged_is_not_free_again(directory, content):
    """Else a trainer could open a second sum under it, and use shares of the first."""
    (mark,) = (directory / "names").iterdir()
    damage(mark, content)
    again = round_name(b"another")
    said = refuses(directory, lambda sums: sums.open("trainer", again, BODY))
    assert "the name of a sum is damaged" in said or "cannot read" in said


def test_a_name_whose_sum_is_over_stays_over(directory):
    with closing(opened(directory).files) as files:
        sums = Sums(files, AggregatorSettings(0, min_clients=2))
        sums.forget("trainer", ROUND)
        with pytest.raises(TooLateError, match="the sum is over"):
            sums.open("trainer", ROUND, BODY)


@pytest.mark.parametrize("content", [b"\xff" * 32, b"", b"ab" * 31, None])
def test_a_damaged_key_is_named_and_kept(tmp_path, content):
    sealing_key(tmp_path)
    damage(tmp_path / "seal.key", content)
    with pytest.raises(StorageError, match=r"seal\.key"):
        sealing_key(tmp_path)
    assert content is None or (tmp_path / "seal.key").read_bytes() == content


def test_a_public_key_that_cannot_be_written_is_named(tmp_path):
    sealing_key(tmp_path)
    damage(tmp_path / "seal.pub", b"another")
    public = sealing_key(tmp_path).public.hex()
    assert (tmp_path / "seal.pub").read_text() == f"{public}\n", "written again"
    damage(tmp_path / "seal.pub", None)
    with pytest.raises(StorageError, match=r"seal\.pub"):
        sealing_key(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"../device", b"device-1 <>"])
def test_a_damaged_list_of_a_closed_round_is_refused(tmp_path, content):
    spool = UpdateSpool(tmp_path)
    spool.store(ROUND, "device-1", b"update")
    assert spool.close(ROUND) == ["device-1"]
    damage(tmp_path / ROUND / ".counted", content)
    with pytest.raises(StorageError, match="counted is damaged") as refused:
        UpdateSpool(tmp_path).close(ROUND)
    assert "device-1" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\x30\x82" * 40, None], ids=["cut", "other", "folder"])
def test_a_damaged_admission_key_is_not_replaced(tmp_path, content):
    AdmissionFiles(tmp_path).signer(ROUND)
    path = tmp_path / "admission" / ROUND / "key"
    damage(path, content)
    with pytest.raises(StorageError, match=r"admission key|cannot read"):
        AdmissionFiles(tmp_path).signer(ROUND)
    assert content is None or path.read_bytes() == content
