"""Who is served next."""

from __future__ import annotations

from dcdm.serving.scheduler import FairQueue


def served(queue, count=1):
    """The next items, one after the other."""
    found = []
    for _ in range(count):
        room = [True]
        found += queue.take(lambda _, room=room: bool(room) and bool(room.pop()))
    return found


def test_callers_share_by_tokens_whoever_asked_first_for_more():
    queue = FairQueue()
    for number in range(6):
        queue.add(f"a{number}", "a", 10)
    assert served(queue, 2) == ["a0", "a1"]
    queue.add("b0", "b", 30)
    queue.add("b1", "b", 10)
    queue.add("c0", "c", 10)
    # b and c begin where a is now; b's long text counts as three of a's
    assert served(queue, 7) == ["a2", "b0", "c0", "a3", "a4", "a5", "b1"]
    assert len(queue) == 0


def test_one_caller_is_served_in_order_and_a_text_that_does_not_fit_holds_the_place():
    queue = FairQueue()
    for number in range(5):
        queue.add(number, "a", 1)
    assert queue.take(lambda number: number != 2) == [0, 1]
    assert list(queue) == [2, 3, 4]
    assert queue.drop(lambda number: number == 2) == 1
    assert queue.take(lambda _: True) == [3, 4]


def test_a_pause_saves_nothing_up_and_nobody_is_remembered_for_ever():
    queue = FairQueue()
    for number in range(1000):
        queue.add(number, f"caller {number}", 5)
        queue.add(-number, "old", 1)
        served(queue, 2)
    assert len(queue._served_until) <= 2
    queue.add("late", "late", 1)
    queue.add("old", "old", 1)
    assert served(queue, 2) == ["late", "old"]


def test_nobody_waits_for_ever_however_many_others_come():
    queue = FairQueue()
    queue.add("first", "patient", 50)
    queue.add("large", "patient", 100)
    for number in range(200):
        queue.add(number, f"new {number}", 10)
        if served(queue) == ["large"]:
            break
    assert number < 60


def test_what_is_given_up_costs_its_caller_nothing():
    queue = FairQueue()
    for number in range(60):
        queue.add(("a", number), "a", 100)
    assert queue.drop(lambda item: item[0] == "a") == 60
    for number in range(5):
        queue.add(("b", number), "b", 10)
    queue.add(("a", "again"), "a", 10)
    assert ("a", "again") in served(queue, 2)
