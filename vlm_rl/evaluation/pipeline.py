"""A loop of three stages in which the two lighter ones run beside the heavy one.

    for graded in overlapped(batches, before=build_prompts, heavy=generate, after=grade):
        ...

It gives what the plain loop gives, in its order: only the waiting is less.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Ready = TypeVar("Ready")
Made = TypeVar("Made")
Done = TypeVar("Done")


def overlapped(
    items: Sequence[Item],
    *,
    before: Callable[[Item], Ready],
    heavy: Callable[[Ready], Made],
    after: Callable[[Item, Ready, Made], Done],
) -> Generator[Done]:
    """after(item, ready, heavy(ready)) of every item, with ready = before(item).

    `heavy` runs in the caller's thread; meanwhile `before` of the next item and `after` of the last one run in a
    thread each. At most three items are in hand at a time. What a stage raises is raised here when the plain loop
    would have: once everything that was due before it has been given; and nothing is left running.
    """
    with ThreadPoolExecutor(1, "ahead") as ahead, ThreadPoolExecutor(1, "behind") as behind:
        coming = [ahead.submit(before, item) for item in items[:1]]
        finishing: list[Future[Done]] = []
        for place, item in enumerate(items):
            try:
                ready = coming.pop().result()
                coming = [ahead.submit(before, following) for following in items[place + 1 : place + 2]]
                made = heavy(ready)
            finally:  # an error of this item waits for the one before
                yield from (one.result() for one in finishing)
            finishing = [behind.submit(after, item, ready, made)]
        yield from (one.result() for one in finishing)
