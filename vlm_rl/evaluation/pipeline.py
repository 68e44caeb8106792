"""Run a loop of three stages, the two lighter ones beside the heavy one.

    for graded in overlapped(batches, before=build_prompts, heavy=generate, after=grade):
        ...

The results and their order are those of the plain loop; only the waiting is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Ready = TypeVar("Ready")
Made = TypeVar("Made")
Finished = TypeVar("Finished")


def overlapped(
    items: Sequence[Item],
    *,
    before: Callable[[Item], Ready],
    heavy: Callable[[Ready], Made],
    after: Callable[[Item, Ready, Made], Finished],
) -> Generator[Finished]:
    """Yield after(item, ready, heavy(ready)) of every item, with ready = before(item).

    Args:
        items: in the order of the results.
        before: prepares an item, in a thread, while `heavy` has the item before it.
        heavy: the stage that takes longest; runs in the caller's thread.
        after: finishes an item, in a thread, while `heavy` has the item after it.

    At most three items are in memory. An error of a stage is raised here after all earlier
    results have been yielded, as in the plain loop. Nothing is left running.
    """
    with ThreadPoolExecutor(1, "ahead") as ahead, ThreadPoolExecutor(1, "behind") as behind:
        coming = [ahead.submit(before, item) for item in items[:1]]
        finishing: list[Future[Finished]] = []
        for place, item in enumerate(items):
            try:
                ready = coming.pop().result()
                coming = [ahead.submit(before, following) for following in items[place + 1 : place + 2]]
                made = heavy(ready)
            finally:  # an error of this item waits for the item before
                yield from (future.result() for future in finishing)
            finishing = [behind.submit(after, item, ready, made)]
        yield from (future.result() for future in finishing)
