"""The board and the graph: everything is done once, and again where it was lost."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.engines.ray.board import Board, Task
from keyhole.engines.ray.graph import steps_of_sums, steps_of_updates
from keyhole.server.aggregation import BLOCK

NODES = st.lists(st.sampled_from("abc"), min_size=1, max_size=7)


@given(st.integers(1, 5000), NODES)
def test_every_job_is_trained_once_whatever_the_cluster(count, nodes):
    for steps in (steps_of_updates(count, nodes), steps_of_sums(count, nodes)):
        trained = [job for s in steps if s.kind.startswith("train") for job in s.jobs]
        assert sorted(trained) == list(range(count))


@given(st.integers(1, 20_000), NODES)
def test_sums_are_made_of_whole_blocks_and_merged_in_aligned_runs(count, nodes):
    steps = steps_of_sums(count, nodes)
    sums = [s.jobs for s in steps if s.kind in ("add", "train_and_add")]
    assert sums == [range(at, min(at + BLOCK, count)) for at in range(0, count, BLOCK)]
    for merge in (s for s in steps if s.kind == "merge"):
        blocks = [steps[need].jobs.start // BLOCK for need in merge.task.needs]
        assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        length = 1 << (len(blocks) - 1).bit_length()  # the last run may be shorter
        assert blocks[0] % length == 0


def test_traffic_to_the_driver_grows_with_nodes_and_not_with_clients():
    for count in (10_000, 100_000):
        steps = steps_of_sums(count, ["a"] * 8 + ["b"] * 8)
        needed = {need for step in steps for need in step.task.needs}
        assert len(steps) - len(needed) <= 2 * 2 * 2  # two a node, twice that before a power of two


def test_few_clients_are_shared_by_all_workers():
    steps = steps_of_sums(50, ["a", "b", "c"])
    assert sum(step.kind == "train" for step in steps) >= 3


@given(st.integers(1, 3000), NODES, st.integers(0, 2**32))
def test_a_board_ends_however_workers_and_results_are_lost(count, nodes, seed):
    """A driver that loses things at random, and checks that no task runs before what it needs."""
    random = Random(seed)
    board = Board([step.task for step in steps_of_sums(count, nodes)])
    done, running = set(), []
    for _ in range(100_000):
        if board.is_over:
            break
        index = board.take(random.choice(nodes))
        if index is not None:
            assert index not in running
            assert done >= set(board.tasks[index].needs)
            running.append(index)
        if running and (index is None or random.random() < 0.5):
            ended = running.pop(random.randrange(len(running)))
            fortune = random.random()
            if fortune < 0.1:
                board.put_back(ended)
            elif fortune < 0.2 and board.tasks[ended].needs:
                board.redo(ended)
                done -= everything_below(board.tasks, ended)
            else:
                board.finish(ended)
                done.add(ended)
    assert board.is_over
    assert not running


def everything_below(tasks, index):
    below = set(tasks[index].needs)
    return below.union(*(everything_below(tasks, need) for need in below))


@pytest.mark.parametrize(("node", "first"), [("a", 0), ("b", 1), ("c", 1)])
def test_a_worker_takes_its_own_nodes_tasks_and_helps_others_when_it_has_none(node, first):
    board = Board([Task(clients=1, home="a"), Task(clients=1, home="b"), Task(clients=1, home="b")])
    taken = board.take(node)
    assert taken == first if node != "c" else taken in (1, 2)


def test_the_last_blocks_are_cut_so_that_workers_end_together():
    """A block for each worker, in pieces; the others whole."""
    steps = steps_of_sums(1000, ["a", "a"])
    assert [len(step.jobs) for step in steps if step.kind == "train_and_add"] == [64] * 14
    assert [len(step.jobs) for step in steps if step.kind == "train"] == [16] * 4 + [16, 16, 8]
