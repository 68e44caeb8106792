"""Which server answers which group."""

from __future__ import annotations

from vlm_rl.samplers.remote.schedule import Schedule


def test_groups_go_where_the_least_work_is_and_elsewhere_where_a_server_is_lost() -> None:
    """Six groups of 4 over servers with room for 8 and 12 responses, by hand."""
    schedule = Schedule(range(6), size=4, rooms={"a": 8, "b": 12})
    begun = [schedule.next() for _ in range(5)]
    assert begun == [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("b", 4)]  # a is full after 2 groups
    assert schedule.next() is None  # b is full too
    schedule.done("b", 1)
    schedule.lose("a")
    assert [schedule.next(), schedule.next()] == [("b", 0), None]  # what was lost comes before 5
    for group in (3, 4, 0):
        schedule.done("b", group)
    assert [schedule.next(), schedule.next()] == [("b", 2), ("b", 5)]
    assert schedule.left
    schedule.done("b", 2)
    schedule.done("b", 5)
    assert not schedule.left and schedule.next() is None
    assert Schedule([0], size=8, rooms={"a": 2, "b": 2}, first=3).next() == ("b", 0)  # a group fits any idle server
    nobody = Schedule([0], size=1, rooms={})
    assert nobody.left and nobody.next() is None
