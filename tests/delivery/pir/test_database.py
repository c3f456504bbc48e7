"""The database: rows are exactly what docs/wire.md says."""

import numpy as np
import pytest

from keyhole.crypto.merkle import Tree, hash_leaves, paths
from keyhole.delivery.base import PrivateTable, PublicTable, name_of_round
from keyhole.delivery.pir.database import Database
from keyhole.errors import ShapeError
from tests.delivery.pir.schemes import MODEL, database_of, private_table, records_of


@pytest.mark.parametrize("record_bytes", [1, 7, 8, 9, 64, 2048])
@pytest.mark.parametrize(("num_keys", "height"), [(11, 0), (4097, 1)])
def test_a_row_is_slice_path_and_zeros_up_to_a_word(record_bytes, num_keys, height):
    records = records_of(num_keys, record_bytes)
    database = database_of(records, 3)
    row_bytes = record_bytes + 32 * height
    words = -(-row_bytes // 8)
    assert (database.rows.dtype, database.rows.shape) == (np.uint64, (num_keys, words))
    cells = database.rows.view(np.uint8)
    tree = Tree.of(hash_leaves(records))
    np.testing.assert_array_equal(cells[:, :record_bytes], records)
    np.testing.assert_array_equal(cells[:, record_bytes:row_bytes], paths(tree, height))
    assert not cells[:, row_bytes:].any()
    assert database.rows.ctypes.data % 64 == 0
    names = name_of_round("round-7"), MODEL, tree.root
    assert database.public == PublicTable(*names, num_keys, row_bytes, 3)


def test_any_changed_bit_of_any_slice_changes_the_root():
    records = records_of(9, 3)
    roots = {database_of(records, 2).public.root}
    for bit in range(9 * 3 * 8):
        changed = records.copy()
        changed.reshape(-1)[bit // 8] ^= 1 << bit % 8
        roots.add(database_of(changed, 2).public.root)
    assert len(roots) == 9 * 3 * 8 + 1


def test_more_keys_a_query_than_there_are_is_all_of_them():
    assert database_of(records_of(5, 3), 50).public.max_keys == 5
    assert database_of(records_of(5, 3), 2).padded_to(50).public.max_keys == 5


def test_a_database_keeps_its_own_copy_that_nobody_writes_to():
    records = records_of(4, 8).copy()
    database = database_of(records, 2)
    before = database.rows.copy()
    records[:] = 0
    np.testing.assert_array_equal(database.rows, before)
    with pytest.raises(ValueError, match="read-only"):
        database.rows[0, 0] = 1


@pytest.mark.parametrize(
    "records",
    [records_of(3, 4).astype(np.int64), records_of(3, 4)[0], np.empty((3, 0), np.uint8)],
    ids=["numbers", "one row", "no bytes"],
)
def test_what_is_no_table_of_bytes_is_refused(records):
    tree = private_table(records_of(3, 4), 2).tree
    with pytest.raises(ShapeError, match="do not fit a database"):
        Database.of(PrivateTable("round-7", MODEL, records, tree, 2))


def test_printing_a_database_shows_sizes_only():
    assert repr(database_of(records_of(4, 8), 2)) == "Database(4 rows of 8 bytes)"
