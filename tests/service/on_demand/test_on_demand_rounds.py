"""Rounds on demand: one at a time, described like published ones, late devices told so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keyhole.delivery.sources import sources_of
from keyhole.errors import InputError, NotFoundError, TooLateError
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.on_demand import OnDemandRounds
from keyhole.wire.manifest import decode_manifest, name_round
from tests.helpers import DIGEST

WORD = KeySpace("word", 40)


@pytest.fixture
def state() -> ServerState:
    rng = np.random.default_rng(0)
    value = {
        "w": rng.normal(size=(40, 3)).astype(np.float32),
        "b": rng.normal(size=2).astype(np.float32),
    }
    return ServerState.dense(Layout.of(value, Cut(WORD, {"w": 0})), value, SGD(0.1))


@pytest.fixture
def rounds() -> Iterator[OnDemandRounds]:
    with ThreadPoolExecutor(1) as pool:
        yield OnDemandRounds(max_bytes=1 << 20, executor=pool)


def test_there_is_no_round_before_the_first(rounds: OnDemandRounds) -> None:
    assert rounds.current() is None
    with pytest.raises(NotFoundError), rounds.hold(f"0-{DIGEST}"):
        pass


def test_a_round_serves_every_part_of_the_state(rounds: OnDemandRounds, state: ServerState) -> None:
    sources = sources_of(state)
    name = rounds.publish(sources, state.layout, number=3, step=7, settings={"seed": 1})

    async def play() -> None:
        with rounds.hold(name) as opened:
            for table, source in zip(opened.tables, sources, strict=True):
                keys = np.arange(table.info.num_keys)[::-1]
                assert np.array_equal((await table.fetch(keys)).records, source.read(keys))

    asyncio.run(play())
    assert rounds.counts.evaluations == 41


def test_its_manifest_has_the_layout_and_no_segments(
    rounds: OnDemandRounds, state: ServerState
) -> None:
    name = rounds.publish(sources_of(state), state.layout, number=3, step=7, settings={"seed": 1})
    with rounds.hold(name) as opened:
        manifest = decode_manifest(opened.encoded)
        assert manifest == opened.manifest
        assert name == name_round(opened.encoded, 3) == opened.id
        assert [table.info for table in opened.tables] == list(manifest.tables)
    assert (manifest.number, manifest.step, manifest.settings) == (3, 7, {"seed": 1})
    assert manifest.layout is not None
    assert all(not table.segments for table in manifest.tables)


def test_a_round_closes_and_a_later_one_takes_its_place(
    rounds: OnDemandRounds, state: ServerState
) -> None:
    sources = sources_of(state)
    first = rounds.publish(sources, state.layout, number=0, cohort={"a": 0})
    current = rounds.current()
    assert current is not None
    assert (current.round, current.number, current.phase) == (first, 0, "open")
    assert current.cohort == {"a": 0}
    rounds.close()
    current = rounds.current()
    assert current is not None
    assert current.phase == "closed"
    with rounds.hold(first) as held:
        second = rounds.publish(sources, state.layout, number=1)
        assert held.id == first  # whoever has it finishes
    with pytest.raises(TooLateError), rounds.hold(first):
        pass
    with rounds.hold(second) as opened:
        assert opened.manifest.number == 1


@pytest.mark.parametrize("number", [4, 5])
def test_a_number_that_does_not_grow_is_refused(
    rounds: OnDemandRounds, state: ServerState, number: int
) -> None:
    first = rounds.publish(sources_of(state), state.layout, number=5)
    with pytest.raises(InputError, match="count rounds upwards"):
        rounds.publish(sources_of(state), state.layout, number=number)
    current = rounds.current()
    assert current is not None
    assert current.round == first


def test_small_tables_get_what_they_need(state: ServerState) -> None:
    with ThreadPoolExecutor(1) as pool:
        rounds = OnDemandRounds(max_bytes=600, executor=pool)
        name = rounds.publish(sources_of(state), state.layout, number=0)
        with rounds.hold(name) as opened:
            capacity = {table.info.name: table._slab.capacity for table in opened.tables}  # type: ignore[attr-defined]
    assert capacity["everyone"] == 1
    assert 0 < capacity["word"] < 40
