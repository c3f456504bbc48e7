"""The board and the graph: everything is done once, and again where it was lost."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.engines.ray.schedule import (
    TaskBoard,
    WorkTask,
    tasks_of_choices,
    tasks_of_sums,
    tasks_of_updates,
)
from keyhole.server.row_sums import BLOCK

NODES = st.lists(st.sampled_from("abc"), min_size=1, max_size=7)


@given(st.integers(1, 5000), NODES)
def test_every_job_is_done_once_whatever_the_cluster(count, nodes):
    for cut in (tasks_of_choices, tasks_of_updates, tasks_of_sums):
        assert [job for step in cut(count, nodes) for job in step.jobs] == list(range(count))


@given(st.integers(1, 20_000), NODES)
def test_sums_are_made_of_whole_blocks_and_merged_in_aligned_runs(count, nodes):
    steps = tasks_of_sums(count, nodes)
    spans = [span_of(steps, index) for index in range(len(steps))]
    for step, span in zip(steps, spans, strict=True):
        if step.kind == "merge":
            parts = [spans[need] for need in step.needs]
            assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        length = 1 << (-(-len(span) // BLOCK) - 1).bit_length()  # the last run may be shorter
        assert span.start % (length * BLOCK) == 0
    taken = {other for step in steps for other in (*step.needs, step.after)}
    ends = [span for index, span in enumerate(spans) if index not in taken]
    assert [job for span in ends for job in span] == list(range(count))


def span_of(steps, index):
    """The jobs whose sum a step has."""
    step = steps[index]
    if step.kind == "merge":
        parts = [span_of(steps, need) for need in step.needs]
        return range(parts[0].start, parts[-1].stop)
    if step.after is None:
        return step.jobs
    before = span_of(steps, step.after)
    assert before.stop == step.jobs.start, "pieces follow on each other"
    assert step.jobs.stop - before.start <= BLOCK, "within one block"
    return range(before.start, step.jobs.stop)


def test_traffic_to_the_driver_grows_with_nodes_and_not_with_clients():
    for count in (10_000, 100_000):
        steps = tasks_of_sums(count, ["a"] * 8 + ["b"] * 8)
        taken = {other for step in steps for other in (*step.needs, step.after)}
        assert (
            len(set(range(len(steps))) - taken) <= 2 * 2 * 2
        )  # two a node, twice that before a power of two


def test_few_clients_are_shared_by_all_workers():
    steps = tasks_of_sums(50, ["a", "b", "c"])
    assert len(steps) >= 3


@given(st.integers(1, 3000), NODES, st.integers(0, 2**32))
def test_a_board_ends_however_workers_and_results_are_lost(count, nodes, seed):
    """A driver that loses things at random, and checks that no task runs before what it needs, nor
    ends before what it goes on from."""
    random = Random(seed)
    board = TaskBoard(tasks_of_sums(count, nodes))
    done, given = set(), []
    for _ in range(100_000):
        if board.is_over:
            break
        index = board.take(random.choice(nodes))
        if index is not None:
            task = board.tasks[index]
            assert index not in given
            assert done >= set(task.needs)
            assert task.after is None or task.after in done or task.after in given
            given.append(index)
        if given and (index is None or random.random() < 0.5):
            ended = random.choice(given)
            after = board.tasks[ended].after
            fortune = random.random()
            if fortune < 0.1:
                board.put_back(ended)
            elif fortune < 0.2:
                board.redo(ended)
                done = {index for index in done if board.is_done(index)}
            elif after is None or after in done:
                board.finish(ended)
                done.add(ended)
            else:
                continue  # it waits
            given.remove(ended)
    assert board.is_over
    assert not given


def test_a_piece_begins_once_the_one_before_has_begun():
    pieces = [
        WorkTask("train", range(1), home="a", is_piece=True, after=after) for after in (None, 0, 1)
    ]
    board = TaskBoard(pieces)
    assert [board.take("b"), board.take("b")] == [0, 1]
    board.put_back(1)
    board.put_back(0)
    assert [board.take("a") for _ in range(4)] == [0, 1, 2, None]


def test_a_piece_is_not_given_to_who_has_something_else_to_do_first():
    """Else whoever goes on from it would wait for that, too."""
    board = TaskBoard(
        [
            WorkTask("train", range(9), home="a"),
            WorkTask("train", range(1), home="a", is_piece=True),
        ]
    )
    assert board.take("a") == 0
    assert board.take("a", is_idle=False) is None
    assert board.take("b") == 1


def test_what_was_handed_on_is_made_again_from_the_first_piece():
    pieces = [
        WorkTask("train", range(n), home="a", after=n - 2 if n > 1 else None) for n in (1, 2, 3)
    ]
    board = TaskBoard([*pieces, WorkTask("merge", needs=(2,), home="a")])
    for index in range(3):
        assert board.take("a") == index
        board.finish(index)
    assert board.take("a") == 3
    assert board.redo(3) == 1 + 2 + 3
    assert board.take("a") == 0


@pytest.mark.parametrize(("node", "first"), [("a", 0), ("b", 1), ("c", 1)])
def test_a_worker_takes_its_own_nodes_tasks_and_helps_others_when_it_has_none(node, first):
    board = TaskBoard(
        [
            WorkTask("train", range(1), home="a"),
            WorkTask("train", range(1), home="b"),
            WorkTask("train", range(1), home="b"),
        ]
    )
    taken = board.take(node)
    assert taken == first if node != "c" else taken in (1, 2)


def test_the_last_blocks_are_cut_so_that_workers_end_together():
    """A block for each worker, in pieces; the others whole, two at a time."""
    steps = tasks_of_sums(1000, ["a", "a"])
    trained = [len(step.jobs) for step in steps if step.kind == "train_and_add"]
    assert trained == [128] * 7 + [16] * 4 + [16, 16, 8]
