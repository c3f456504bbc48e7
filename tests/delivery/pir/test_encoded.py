"""The table that questions are multiplied with: exact sums, what changes with rows, files."""

import os
from mmap import mmap

import numpy as np
import pytest

from keyhole.crypto.ntt import transform_of
from keyhole.delivery.pir import encoded
from keyhole.delivery.pir.encoded import MAX_PRODUCTS, EncodedTable, FilePart
from keyhole.delivery.pir.one_server import (
    OneServerClient,
    OneServerPir,
    encode,
    params_of,
    server_of,
)
from keyhole.delivery.pir.shape import LANES, POSITIONS_AT_ONCE, PRIMES, shape_of
from keyhole.delivery.pir.slots import mask_of, slots_of
from keyhole.errors import StorageError
from tests.delivery.pir.schemes import database_of, private_table, records_of, seeded


def drawn_rows(num_keys, words, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (num_keys, words), dtype=np.uint64)


def blocks_of(table):
    size, count = table.shape.block_bytes, table.shape.lane_blocks
    return [part.block(at, mmap(-1, size)) for part in table.parts for at in range(count)]


def test_slots_hold_the_chunks_of_masked_rows():
    """Read back out of the encoded table: transformed back modulo both primes, centred, and forward
    modulo t, every chunk of every item stands in all of its buckets."""
    shape, rows = shape_of(700, 40, 30), drawn_rows(700, 5)
    table = EncodedTable.encode(rows, shape)
    words = (rows ^ mask_of(np.arange(700), 5)).reshape(700, -1)
    pieces = np.zeros((700, shape.pieces * shape.piece_words), np.uint64)
    pieces[:, :5] = words
    items = pieces.reshape(-1, shape.piece_words)
    block = table.parts[0].block(0, mmap(-1, shape.block_bytes))
    for position in range(min(POSITIONS_AT_ONCE, shape.positions)):
        found = []
        for prime, values in zip(PRIMES, block[:, position], strict=True):
            plain = transform_of(shape.degree, prime).inverse(values.copy()).astype(np.int64)
            centred = np.where(plain > prime // 2, plain - prime, plain)
            assert np.abs(centred).max() <= shape.modulus // 2
            found.append(centred)
        np.testing.assert_array_equal(*found)
        ring = transform_of(shape.degree, shape.modulus)
        slots = ring.forward((found[0] % shape.modulus).astype(np.uint32)).reshape(-1, LANES)
        for slot, item in enumerate(slots_of(shape).members(position, 1)[0]):
            as_one = 0 if item < 0 else int.from_bytes(items[item].tobytes(), "little")
            for chunk in range(min(3, shape.chunks)):
                expected = as_one >> shape.chunk_bits * chunk & (1 << shape.chunk_bits) - 1
                assert slots[slot, chunk] == expected


@pytest.mark.parametrize("positions", [8, MAX_PRODUCTS, MAX_PRODUCTS + 8, 2 * MAX_PRODUCTS + 16])
def test_sums_of_the_largest_products_are_exact(positions):
    """Every factor the largest there is: 1,024 products fit into a word by a hair."""
    shape = shape_of(100_000, 8, 40)

    class Full:
        def block(self, number, room):
            return np.full((2, 8, shape.groups, shape.degree, LANES), 0, np.uint32) + largest

    largest = (np.array(PRIMES, np.uint32) - 1).reshape(2, 1, 1, 1, 1)
    parts = positions // POSITIONS_AT_ONCE
    table = EncodedTable(shape, drawn_rows(1, 1), (Full(),) * parts, 0)
    asked = np.full((1, parts, 2, shape.groups, shape.degree, 8), 2**27 - 1, np.uint32)
    found = table.multiply(asked, 0)
    for place, prime in enumerate(PRIMES):
        assert set(found[0, place].flat) == {positions * (prime - 1) * (2**27 - 1) % prime}


def test_more_products_than_fit_would_be_wrong(monkeypatch):
    """What shows that the test above can fail."""
    monkeypatch.setattr(encoded, "MAX_PRODUCTS", 10**9)
    with pytest.raises(AssertionError):
        test_sums_of_the_largest_products_are_exact(MAX_PRODUCTS + 8)


@pytest.mark.parametrize("changed", [[], [0], [699], range(340, 360)], ids=str)
def test_a_table_with_few_changed_rows_is_as_if_made_anew(changed):
    shape, rows = shape_of(700, 400, 2), drawn_rows(700, 50)
    before = EncodedTable.encode(rows, shape)
    after = rows.copy()
    after[list(changed)] ^= np.uint64(1)
    table, anew = EncodedTable.encode(after, shape, before), EncodedTable.encode(after, shape)
    assert len(table.parts) > 3
    assert table.made < anew.made == len(table.parts)
    assert (table.made == 0) == (len(changed) == 0)
    for one, other in zip(blocks_of(table), blocks_of(anew), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_of_another_shape_are_encoded_anew():
    rows = drawn_rows(700, 50)
    before = EncodedTable.encode(rows, shape_of(700, 400, 2))
    table = EncodedTable.encode(rows, shape_of(700, 400, 40), before)
    assert table.made == len(table.parts)


def test_a_table_in_files_is_that_in_memory(tmp_path):
    shape, rows = shape_of(700, 400, 2), drawn_rows(700, 50)
    held, filed = (EncodedTable.encode(rows, shape, folder=where) for where in (None, tmp_path))
    for one, other in zip(blocks_of(held), blocks_of(filed), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(isinstance(part, FilePart) for part in filed.parts)
    assert list(tmp_path.iterdir()) == []  # nothing is left, whatever ends the process


@pytest.mark.parametrize("memory", [1 << 40, 0], ids=["by the cache", "past it"])
def test_a_server_whose_table_is_in_files_answers_alike(monkeypatch, memory):
    monkeypatch.setattr(encoded, "memory_bytes", lambda: memory)
    database = database_of(records_of(1000, 500), 300)
    replies = []
    for max_memory in (0, 1 << 30):
        table = encode(database, max_memory=max_memory)
        assert table.shape.lane_blocks > 1
        server = server_of(database, table=table)
        client = OneServerClient(params_of(database), server.hint)
        asked = [client.query(np.arange(5), seeded(seed)).messages() for seed in (1, 2, 3)]
        replies.append([server.answer(messages) for messages in asked])
    assert replies[0] == replies[1]


def test_a_file_that_lost_its_end_is_told(tmp_path):
    shape = shape_of(700, 400, 2)
    table = EncodedTable.encode(drawn_rows(700, 50), shape, folder=tmp_path)
    os.ftruncate(table.parts[0].file.fileno(), shape.block_bytes // 2)
    with pytest.raises(StorageError, match="is damaged"):
        table.parts[0].block(0, mmap(-1, shape.block_bytes))


def test_a_table_that_is_served_lends_its_parts_to_the_next_and_one_that_is_gone_does_not():
    delivery, records = OneServerPir(), records_of(700, 400)
    first = delivery.open(private_table(records, 2, "round-1"))
    (kept,) = delivery._served.values()
    second = delivery.open(private_table(records, 2, "round-2"))
    (after,) = delivery._served.values()
    assert (kept.made, after.made) == (len(kept.parts), 0)
    assert first[0].hint != second[0].hint  # of other public polynomials
    del first, second, kept, after
    assert len(delivery._served) == 0


def test_a_folder_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(StorageError, match="cannot write a table to away"):
        EncodedTable.encode(drawn_rows(700, 50), shape_of(700, 400, 2), folder=tmp_path / "away")
