"""What a server has answered: nothing twice, nothing forgotten, and not much memory."""

import tracemalloc
from hashlib import sha256
from threading import Barrier, Thread

import pytest

from keyhole.delivery.pir import messages as module
from keyhole.delivery.pir.messages import MAX_QUERIES, AnsweredQueries
from keyhole.errors import InputError, ReplayError

QUERIES = [bytes([i]) * 40 for i in range(9)]


def claim(answered, queries):
    """Queries that are answered at once."""
    with answered.claim(queries):
        pass


def many(count, first=0):
    return [sha256(i.to_bytes(8, "little")).digest() for i in range(first, first + count)]


def assert_refused(answered, queries):
    for query in queries:
        with pytest.raises(ReplayError, match="1 of 1 a second time"):
            claim(answered, [query])


def test_a_server_that_can_remember_no_more_refuses_and_forgets_nothing():
    answered = AnsweredQueries(limit=3)
    claim(answered, QUERIES[:2])
    with pytest.raises(ReplayError, match="2 after 2; expected 3 in all"):
        claim(answered, QUERIES[2:4])
    claim(answered, QUERIES[2:3])
    assert len(answered) == 3
    assert_refused(answered, QUERIES[:3])
    with pytest.raises(ReplayError, match="3 in all"):
        claim(answered, QUERIES[3:4])


def test_one_replay_among_queries_marks_none_of_them_as_answered():
    answered = AnsweredQueries()
    claim(answered, QUERIES[:1])
    with pytest.raises(ReplayError, match="1 of 3"):
        claim(answered, QUERIES[:3])
    claim(answered, QUERIES[1:3])


def test_a_query_twice_at_once_is_a_replay():
    with pytest.raises(ReplayError, match="1 of 2"):
        claim(AnsweredQueries(), [QUERIES[0], QUERIES[0]])


def test_queries_whose_answer_fails_are_given_back_with_their_room():
    answered = AnsweredQueries(limit=2)
    for error in (MemoryError, KeyboardInterrupt):
        with pytest.raises(error), answered.claim(QUERIES[:2]):
            raise error
        assert len(answered) == 0
    claim(answered, QUERIES[:2])
    assert_refused(answered, QUERIES[:2])


def test_a_query_that_is_being_answered_is_a_replay_and_takes_room():
    answered = AnsweredQueries(limit=2)
    with answered.claim(QUERIES[:1]):
        assert_refused(answered, QUERIES[:1])
        with pytest.raises(ReplayError, match="2 in all"):
            claim(answered, QUERIES[1:3])
    assert_refused(answered, QUERIES[:1])


def test_what_is_sorted_in_is_still_known(monkeypatch):
    """Checks with the same first half among them, which honest ones do not have."""
    monkeypatch.setattr(module, "_FRESH", 4)
    alike = [bytes([7]) * 8 + bytes([i]) * 8 for i in range(5)]
    queries, answered = [*many(50), *alike], AnsweredQueries()
    for start in range(0, len(queries), 3):
        claim(answered, queries[start : start + 3])
    assert len(answered) == len(queries)
    assert len(answered._fresh) < 4
    assert_refused(answered, queries)
    with pytest.raises(ReplayError, match="4 of 6 a second time"):
        claim(answered, [*queries[:2], *alike[:2], *many(2, first=100)])
    claim(answered, many(2, first=100))


def test_memory_is_what_is_stated():
    """16 bytes a query once they are sorted in, and no more than 110 for each of the last."""
    count = 4 << 14
    tracemalloc.start()
    try:
        answered = AnsweredQueries()
        for start in range(0, count + 999, 512):
            claim(answered, many(512, first=start))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(answered) >= count
    assert held < 16 * count + 110 * (1 << 14)
    assert MAX_QUERIES == 4_194_304


def test_of_threads_that_claim_one_query_at_once_one_gets_it():
    answered, start, got = AnsweredQueries(), Barrier(8), []

    def run():
        start.wait()
        for query in many(200):
            try:
                claim(answered, [query])
            except ReplayError:
                continue
            got.append(query)

    threads = [Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(many(200))


def test_a_table_that_would_answer_nobody_is_refused():
    with pytest.raises(InputError, match="answers nobody"):
        AnsweredQueries(limit=0)
