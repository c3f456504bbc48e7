"""The tables of rounds at a server: made once, kept for two rounds, bounded, checked."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keyhole.delivery.pir.database import Database
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.delivery.sources import sources_of
from keyhole.errors import NotFoundError, StorageError, TooLateError
from keyhole.service.limits import Gate
from keyhole.service.metrics import Metrics
from keyhole.service.on_demand import OnDemandRounds
from keyhole.service.private import PrivateTables
from keyhole.wire.private import QuerySettings
from tests.helpers import LAYOUTS, LONG
from tests.service.memory_rounds import MemoryRounds
from tests.service.pir.one_service import SERVER_0, SERVER_1, WORD
from tests.service.small_service import random_state


def open_databases(rounds, role=SERVER_0, **settings):
    settings = QuerySettings(role, **{"max_keys": 4, **settings})
    return PrivateTables(rounds, settings, Gate(1, 100), Metrics())


async def open_table(made, rounds, round_id, place=WORD):
    with rounds.hold(round_id) as held:
        return await made.table(held, place)


def counted(monkeypatch):
    """How many databases were made, and of which rounds; each waits for `go`."""
    calls, go, real = [], threading.Event(), Database.of
    go.set()

    def of(table):
        calls.append(table.name)
        go.wait(LONG)
        return real(table)

    monkeypatch.setattr(Database, "of", staticmethod(of))
    return calls, go


def test_those_who_come_first_wait_for_one_table(monkeypatch):
    rounds = MemoryRounds()
    opened, made = rounds.open(3), open_databases(rounds)
    calls, go = counted(monkeypatch)
    go.clear()

    async def run():
        waiting = [asyncio.create_task(open_table(made, rounds, opened.id)) for _ in range(5)]
        while not calls:
            await asyncio.sleep(0.001)
        waiting[0].cancel()  # the first one leaves: the others still get what it had begun
        go.set()
        found = await asyncio.gather(*waiting[1:])
        return {id(each) for each in found}

    assert len(asyncio.run(run())) == 1
    assert len(calls) == 1
    assert rounds.held == 0


def test_tables_of_the_two_newest_rounds_are_kept(monkeypatch):
    rounds = MemoryRounds()
    ids = [rounds.open(number).id for number in (3, 4, 5)]
    made, (calls, _) = open_databases(rounds), counted(monkeypatch)

    async def run():
        for round_id in (ids[0], ids[1], ids[0], ids[2], ids[1]):
            await open_table(made, rounds, round_id)
        assert len(calls) == 3
        with pytest.raises(TooLateError, match="2 newest"):
            await open_table(made, rounds, ids[0])
        assert made.held_bytes == 2 * TwoServerPir().held_bytes(40, 12, 4)

    asyncio.run(run())


def test_memory_is_bounded_and_older_rounds_make_room():
    rounds = MemoryRounds()
    old, new = rounds.open(3).id, rounds.open(4).id
    size = TwoServerPir().held_bytes(40, 12, 4)
    made = open_databases(rounds, max_bytes=2 * size - 1)

    async def run():
        await open_table(made, rounds, old)
        await open_table(made, rounds, new)
        assert made.held_bytes == size
        with pytest.raises(TooLateError):  # it had room once, and makes none for itself
            await open_table(made, rounds, old)

    asyncio.run(run())
    tight = open_databases(rounds, max_bytes=size - 1)
    with pytest.raises(NotFoundError, match="too large"):
        asyncio.run(open_table(tight, rounds, new))


def test_a_damaged_table_is_not_served_and_looked_at_again():
    rounds = MemoryRounds()
    opened, made = rounds.open(3), open_databases(rounds)
    opened.tables[WORD].records[5, 1] ^= 1
    with pytest.raises(StorageError, match="damaged"):
        asyncio.run(open_table(made, rounds, opened.id))
    assert made.held_bytes == 0
    opened.tables[WORD].records[5, 1] ^= 1
    assert asyncio.run(open_table(made, rounds, opened.id)).public.num_keys == 40


@pytest.mark.parametrize("name", ["rows with a broadcast bias", "one parameter cut twice"])
def test_a_round_on_demand_is_computed_once_and_retrieved_from(name):
    layout = LAYOUTS[name]
    state = random_state(layout)

    async def run(executor):
        rounds = OnDemandRounds(max_bytes=1 << 20, executor=executor)
        told = {"keys_per_client": {space.name: 2 for space in layout.spaces}}
        round_id = rounds.publish(sources_of(state), layout, number=1, settings=told)
        made = [open_databases(rounds, role, max_keys=None) for role in (SERVER_0, SERVER_1)]
        for place, part in enumerate(layout.parts):
            if not part.product.factors:
                continue
            tables = [await open_table(each, rounds, round_id, place) for each in made]
            question = TwoServerPir().client(tables[0].server.params).query(np.array([3, 1]))
            sent = zip(tables, question.messages(), strict=True)
            replies = [await table.passes.answer(message) for table, message in sent]
            records = question.decode(replies).records
            with rounds.hold(round_id) as held:
                plain = await held.tables[place].fetch(np.array([3, 1]))
            np.testing.assert_array_equal(records, plain.records)
        cut = sum(part.space.num_keys for part in layout.parts if part.product.factors)
        assert rounds.counts.evaluations == cut

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(run(executor))


def test_queries_of_a_table_that_is_cut_twice_hold_every_pair_of_keys():
    layout = LAYOUTS["one parameter cut twice"]
    with ThreadPoolExecutor(1) as executor:
        rounds = OnDemandRounds(max_bytes=1 << 20, executor=executor)
        told = {"keys_per_client": {"neuron": 2, "second": 3}}
        round_id = rounds.publish(sources_of(random_state(layout)), layout, number=1, settings=told)
        made = open_databases(rounds, max_keys=None)

        async def limit(place):
            return (await open_table(made, rounds, round_id, place)).public.max_keys

        found = {
            tuple(f.name for f in part.product.factors): asyncio.run(limit(place))
            for place, part in enumerate(layout.parts)
        }
    assert found == {("neuron",): 2, ("second",): 3, ("neuron", "second"): 6}
