"""Where the updates of a Flower run arrive: at the service, or in shares at two aggregators."""

from __future__ import annotations

import secrets
from pathlib import Path

from keyhole.engines.flower.run_config import RoundsConfig
from keyhole.engines.flower.token_files import read_secret
from keyhole.server.files import make_directory, replacing, write_all
from keyhole.serving.device.client import Client
from keyhole.serving.files.update_spool import UpdateSpool
from keyhole.serving.inbox import Inbox, SpoolInbox

__all__ = ["inbox_of"]


def inbox_of(config: RoundsConfig) -> Inbox:
    """The inbox that a run config describes.

    Raises:
        InputError: a token of the trainer at an aggregator cannot be read.
    """
    if not config.aggregators:
        return SpoolInbox(UpdateSpool(config.rounds / "updates"))
    from keyhole.serving.sums.sum_client import SumClient  # its kernels take time to load
    from keyhole.serving.sums.sum_services import SumServices

    ca = None if config.aggregator_ca is None else str(config.aggregator_ca)
    first, second = (
        SumClient(Client(url, ca=ca), read_secret(path), party)
        for party, (url, path) in enumerate(
            zip(config.aggregators, config.aggregator_tokens, strict=True)
        )
    )
    return SumServices(first, second, salt=_salt(config.run), seconds=config.round_seconds)


def _salt(run: Path) -> bytes:
    """What tells the sums of this run from those of all others; kept as long as the run is."""
    from keyhole.serving.sums.sum_services import SALT_BYTES

    path = run.with_name(f"{run.name}.salt")  # a run's directory is the training loop's to make
    if not path.exists():
        make_directory(path.parent)
        with replacing(path) as file:
            write_all(file, [secrets.token_bytes(SALT_BYTES)])
    return path.read_bytes()
