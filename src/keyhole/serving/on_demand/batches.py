"""Batches of misses: computed one after the other beside the event loop, waited for by many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from keyhole.delivery.records import RecordArray
from keyhole.errors import KeyholeError
from keyhole.serving.wire import Sums
from keyhole.types import KeyArray

__all__ = ["Batch", "BatchQueue"]

_GATHERING = 0.001  # seconds that the first miss of an idle table waits for company


class Batch:
    """Misses that are computed together.

    Kept keys have a slot and are distinct over all requests; loose ones have none, may repeat, and
    leave their result with the batch until the last request that waits for it has taken it.
    """

    def __init__(self, number: int, done: asyncio.Future[None]) -> None:
        self.number = number
        self.size = 0
        self.loose_keys: KeyArray  # distinct, ascending; these three are there when it has ended
        self.loose_records: RecordArray
        self.loose_sums: Sums
        self._kept: list[tuple[KeyArray, KeyArray]] = []
        self._loose: list[KeyArray] = []
        self._done = done  # never holds an error: nobody may be left to take it
        self._error: KeyholeError | None = None

    def keep(self, keys: KeyArray, slots: KeyArray) -> None:
        """Adds keys whose records go to these slots."""
        self._kept.append((keys, slots))
        self.size += len(keys)

    def add_loose(self, keys: KeyArray) -> None:
        """Adds keys whose records are not kept."""
        self._loose.append(keys)
        self.size += len(keys)

    def kept(self) -> tuple[KeyArray, KeyArray]:
        """The kept keys and their slots."""
        none = np.empty(0, np.int64)
        return (
            np.concatenate([none, *(keys for keys, _ in self._kept)]),
            np.concatenate([none, *(slots for _, slots in self._kept)]),
        )

    def loose(self) -> KeyArray:
        """The distinct loose keys, ascending: the order of their records."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._loose]))

    async def wait(self) -> None:
        """Returns when the batch is computed; whoever waits may go without disturbing it.

        Raises:
            KeyholeError: it failed; the same for everyone.
        """
        await asyncio.shield(self._done)
        if self._error is not None:
            # Else the traceback of one error would grow with everyone who raises it.
            raise self._error.with_traceback(None)

    def finish(self, error: KeyholeError | None) -> None:
        """Wakes everyone who waits."""
        self._error = error
        self._done.set_result(None)


class BatchQueue:
    """Runs batches one at a time on an executor; a full one, or one that is due, starts.

    A batch starts when the one before it is done, or a millisecond after its first key.

    Args:
        executor: threads to compute on.
        batch_keys: from which a batch takes no further request.
        compute: called on the executor.
        settle: called on the event loop with each batch that has ended, before those who wait.
    """

    def __init__(
        self,
        executor: Executor,
        batch_keys: int,
        compute: Callable[[Batch], None],
        settle: Callable[[Batch, KeyholeError | None], None],
    ) -> None:
        self._executor, self._batch_keys = executor, batch_keys
        self._compute, self._settle = compute, settle
        self._waiting: deque[Batch] = deque()
        self._under_way: dict[int, Batch] = {}  # by number: the waiting ones and one that runs
        self._next_number = 0
        self._is_idle = True

    def __getitem__(self, number: int) -> Batch:
        """A batch that has not ended."""
        return self._under_way[number]

    def open(self) -> Batch:
        """The batch that takes misses now; it will be computed without further doing."""
        if not self._waiting or self._waiting[-1].size >= self._batch_keys:
            loop = asyncio.get_running_loop()
            batch = Batch(self._next_number, loop.create_future())
            self._next_number += 1
            self._waiting.append(batch)
            self._under_way[batch.number] = batch
            if self._is_idle:
                self._is_idle = False
                loop.call_later(_GATHERING, self._start, loop)
        return self._waiting[-1]

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hands the next batch to the executor, if there is one."""
        self._is_idle = not self._waiting
        if self._is_idle:
            return
        batch = self._waiting.popleft()
        try:
            work = loop.run_in_executor(self._executor, self._compute, batch)
        except RuntimeError as error:  # an executor that has been shut down takes no work
            self._end(batch, error, loop)
        else:
            work.add_done_callback(lambda work: self._end(batch, _failure(work), loop))

    def _end(
        self, batch: Batch, failure: BaseException | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        error = None if failure is None else _without_keys(failure)
        del self._under_way[batch.number]
        self._settle(batch, error)
        batch.finish(error)
        self._start(loop)


def _failure(work: asyncio.Future[None]) -> BaseException | None:
    return asyncio.CancelledError() if work.cancelled() else work.exception()


def _without_keys(failure: BaseException) -> KeyholeError:
    """Our own errors hold no keys; the text of any other may, so only its kind is told."""
    if isinstance(failure, KeyholeError):
        return failure
    return KeyholeError(
        "slices cannot be computed",
        got=type(failure).__name__,
        allowed="a select function that takes every key of its table",
        fix="call it in process with keys of one's own to see the error",
    )
