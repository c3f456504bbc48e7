"""The trust table of a run: parties in the order in which a client meets them."""

import pytest

from keyhole.cli.runs import trust_table
from keyhole.rounds.record import RoundRecord


@pytest.mark.parametrize(
    ("parties", "others"),
    [
        (["slice server", "mirrors and CDNs"], ["server"]),
        (["relay", "gateway"], ["aggregator"]),
        (["first server", "second server"], []),
    ],
)
def test_parties_stand_in_the_order_in_which_a_client_meets_them(parties, others):
    """Records that were read from a file have them sorted by letter."""
    record = RoundRecord(
        round=0,
        step=1,
        clients=[],
        seen_by=dict.fromkeys(sorted(parties), "something"),
        seen_in_sum=dict.fromkeys(others, "sums"),
    )
    first, *_ = trust_table(record).columns
    shown = list(first.cells)
    assert [party for party in shown if party in parties] == parties
    assert set(shown) == {*parties, *others}
