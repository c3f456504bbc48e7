"""Records of a run as TensorBoard event files; needs the extra `tensorboard`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from keyhole.errors import InputError
from keyhole.training.record import RoundRecord

__all__ = ["write_tensorboard"]


def write_tensorboard(records: Iterable[RoundRecord], directory: Path | str) -> None:
    """Writes the metrics and costs of each round, at its number.

    Args:
        records: as `read_records` returns them.
        directory: for `tensorboard --logdir`.

    Raises:
        InputError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InputError(
            "TensorBoard files cannot be written",
            got="no tensorboardX",
            allowed="the extra 'tensorboard'",
            fix="pip install 'keyhole[tensorboard]'",
        ) from None
    with SummaryWriter(str(directory)) as writer:
        for record in records:
            for name, value in _scalars(record).items():
                writer.add_scalar(name, value, record.round)


def _scalars(record: RoundRecord) -> dict[str, float]:
    """What is drawn of a record."""
    return {
        **{f"metrics/{name}": value for name, value in record.metrics.items()},
        "cohort/asked": len(record.clients),
        "cohort/added": len(record.staleness),
        "cohort/refused": len(record.refused),
        "cost/bytes_down": sum(record.bytes_down),
        "cost/bytes_up": sum(record.bytes_up),
        "cost/select_calls": record.select_calls,
        "cost/distinct_keys": record.distinct_keys,
        "staleness/mean": sum(record.staleness) / max(1, len(record.staleness)),
    }
