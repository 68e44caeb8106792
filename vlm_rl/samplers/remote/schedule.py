"""Which server answers which group: the one with the least work, and a different one where that is lost. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping


def rank_room(places: int, ranks: int, *, is_ahead: bool) -> int:
    """Return how many responses of a rank a server is given at once.

    Servers that all ranks wait for get twice what they sample at once, so that none idles between two groups.
    """
    return (1 if is_ahead else 2) * places // ranks


class Schedule:
    """Groups that are still to be answered, and those in progress at each server."""

    def __init__(self, groups: Iterable[int], *, size: int, rooms: Mapping[str, int], first: int = 0) -> None:
        """Begin with nothing in progress.

        Args:
            groups: their numbers, in the order in which they are begun.
            size: responses of a group.
            rooms: the most responses in progress at each server; a group always fits an idle one.
            first: the server to begin with, so that ranks do not all begin with the same.
        """
        names = list(rooms)
        shift = first % len(names) if names else 0
        self.waiting = deque(groups)
        self.at: dict[str, list[int]] = {}
        self._size, self._most = size, dict[str, int]()
        for name in names[shift:] + names[:shift]:
            self.join(name, rooms[name])

    @property
    def left(self) -> bool:
        """Tell whether a group is waiting or in progress."""
        return bool(self.waiting) or any(self.at.values())

    def next(self) -> tuple[str, int] | None:
        """Begin a group at the server with the fewest; None if none is waiting, or no server has room."""
        free = [name for name, groups in self.at.items() if len(groups) < self._most[name]]
        if not self.waiting or not free:
            return None
        name = min(free, key=lambda name: len(self.at[name]))
        group = self.waiting.popleft()
        self.at[name].append(group)
        return name, group

    def join(self, server: str, room: int) -> None:
        """Give groups to one more server, which samples so many responses at once."""
        self.at[server] = []
        self._most[server] = max(1, room // self._size)

    def done(self, server: str, group: int) -> None:
        """Take an answered group off."""
        self.at[server].remove(group)

    def lose(self, server: str) -> None:
        """Take a server off; its groups are the next to begin elsewhere."""
        self.waiting.extendleft(reversed(self.at.pop(server)))
