"""A key that only one client chose: its row of the sum is that client's row, whoever adds up.

No cipher is broken, and every other claim holds: the trainer reads the sum that it may read.
"""

import numpy as np
import pytest

from keyhole.aggregation.two_servers.server import TwoServerAdder
from tests.attacks.secure_sums import SEEDS, VICTIM, round_name, terms
from tests.service.sums.aggregators import aggregators, bodies_of, facts_at, rows_of

ROUND = round_name()
RARE, COMMON, SECRET = 400, 7, 123_456


def rows_by(name, of):
    """Everybody chose the common key; the victim a rare one besides."""
    keys = [COMMON, RARE] if name == VICTIM else [COMMON]
    sparse = np.array(keys), np.full((len(keys), 8), SECRET, np.uint32)
    return [sparse, *rows_of(of, SEEDS[name])[1:]]


def attack(pair, **settings):
    """Returns what the trainer reads of the rare row and of the common one."""
    of = terms(**settings)
    pair.open(ROUND, of)
    for name, seed in SEEDS.items():
        for party, body in enumerate(bodies_of(of, rows_by(name, of), seed, ROUND)):
            pair.send(party, ROUND, name, body)
    pair.close(ROUND)
    pair.wait(ROUND, ("ready",))
    table, *_ = pair.combined(ROUND, of)
    dropped = [pair.trainer(p).share(ROUND, facts_at(of, ROUND)).dropped for p in (0, 1)]
    return table[RARE], table[COMMON], dropped


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_row_that_one_client_sent_is_dropped_before_anything_is_opened(tmp_path, noise):
    with aggregators(tmp_path) as pair:
        rare, common, dropped = attack(pair, min_per_key=2, count_noise=noise)
        assert not rare.any()
        np.testing.assert_array_equal(common, np.full(8, SECRET * len(SEEDS), np.uint32))
        assert dropped[0] == dropped[1] >= 1


def test_without_a_threshold_the_row_is_the_clients(tmp_path):
    with aggregators(tmp_path) as pair:
        rare, _, dropped = attack(pair)
    np.testing.assert_array_equal(rare, np.full(8, SECRET, np.uint32))
    assert dropped == [0, 0]


def test_with_aggregators_that_count_and_do_not_drop_the_row_is_the_clients(tmp_path, monkeypatch):
    """The hole: counts are exchanged, and rows stay."""
    honest = TwoServerAdder.drop

    def drop(adder, one, other):
        tables = [table.copy() for table in adder._counted]
        dropped = honest(adder, one, other)
        adder._counted = tables
        return dropped

    monkeypatch.setattr(TwoServerAdder, "drop", drop)
    with aggregators(tmp_path) as pair:
        rare, _, _ = attack(pair, min_per_key=2)
    np.testing.assert_array_equal(rare, np.full(8, SECRET, np.uint32))
