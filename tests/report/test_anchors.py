"""Full gradients at anchors on a run's page."""

import re
from pathlib import Path
from typing import Any

from lockstep.events import AnchorTaken, Event
from lockstep.report.history import History
from lockstep.report.page.anchors import tell_anchors
from lockstep.report.page.run_page import build_report
from tests.report.browser import open_browser
from tests.report.made_run import make_run
from tests.report.records import ended, started, stepped
from tests.report.test_browser import check


def took(step: int, norm: float, at_end: float | None = None, at_zero: float | None = None, **more: Any) -> AnchorTaken:
    scale = None if at_end is None and step else norm / 127
    values = {"time_s": 1000 + step, "samples": 320, "seconds": 1.0, "loss": 2.0 - step / 40, "ledger": "", **more}
    return AnchorTaken(
        step=step, gradient_norm=norm, **{"scale": scale, **values}, share_at_end=at_end, share_at_zero=at_zero
    )


def draw(*events: Event) -> Any:
    return tell_anchors(History([started(), *events]))


def test_norms_and_the_grid_are_drawn_over_the_run() -> None:
    section = draw(took(0, 1.0), took(10, 0.02, 0.01, 0.25), took(20, 4e-4, 0.0, 0.5))
    norms, reach = section.charts
    assert norms.says == (
        "The norm of the full gradient was 1 at step 0 and 0.0004 at step 20; "
        "the scale of the offsets ended at 3.15e-06."
    )
    assert norms.layout["yaxis"]["type"] == "log"
    assert norms.traces[0]["y"] == [1.0, 0.02, 4e-4]
    assert norms.traces[0]["at"]["epoch"] == [0, 1, 2]
    assert norms.traces[1]["y"] == [1 / 127, 0.02 / 127, 4e-4 / 127]
    # Before the first anchor there were no offsets.
    assert [trace["y"] for trace in reach.traces] == [[0.01, 0.0], [0.25, 0.5]]
    assert reach.says == (
        "Before the anchor at step 20, 0.0 % of the offsets were at an end of their grid and 50.0 % at zero."
    )
    assert section.above == ""


def test_svrg_has_no_grid() -> None:
    section = draw(took(0, 1.0, scale=None), took(10, 0.5))
    (chart,) = section.charts
    assert len(chart.traces) == 1
    assert chart.numbers.rows[1][-2:] == ["0.5", "–"]
    assert not chart.note


def test_offsets_that_saturate_or_never_move_are_told() -> None:
    anchors = [took(0, 1.0), took(10, 1.0, 0.3, 0.1), took(20, 1.0, 0.05, 0.1), took(30, 1.0, 0.0, 0.995)]
    assert re.findall("<p[^>]*>(.*?)</p>", draw(*anchors).above.replace("\xa0", " ")) == [
        "At 1 of 3 anchors more than 10 % of the offsets were at an end of their grid; a lower optim.mu lets them "
        "reach farther.",
        "At 1 of 3 anchors more than 99 % of the offsets were still at zero; a higher optim.mu makes their grid finer.",
    ]


def test_an_anchor_that_a_resume_takes_again_counts_once() -> None:
    again = started(2000.0, start_step=20)
    killed = [took(0, 1.0), took(10, 0.5, 0.0, 0.0), took(20, 0.3, 0.0, 0.0), took(30, 0.9, 0.0, 0.0)]
    section = draw(*killed, again, took(20, 0.2, 0.0, 0.0, time_s=2001), took(30, 0.1, 0.0, 0.0, time_s=2011))
    assert section.charts[0].traces[0]["y"] == [1.0, 0.5, 0.2, 0.1]
    assert len(section.charts[0].marks) == 1


def test_a_run_without_anchors_says_nothing_of_them() -> None:
    assert draw(stepped(10, 1005.0), ended(40, 1030.0, 30.0)) is None


def test_what_is_no_number_is_drawn_nowhere() -> None:
    section = draw(took(0, float("nan"), scale=float("inf")), took(10, 0.0, float("nan"), 0.5))
    (chart,) = section.charts
    assert chart.traces[0]["y"] == [None, 0.0]
    assert chart.numbers.rows[0][-2:] == ["–", "–"]


def test_the_section_is_whole_in_a_browser(tmp_path: Path) -> None:
    anchors = [
        took(step, 10 ** -(step / 300), step / 3000, 0.1, time_s=1.79e9 + 12 + step / 8) for step in range(0, 600, 100)
    ]
    page = tmp_path / "report.html"
    page.write_text(build_report([*make_run(steps=600), *anchors]), encoding="utf-8")
    with open_browser(tmp_path / "browser") as browser:
        for width, scheme in ((1400, "light"), (400, "dark")):
            browser.show(f"file://{page}", width=width, scheme=scheme)
            assert {"full-gradients", "offsets"} <= set(check(browser))
