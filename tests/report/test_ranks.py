"""Ranks beside each other on a run's page."""

from typing import Any

import pytest

from lockstep.report.history import History
from lockstep.report.page.ranks import MOST_RANKS, tell_ranks
from tests.report.records import ended, started, stepped


def draw(rank_times: Any) -> Any:
    section = tell_ranks(History([started(), stepped(10, 1005.0), ended(40, 1030.0, 30.0, rank_times=rank_times)]))
    return section and section.charts[0]


def test_the_slowest_rank_stands_first_and_says_by_how_much() -> None:
    chart = draw([[0.0, 0.25], [0.05, 0.375], [0.0, 0.3125]])
    assert chart.says == "Rank 1 took longest: 425.00 ms, 175.00 ms more than rank 0, the quickest."
    assert chart.numbers.rows[0] == ["rank 1", "375.00", "50.00", "425.00", "175.00"]
    assert [row[0] for row in chart.numbers.rows] == ["rank 1", "rank 2", "rank 0"]
    assert chart.layout["yaxis"]["ticktext"] == ["rank 0", "rank 1", "rank 2"]
    assert chart.traces[0]["x"] == [250.0, 375.0, 312.5]


def test_of_many_ranks_the_slowest_are_drawn() -> None:
    chart = draw([[0.0, 0.1 + rank / 1000] for rank in range(100)])
    assert chart.layout["yaxis"]["ticktext"][0] == "rank 68"
    assert len(chart.traces[0]["x"]) == MOST_RANKS
    assert chart.note == "Medians over the run; 68 quicker ranks not drawn."
    assert "99.00 ms more than rank 0" in chart.says


@pytest.mark.parametrize("told", [[], [[0.0, 1.0]], [[0.0, 1.0], "x"], [[0.0, 1.0], [float("nan"), 1.0]], [1, 2]])
def test_one_rank_and_what_is_no_time_are_not_drawn(told: Any) -> None:
    assert draw(told) is None
