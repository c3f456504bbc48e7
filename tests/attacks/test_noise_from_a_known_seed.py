"""An outsider takes the noise away: it has the manifest, all that devices are told, and the models
before and after the round, and tries as the seed every number that it has read or can guess.

Where noise follows from the run's seed and the manifest tells it, rows that nobody chose become
zero again, and the rest is the sum without noise. Over a service both aggregators draw noise from
the system, once for a sum, and no message holds the seed.
"""

import re
from base64 import b64decode
from contextlib import suppress

import numpy as np
import pytest

from keyhole.aggregation.base import derived
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.aggregation.privacy.noise import add_ring_noise
from keyhole.aggregation.sum_server import SumServer
from keyhole.aggregation.two_servers.params import SumParams
from keyhole.rounds.loop import start_run
from keyhole.service import served as rounds_over_a_service
from keyhole.service.inbox import round_settings
from tests.service.small_service import small_service
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import (
    LAYOUT,
    ROW,
    devices,
    make_clients,
    make_plan,
    make_state,
    served,
)

pytest.importorskip("dp_accounting")

SEED = 1_234_567  # nobody guesses it among the first thousand
PLAN = make_plan(privacy=Privacy(clip=2.0, noise=1.0, delta=1e-2), seed=SEED)
PLACE = next(i for i, part in enumerate(LAYOUT.parts) if part.product.factors)


def numbers_in(told):
    """Every whole number in what an outsider reads, however it is written."""
    if isinstance(told, dict):
        yield from (n for pair in told.items() for each in pair for n in numbers_in(each))
    elif isinstance(told, list | tuple):
        yield from (n for each in told for n in numbers_in(each))
    elif isinstance(told, bool) or told is None:
        return
    elif isinstance(told, int):
        yield told
    elif isinstance(told, str):
        yield from map(int, re.findall(r"\d{1,18}", told))
        for text in re.findall(r"[0-9a-f]{8,}", told):
            whole = int(text, 16)
            yield from (whole, whole & (2**32 - 1), whole >> max(0, whole.bit_length() - 32))


def read_everything(manifest):
    """The manifest, and the terms of the sum in it."""
    settings = manifest.settings
    told = {name: getattr(manifest, name) for name in ("number", "step")}
    return {**settings, **told, "tables": repr(manifest.tables)}


def without_noise(noisy, manifest):
    """The sum of the rows without noise, or None: the attack."""
    terms = SumParams.decode(b64decode(manifest.settings["sum_terms"]))
    found = {n for n in numbers_in(read_everything(manifest)) if 0 <= n < 2**63}
    for seed in sorted(found | set(range(1000))):
        guess = noisy.copy()
        for party in (0, 1):
            noise = np.zeros(noisy.shape, np.uint32)
            prg = derived(b"noise", (seed, 0, manifest.number), PLACE, party)
            add_ring_noise(noise, terms.ring_noise, prg)
            guess -= noise.view(np.int32) / terms.fixed_point.scale
        untouched = np.abs(guess).max(axis=1) < 1e-3
        if untouched.mean() > 0.5:  # by chance no row is
            return guess
    return None


def attacked(tmp_path):
    """What the outsider makes of one round, and the run."""
    seen = []
    with (
        small_service(tmp_path / "rounds") as service,
        aggregators(tmp_path / "sums") as pair,
        devices(service, pair),
    ):
        run = start_run(make_state(), make_clients(), PLAN, kind=served(service, pair, named=True))
        (record,) = run.rounds(1)
        with service.device() as outsider:
            seen.append(outsider.known(outsider.current().round).manifest)
    assert record.not_opened is None
    noisy = -run.state.model()["w"].astype(np.float64) * PLAN.cohorts.size
    return without_noise(noisy, seen[0]), record


def test_the_manifest_and_the_models_do_not_tell_the_noise(tmp_path):
    found, _ = attacked(tmp_path)
    assert found is None


@pytest.mark.slow
def test_a_build_that_puts_the_seed_back_is_broken_by_it(tmp_path, monkeypatch):
    """The planted hole: noise from the seed, and the seed in the settings of the round."""
    share = SumServer.share

    def seeded(server, noise=None):
        return share(server, lambda part: derived(b"noise", (SEED, 0, 0), part, server.party))

    def telling(t, parts, users=None):
        return {**round_settings(t, parts, users), "seed": parts.seed}

    monkeypatch.setattr(SumServer, "share", seeded)
    monkeypatch.setattr(rounds_over_a_service, "round_settings", telling)
    found, record = attacked(tmp_path)
    assert found is not None
    touched = np.flatnonzero(np.abs(found).max(axis=1) > 1e-3)
    assert 0 < len(touched) <= 4 * len(record.clients) < ROW.num_keys


@pytest.mark.parametrize("named", [True, False])
def test_no_message_of_a_round_holds_the_seed(tmp_path, named):
    """Neither the manifest's bytes nor what devices are asked, whoever draws the cohorts."""
    with small_service(tmp_path / "rounds") as service, aggregators(tmp_path / "sums") as pair:
        kind = served(service, pair, seconds=0.01, named=named)
        start = start_run(make_state(), make_clients(), PLAN, kind=kind)
        with suppress(StopIteration):
            next(start.rounds(1))
        for file in (tmp_path / "rounds").rglob("*"):
            if file.is_file():
                assert str(SEED).encode() not in file.read_bytes(), file.name
        with service.device() as outsider:
            manifest = outsider.known(outsider.current().round).manifest
    assert SEED not in set(numbers_in(read_everything(manifest)))
    assert not {"seed", "trial"} & manifest.settings.keys()
