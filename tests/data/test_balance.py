"""Who decodes: the quicker way is found whichever it is, is found again when things change, and costs little."""

import pytest

from lockstep.data.balance import FIRST_PATIENCE, SETTLE, WINDOW, Balance


class Feed:
    """Batches that come as quickly as the step takes them, or as the input makes them where that is slower."""

    def __init__(self, alone: float, helped: float, step: float) -> None:
        self.seconds = {False: alone, True: helped}
        self.step = self.step_helped = step
        self.now = 0.0
        self.balance = Balance(lambda: self.now)
        self.in_each_way = {False: 0, True: 0}

    def run(self, batches: int) -> None:
        for _ in range(batches):
            made = self.seconds[self.balance.helps]
            self.in_each_way[self.balance.helps] += 1
            step = self.step_helped if self.balance.helps else self.step
            self.now += max(made, step)
            self.balance.note(made > step)


def test_an_input_that_keeps_up_is_left_alone() -> None:
    feed = Feed(alone=0.9, helped=0.5, step=1.0)
    feed.run(100 * WINDOW)
    assert feed.in_each_way[True] == 0


@pytest.mark.parametrize(("alone", "helped", "helps"), [(1.2, 2.0, False), (2.0, 1.2, True)])
def test_the_quicker_way_is_kept_and_the_other_tried_ever_less(alone: float, helped: float, helps: bool) -> None:
    feed = Feed(alone, helped, step=1.0)
    feed.run(4 * WINDOW)
    assert feed.balance.helps == helps
    feed.run(300 * WINDOW)
    assert feed.balance.helps == helps
    # First, then after about 8, 16, 32, 64 and 128 windows; each time a window, after some batches to settle.
    assert 4 * WINDOW <= feed.in_each_way[not helps] <= 7 * (WINDOW + SETTLE)


def test_help_that_is_enough_is_kept() -> None:
    feed = Feed(alone=1.5, helped=0.8, step=1.0)
    feed.run(50 * WINDOW)
    assert feed.balance.helps
    # Whether it is still needed is tried after about 8, 16 and 32 windows.
    assert 3 * WINDOW <= feed.in_each_way[False] <= 4 * (SETTLE + WINDOW)


def test_help_that_holds_up_the_step_itself_is_given_up() -> None:
    feed = Feed(alone=1.10, helped=0.9, step=1.0)
    feed.step_helped = 1.25
    feed.run(100 * WINDOW)
    assert not feed.balance.helps
    assert feed.in_each_way[True] <= 6 * (SETTLE + WINDOW)


def test_help_that_is_needed_no_longer_ends() -> None:
    feed = Feed(alone=1.5, helped=0.8, step=1.0)
    feed.run(10 * WINDOW)
    assert feed.balance.helps
    feed.seconds[False] = 0.9
    feed.run(20 * WINDOW)
    assert not feed.balance.helps


def test_ways_that_are_alike_do_not_take_turns() -> None:
    feed = Feed(alone=1.50, helped=1.49, step=1.0)
    feed.run((FIRST_PATIENCE + 2) * WINDOW)
    assert feed.in_each_way[False] == SETTLE + WINDOW


def test_what_has_become_better_is_found() -> None:
    feed = Feed(alone=1.2, helped=2.0, step=1.0)
    feed.run(20 * WINDOW)
    assert not feed.balance.helps
    feed.seconds = {False: 3.0, True: 1.1}  # larger photos, say
    feed.run(40 * WINDOW)
    assert feed.balance.helps


def test_a_pause_for_validation_is_not_taken_for_slowness() -> None:
    feed = Feed(alone=1.2, helped=1.5, step=1.0)
    feed.run(3 * WINDOW)
    assert not feed.balance.helps
    for _ in range(FIRST_PATIENCE):
        feed.now += 20 * WINDOW
        feed.run(WINDOW - 1)
        assert not feed.balance.helps
