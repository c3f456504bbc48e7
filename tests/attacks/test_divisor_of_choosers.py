"""Attack: a device names keys that others have chosen, or one that nobody else has.

Where a row is divided by those who chose its key, and not by the cohort, one update may move a row
that it chose alone by all of C, and makes the rows of others smaller by naming their keys, with
zeros. Both end at the number of clients at a key: a device counts once, however often it names one.
The planted hole counts names: one device that names a key 256 times makes what others sent nothing.
"""

import numpy as np
import pytest

from keyhole.server import row_sums
from keyhole.server.inputs import InputBound
from keyhole.server.row_sums import sum_updates
from tests.rounds.toy import FEATURE, LAYOUT

OTHERS, LIMIT, KEY, OWN = 4, 0.5, 7, 9
HONEST = np.float32(0.25)


def mean_with(keys, rows, over="choosers"):
    """The mean of four honest devices, each at one key, and one more, as key -> row."""
    sent = {"x": np.array(rows, np.float32)}, {"feature": FEATURE.keys(keys)}
    assert not InputBound(LIMIT).take(*sent).is_above
    updates = [{"x": np.array([HONEST])}] * OTHERS + [sent[0]]
    chosen = [{"feature": FEATURE.keys([KEY])}] * OTHERS + [sent[1]]
    (found,) = sum_updates(LAYOUT, updates, chosen, over)
    return dict(zip(found.keys.tolist(), found.rows[:, 0], strict=True))


@pytest.mark.parametrize("times", [1, 256])
def test_a_device_counts_once_at_a_key_however_often_it_names_it(times):
    assert mean_with([KEY] * times, [0.0] * times)[KEY] == HONEST * OTHERS / (OTHERS + 1)


def test_a_row_that_one_device_chose_moves_by_all_of_its_update():
    assert mean_with([OWN], [LIMIT])[OWN] == np.float32(LIMIT)
    assert mean_with([OWN], [LIMIT], over="cohort")[OWN] == np.float32(LIMIT / (OTHERS + 1))


def test_with_names_counted_one_device_makes_the_rows_of_others_nothing(monkeypatch):
    def names(part, keys):
        every = np.concatenate([part.keys_of(chosen).array for chosen in keys])
        return np.unique(every, return_counts=True)[1].astype(np.int64)

    monkeypatch.setattr(row_sums, "choosers", names)
    assert mean_with([KEY] * 256, [0.0] * 256)[KEY] < HONEST / 50
