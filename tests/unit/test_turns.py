"""That an event loop comes back soon: much at once is done a little at a time, all of it, and in its order."""

from __future__ import annotations

import asyncio
import gc
from itertools import pairwise

from beats import with_beats
from trireme.base.garbage import MANY, collecting_rarely
from trireme.base.turns import Turns, by_turns


def test_a_thousand_calls_are_made_in_their_order_and_others_have_their_turns_in_between():
    async def main() -> tuple[list[int], list[int]]:
        made: list[int] = []
        turns = Turns(at_once=10)
        for number in range(1000):
            turns.call(made.append, number)
        seen = [0, len(made)]  # the first call, alone, is made at once
        while len(made) < 1000:
            await asyncio.sleep(0)
            seen.append(len(made))
        return made, seen

    made, seen = asyncio.run(main())
    assert made == list(range(1000))
    assert seen[1] > 0
    assert max(after - before for before, after in pairwise(seen)) <= 10


def test_calls_made_by_calls_wait_behind_those_that_were_made_before():
    async def main() -> list[int]:
        made: list[int] = []
        turns = Turns(at_once=1)

        def act(number: int) -> None:
            made.append(number)
            if number < 3:
                turns.call(act, number + 10)

        for number in range(5):
            turns.call(act, number)
        while len(made) < 8:
            await asyncio.sleep(0)
        return made

    assert asyncio.run(main()) == [0, 10, 1, 2, 3, 4, 11, 12]


def test_whatever_is_left_can_be_finished_at_once():
    async def main() -> list[int]:
        made: list[int] = []
        turns = Turns(at_once=2)
        for number in range(9):
            turns.call(made.append, number)
        assert made == [0, 1]
        turns.finish()
        return made

    assert asyncio.run(main()) == list(range(9))


def test_items_come_by_turns_in_their_order():
    async def collected() -> list[int]:
        return [item async for item in by_turns(range(100), 10)]

    items, beats = asyncio.run(with_beats(collected()))
    assert items == list(range(100))
    assert beats >= 10


def test_collecting_rarely_leaves_the_collector_as_it_was():
    gc.unfreeze()  # what a test before may have set aside
    before = gc.get_threshold()
    with collecting_rarely():
        assert gc.get_threshold()[0] == MANY
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collecting_rarely():
        pass
    assert gc.get_freeze_count() >= frozen, "what was set aside before stays so"
    gc.unfreeze()
