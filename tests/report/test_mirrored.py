"""What a run says of evaluations that also looked at mirror images: terminal, page and card; no other run does."""

from pathlib import Path

import pytest

from lockstep.events import RunStarted
from lockstep.recipes.read import load_recipe
from lockstep.report.history import History
from lockstep.report.model_card import Subject, build_card
from lockstep.report.page.curves import draw_accuracy
from lockstep.report.phrases import describe_result
from tests.report.records import ended, evaluated, started, stepped

WORDS = "mirror image"


@pytest.mark.parametrize(
    ("data", "is_said"),
    [({"eval_flip": True}, True), ({"eval_flip": False}, False), ({}, False), ([1], False), (None, False)],
)
def test_accuracy_is_told_with_how_it_was_measured(data: object, is_said: bool, tmp_path: Path) -> None:
    start: RunStarted = started(config={"data": data, "train": {}})
    last, end = evaluated(40, 1025.0, 0.75), ended(40, 1030.0, 30.0)
    rows = dict(describe_result(end, start, last, tmp_path, ""))
    assert rows["top-1"] == ("75.0 %  (75 of 100, each with its mirror image)" if is_said else "75.0 %  (75 of 100)")
    chart = draw_accuracy(History([start, stepped(10, 1005.0), last, end]))
    assert chart
    assert (WORDS in chart.says) is is_said


@pytest.mark.parametrize("flip", [True, False])
def test_the_card_tells_so_too(flip: bool) -> None:
    config = load_recipe("quickstart", [f"data.eval_flip={str(flip).lower()}"])[1]
    events = [started(), evaluated(40, 1025.0, 0.75), ended(40, 1030.0, 30.0)]
    card = build_card(Subject("a-run", 40, ["ant", "bee"], config, "9.9", {}), events)
    assert (WORDS in card.partition("## Training")[0]) is flip
    assert ("asked of an image without its mirror image" in card.partition("## Limits")[2]) is flip
