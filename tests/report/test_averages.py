"""What a run says of its averaged weights: display, summary, page, viewers, card; and nothing where it has none."""

from dataclasses import replace
from pathlib import Path

from lockstep.config import RunConfig
from lockstep.events import Evaluated, decode, encode
from lockstep.recipes.read import load_recipe
from lockstep.report.averages import see_average
from lockstep.report.history import History
from lockstep.report.model_card import Subject, build_card
from lockstep.report.page.curves import draw_accuracy, draw_loss
from lockstep.report.phrases import describe, describe_result, describe_state
from lockstep.report.sinks import measure
from lockstep.report.summary import summarize
from tests.report.records import ended, evaluated, started, stepped

CONFIG: RunConfig = load_recipe("quickstart", ["optim.average=0.99"])[1]


def averaged(step: int, time_s: float, top1: float, average: float) -> Evaluated:
    counts = {"average_correct1": round(100 * average), "average_correct5": 95, "average_loss": 0.5}
    return replace(evaluated(step, time_s, top1), average_top1=average, average_top5=0.95, **counts)


EVENTS = [
    started(),
    stepped(10, 1005.0),
    averaged(10, 1006.0, 0.5, 0.25),
    averaged(20, 1012.0, 0.6, 0.875),
    averaged(40, 1025.0, 0.75, 0.8125),
    ended(40, 1030.0, 30.0),
]
PLAIN = [replace(event, average_top1=None) if isinstance(event, Evaluated) else event for event in EVENTS]


def test_an_average_is_seen_as_an_evaluation_of_its_own() -> None:
    seen = see_average(averaged(40, 1025.0, 0.75, 0.8125))
    assert seen
    assert (seen.top1, seen.top5, seen.correct1, seen.correct5, seen.loss) == (0.8125, 0.95, 81, 95, 0.5)
    assert (seen.step, seen.total) == (40, 100)
    assert see_average(evaluated(40, 1025.0, 0.75)) is None


def test_a_record_survives_the_log_and_one_of_before_still_reads() -> None:
    record = averaged(40, 1025.0, 0.75, 0.8125)
    assert decode(encode(record)) == record
    line = encode(evaluated(40, 1025.0, 0.75)).replace(',"average_top1":null', "")
    assert decode(line) == evaluated(40, 1025.0, 0.75)


def test_the_summary_names_both_and_none_where_there_is_none() -> None:
    summary = summarize(EVENTS)
    assert (summary["top1"], summary["average_top1"], summary["average_top5"]) == (0.75, 0.8125, 0.95)
    assert summary["best"]["step"] == 40
    assert summary["average_best"] == {"step": 20, "top1": 0.875, "wall_s": 12.0}
    assert [point["top1"] for point in summary["average_time_to_accuracy"]] == [0.25, 0.875, 0.8125]
    assert not [name for name in summarize(PLAIN) if "average" in name]


def test_the_display_says_both() -> None:
    last, none = averaged(40, 1025.0, 0.75, 0.8125), evaluated(40, 1025.0, 0.75)
    assert "top-1 75.0 %, top-5 90.0 %, averaged weights 81.2 %" in describe(last)[0]
    assert "averaged 81.2 %" in describe_state(stepped(40, 1.0), last)
    rows = dict(describe_result(ended(40, 1030.0, 30.0), None, last, Path("run"), ""))
    assert rows["averaged weights"] == "top-1 81.2 %  (81 of 100); top-5 95.0 %"
    assert "averaged" not in describe(none)[0]
    assert not [row for row in describe_result(ended(40, 1030.0, 30.0), None, none, Path("run"), "") if "av" in row[0]]


def test_pages_and_viewers_have_its_curves() -> None:
    for draw in (draw_loss, draw_accuracy):
        chart, plain = draw(History(EVENTS)), draw(History(PLAIN))
        assert chart
        assert plain
        assert sum("averaged weights" in trace["name"] for trace in chart.traces) == 1
        assert "averaged weights" in chart.says
    assert "averaged" not in plain.says
    step, numbers = measure(averaged(40, 1025.0, 0.75, 0.8125))
    assert (step, numbers["val/average_top1"], numbers["val/average_loss"]) == (40, 0.8125, 0.5)
    assert not [name for name in measure(evaluated(40, 1025.0, 0.75))[1] if "average" in name]


def test_the_card_is_of_the_weights_in_the_file() -> None:
    names = ["ant", "bee", "cat", "dog", "eel", "fox"]
    subject = Subject("a-run", 40, names, CONFIG, "9.9", {}, is_average=True)
    card = build_card(subject, EVENTS)
    assert "its averaged weights after step 40" in card
    assert "| top-1 | 81.2 % | 81 of 100 |" in card
    assert "| top-1 of the weights of that step | 75.0 % | 75 of 100 |" in card
    assert "| weights | a moving average, 0.99 |" in card
    assert "has not measured that of its averaged weights" in build_card(subject, PLAIN)
    other = build_card(replace(subject, is_average=False), EVENTS)
    assert "| top-1 | 75.0 % | 75 of 100 |" in other
    assert "averaged weights" not in other
