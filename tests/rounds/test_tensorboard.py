"""TensorBoard files: every scalar at its round, or a clear word on what is missing."""

import sys

import pytest

from keyhole.errors import InputError
from keyhole.rounds.record import RoundRecord, write_tensorboard

RECORDS = [
    RoundRecord(round=t, step=t + 1, clients=[1, 2], staleness=[0, t], metrics={"accuracy": t / 4})
    for t in range(3)
]


def test_event_files_hold_the_metrics_of_each_round(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs keyhole[tensorboard]")
    write_tensorboard(RECORDS, tmp_path)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    data = events.read_bytes()
    assert data.count(b"metrics/accuracy") == 3
    assert data.count(b"staleness/mean") == 3


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"keyhole\[tensorboard\]"):
        write_tensorboard(RECORDS, tmp_path)
