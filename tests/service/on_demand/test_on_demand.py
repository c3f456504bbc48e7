"""Slices on demand: the bytes of the source, one evaluation for each key, bounded, never stuck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import hash_leaves
from keyhole.delivery.records import Coding, RecordArray, RecordField, Records
from keyhole.delivery.sources import FunctionSource
from keyhole.errors import InputError, KeyholeError, NotFoundError, ShapeError
from keyhole.service.on_demand import SlabTable, SliceSlab, whole_bytes
from keyhole.wire.manifest import table_info
from tests.helpers import LONG

WIDTH = 3  # numbers of a slice


class CountingSource:
    """Records that follow from their key; remembers which keys it was asked for.

    Args:
        num_keys: K.
        gate: held shut, it keeps every call waiting.
    """

    def __init__(self, num_keys: int, gate: threading.Event | None = None) -> None:
        self.records = Records("word", num_keys, (RecordField("w", (WIDTH,), np.dtype("f4")),))
        self.calls: list[KeyArray] = []
        self.fails = False
        self.is_called = threading.Event()
        self._gate = gate

    def read(self, keys: KeyArray) -> RecordArray:
        self.calls.append(keys.copy())
        self.is_called.set()
        if self._gate is not None:
            assert self._gate.wait(LONG)
        if self.fails:
            raise ZeroDivisionError(f"no slice for {keys}")
        return self.plain(keys)

    def plain(self, keys: KeyArray) -> RecordArray:
        """The records, without remembering."""
        mixed = keys.astype(np.uint64)[:, None] * np.arange(3, 3 + 2 * WIDTH, 2, np.uint64)
        return mixed.astype("<u4").view(np.uint8)

    @property
    def evaluated(self) -> KeyArray:
        return np.concatenate([np.empty(0, np.int64), *self.calls])


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def table_of(
    source: CountingSource, executor: ThreadPoolExecutor, max_bytes: int = 1 << 20, **options: int
) -> SlabTable:
    info = table_info(source.records)
    return SlabTable(source, info, max_bytes=max_bytes, executor=executor, **options)


def zipf_keys(num_keys: int, count: int, seed: int) -> KeyArray:
    """Keys of which few are asked for by nearly everyone."""
    return np.random.default_rng(seed).zipf(1.2, count) % num_keys


async def fetch_all(table: SlabTable, asks: list[KeyArray]) -> None:
    """Asks all at once and compares every answer with the definition."""
    answers = await asyncio.gather(*(table.fetch(keys) for keys in asks))
    source = table._source
    assert isinstance(source, CountingSource)
    for keys, answer in zip(asks, answers, strict=True):
        assert answer.records.tobytes() == source.plain(keys).tobytes()
        assert np.array_equal(answer.leaves, hash_leaves(source.plain(keys)))


SMALL = whole_bytes(50, 4 * WIDTH)  # memory for all of 50 keys
KEY_LISTS = st.lists(st.lists(st.integers(0, 49), max_size=12), max_size=12)


@given(KEY_LISTS, st.sampled_from([SMALL, SMALL // 2, SMALL - 1]), st.sampled_from([1, 7, 4096]))
def test_any_key_lists_give_the_bytes_of_the_source(
    executor: ThreadPoolExecutor, lists: list[list[int]], max_bytes: int, batch_keys: int
) -> None:
    table = table_of(CountingSource(50), executor, max_bytes, batch_keys=batch_keys)
    asks = [np.array(keys, np.int64) for keys in lists]
    asyncio.run(fetch_all(table, asks))
    asyncio.run(fetch_all(table, asks[::-1]))  # a second loop finds nothing left over


@pytest.mark.parametrize("num_keys", [10**4, 2**62])
def test_each_distinct_key_is_evaluated_once_under_2000_requests(
    executor: ThreadPoolExecutor, num_keys: int
) -> None:
    source = CountingSource(num_keys)
    table = table_of(source, executor, 4 << 20)
    asks = [zipf_keys(10**4, 50, seed) * (num_keys // 10**4) for seed in range(2000)]
    asyncio.run(fetch_all(table, asks))
    distinct = np.unique(np.concatenate(asks))
    assert np.array_equal(np.sort(source.evaluated), distinct)
    assert table.counts.evaluations == len(distinct)
    assert table.counts.hits == 2000 * 50 - len(distinct)
    assert table.counts.batches == len(source.calls) < 200
    assert table.counts.uncached == table.counts.failures == 0


def test_codings_and_select_functions_go_through(executor: ThreadPoolExecutor) -> None:
    field = RecordField("w", (4, 2), np.dtype("f4"))
    records = Records("word", 100, (field,), Coding("uint4", seed=3))
    x = np.random.default_rng(0).normal(size=(100, 4, 2)).astype(np.float32)
    source = FunctionSource(records, x, lambda x, keys: {"w": np.tanh(x[keys])})
    table = SlabTable(source, table_info(records), max_bytes=10**6, executor=executor)
    keys = np.array([7, 3, 7, 99])
    assert np.array_equal(asyncio.run(table.fetch(keys)).records, source.read(keys))


def test_no_keys_are_answered_without_evaluation(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(10)
    answer = asyncio.run(table_of(source, executor).fetch(np.empty(0, np.int64)))
    assert answer.records.shape == (0, 4 * WIDTH)
    assert not source.calls


def test_requests_that_meet_share_a_batch(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(100)
    asyncio.run(fetch_all(table_of(source, executor), [np.array([k]) for k in range(100)]))
    assert len(source.calls) == 1


def test_a_full_batch_lets_the_next_begin(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(100)
    table = table_of(source, executor, batch_keys=10)
    asyncio.run(fetch_all(table, [np.array([k]) for k in range(100)]))
    assert [len(keys) for keys in source.calls] == [10] * 10


def test_the_source_gets_one_large_request_in_parts(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(100)
    asyncio.run(fetch_all(table_of(source, executor, batch_keys=30), [np.arange(100)]))
    assert [len(keys) for keys in source.calls] == [30, 30, 30, 10]


def test_the_event_loop_goes_on_while_a_batch_is_computed(executor: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    source = CountingSource(100, gate)
    table = table_of(source, executor)

    async def play() -> None:
        asked = asyncio.create_task(table.fetch(np.arange(5)))
        await asyncio.to_thread(source.is_called.wait, 60)
        assert not asked.done()
        gate.set()  # only a loop that runs gets here
        await asked

    asyncio.run(play())


def test_a_key_under_way_is_waited_for_and_not_evaluated_again(
    executor: ThreadPoolExecutor,
) -> None:
    gate = threading.Event()
    source = CountingSource(100, gate)
    table = table_of(source, executor)

    async def play() -> None:
        first = asyncio.create_task(table.fetch(np.array([1, 2])))
        await asyncio.to_thread(source.is_called.wait, 60)
        second = asyncio.create_task(fetch_all(table, [np.array([2, 3, 1])]))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, second)

    asyncio.run(play())
    assert [keys.tolist() for keys in source.calls] == [[1, 2], [3]]


def test_a_failing_select_function_fails_everyone_and_is_tried_again(
    executor: ThreadPoolExecutor,
) -> None:
    source = CountingSource(100)
    table = table_of(source, executor)
    asks = [np.array([1, 2]), np.array([2, 3]), np.array([2])]

    async def play() -> None:
        source.fails = True
        errors = await asyncio.gather(*(table.fetch(keys) for keys in asks), return_exceptions=True)
        assert len({id(error) for error in errors}) == 1
        assert isinstance(errors[0], KeyholeError)
        source.fails = False
        await fetch_all(table, asks)

    asyncio.run(play())
    assert len(source.calls) == 2
    assert (table.counts.batches, table.counts.failures, table.counts.evaluations) == (2, 1, 3)


def test_a_failure_does_not_tell_the_keys(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(10**6)
    source.fails = True
    with pytest.raises(KeyholeError, match="ZeroDivisionError") as caught:
        asyncio.run(table_of(source, executor).fetch(np.array([314159])))
    seen = (caught.value, caught.value.__cause__, caught.value.__context__)
    assert "314159" not in repr(seen)


def test_an_error_of_our_own_arrives_as_it_is(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(10)
    source.plain = lambda keys: np.zeros((len(keys) + 1, 4 * WIDTH), np.uint8)  # type: ignore[method-assign]
    with pytest.raises(ShapeError, match="one record for each key"):
        asyncio.run(table_of(source, executor).fetch(np.array([3])))


def test_a_cancelled_request_does_not_cancel_what_others_wait_for(
    executor: ThreadPoolExecutor,
) -> None:
    gate = threading.Event()
    source = CountingSource(100, gate)
    table = table_of(source, executor)

    async def play() -> None:
        gone = asyncio.create_task(table.fetch(np.array([1, 2])))
        await asyncio.to_thread(source.is_called.wait, 60)
        stays = asyncio.create_task(fetch_all(table, [np.array([2, 1])]))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        gate.set()
        await stays

    asyncio.run(play())
    assert len(source.evaluated) == 2


def test_a_failure_that_nobody_waits_for_is_silent_and_tried_again(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    source = CountingSource(100, gate)
    source.fails = True
    table = table_of(source, executor)

    async def play() -> None:
        gone = asyncio.create_task(table.fetch(np.array([1])))
        await asyncio.to_thread(source.is_called.wait, 60)
        gone.cancel()
        gate.set()
        while not table.counts.failures:
            await asyncio.sleep(0)
        source.fails = False
        await fetch_all(table, [np.array([1])])

    asyncio.run(play())
    assert not caplog.records


def test_an_executor_that_is_shut_down_is_an_error_and_no_hang() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(KeyholeError, match="RuntimeError"):
        asyncio.run(table_of(CountingSource(10), pool).fetch(np.array([1])))


def test_keys_beyond_the_capacity_are_computed_and_not_kept(executor: ThreadPoolExecutor) -> None:
    source = CountingSource(10**6)
    table = table_of(source, executor, 10_000)
    capacity = table._slab.capacity
    assert 0 < capacity < 100
    asks = [np.arange(start, start + 20) for start in range(0, 400, 20)]
    asyncio.run(fetch_all(table, asks))
    assert (table.counts.evaluations, table.counts.uncached) == (400, 400 - capacity)
    asyncio.run(fetch_all(table, asks))
    assert table.counts.evaluations == 400 + 400 - capacity
    assert table.counts.hits == capacity


def test_uncached_keys_of_requests_that_meet_are_evaluated_once(
    executor: ThreadPoolExecutor,
) -> None:
    source = CountingSource(10**6)
    table = table_of(source, executor, 200)  # room for one
    asks = [np.array([5]), np.array([9, 7, 9]), np.array([7, 5])]
    asyncio.run(fetch_all(table, asks))
    assert sorted(source.evaluated.tolist()) == [5, 7, 9]


@pytest.mark.parametrize("num_keys", [1000, 10**5, 2**62])
def test_memory_stays_below_its_bound(num_keys: int) -> None:
    max_bytes, rng = 200_000, np.random.default_rng(0)
    slab = SliceSlab(num_keys, 100, max_bytes)
    for _ in range(50):
        slab.claim(rng.integers(0, num_keys, 100))
    index = slab._index.nbytes if slab._index is not None else 0
    taken = slab.records.nbytes + slab.leaves.nbytes + slab.states.nbytes + slab.tickets.nbytes
    assert taken + index <= max_bytes + 24_000  # an empty index takes 20 kB


def test_a_key_keeps_its_slot_when_the_slab_is_full() -> None:
    slab = SliceSlab(2**62, 100, 10_000)
    first = slab.claim(np.arange(slab.capacity + 5))
    assert (first >= 0).sum() == slab.capacity
    assert np.array_equal(slab.claim(np.arange(slab.capacity + 5)), first)


def test_memory_for_no_slice_is_refused(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(InputError, match="raise max_bytes"):
        table_of(CountingSource(1000), executor, 50)


def test_a_batch_of_no_keys_is_refused(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(InputError, match="raise batch_keys"):
        table_of(CountingSource(1000), executor, batch_keys=0)


def test_slices_on_demand_have_no_segments(executor: ThreadPoolExecutor) -> None:
    table = table_of(CountingSource(1000), executor)
    with pytest.raises(NotFoundError):
        table.segment(0)
