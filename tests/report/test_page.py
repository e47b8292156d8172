"""The page of a run: its numbers, what it leaves out, and what strangers write into records."""

import contextlib
import html
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.events import (
    Event,
    LayersMeasured,
    MistakesFound,
    Notice,
    PlanChosen,
    RunEnded,
    RunStarted,
    TimelineTaken,
    decode,
    encode,
    read_events,
)
from lockstep.report.page import document
from lockstep.report.page.charts import tell_time
from lockstep.report.page.document import embed_json, encode_data, tell
from lockstep.report.page.live_page import build_state
from lockstep.report.page.run_page import build_report, describe_work, write_report
from lockstep.report.phrases import describe_ranks
from lockstep.report.run import RunSink
from lockstep.report.summary import summarize
from lockstep.report.verdict import judge
from tests.engine import commands
from tests.report.made_run import make_run, write_run
from tests.report.records import ended, epoch_done, evaluated, predicted, started, stepped, timeline
from tests.report.test_run import RUN, Listener

HOSTILE = "<script>alert(1)</script>\"'&\U0001f600</script>\u2028--red"


def read_data(page: str) -> Any:
    """What the page's script is given."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def read_text(page: str) -> str:
    """What a reader sees, tags left out."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page[page.index("<body>") :], flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def find_charts(events: Sequence[Event]) -> dict[str, Any]:
    return {chart["name"]: chart for chart in read_data(build_report(events))["charts"]}


def list_sections(page: str) -> list[str]:
    return re.findall(r'<section id="([^"]+)"', page)


def test_the_numbers_are_those_of_the_summary() -> None:
    events = make_run(steps=300)
    page, summary = build_report(events), summarize(events)
    assert read_data(page)["summary"] == json.loads(json.dumps(summary))
    text = read_text(page)
    assert f"Top-1 {100 * summary['top1']:.1f} % top-5 {100 * summary['top5']:.1f} %" in text
    assert f"T {summary['T']:,.0f} images/s = S {summary['S']:,.0f} images/s of one rank alone" in text
    assert f"N {summary['N']} ranks · e {100 * summary['e']:.1f} % efficiency" in text


def test_a_whole_run_has_every_section() -> None:
    page = build_report(make_run(steps=300))
    wanted = [
        "curves",
        "spent",
        "ranks",
        "timeline",
        "plan",
        "prediction",
        "layers",
        "mistakes",
        "ledger",
        "energy",
        "warnings",
    ]
    assert list_sections(page) == [*wanted, "settings", "environment"]
    names = [chart["name"] for chart in read_data(page)["charts"]]
    curves = ["loss", "accuracy", "lr", "throughput", "loss-scale", "noise-scale"]
    assert names == [*curves, "spent", "ranks", "timeline", "prediction", "gradient-norms", "trust-ratios", "confusion"]
    assert page.count('<img src="data:image/jpeg') == 16
    assert "Rank 1 held the others up" in page


def test_what_was_not_told_is_not_there() -> None:
    page = build_report([started(config={})])
    assert list_sections(page) == ["environment"]
    assert "did not end" in read_text(page)
    page = build_report([started(), stepped(10, 1005), ended(10, 1006, 6.0)])
    assert list_sections(page) == ["curves", "spent", "settings", "environment"]
    assert [chart["name"] for chart in read_data(page)["charts"]] == ["loss", "accuracy", "lr", "throughput", "spent"]


def make_prediction() -> list[Event]:
    """What the planner writes, of kinds that a run has too."""
    plan = next(event for event in make_run(steps=100) if isinstance(event, PlanChosen))
    nothing = float("nan")
    steps = [replace(stepped(step, 1000 + step / 2), loss=nothing, top1=nothing, lr=nothing) for step in (20, 40)]
    start = started(num_val=0, device="H100, predicted")
    return [start, replace(plan, source="predicted"), *steps, ended(40, 1020, 20.0, energy_j=7.2e6)]


def test_a_prediction_is_no_run_that_happened() -> None:
    page = build_report(make_prediction())
    text = read_text(page)
    assert "A prediction: nothing was trained. It would take 20.0 s for 40 steps." in text
    assert '<p class="state warning">A prediction' in page
    assert "8 candidates were simulated. The chosen one would take" in text
    assert "Predicted time 20.0 s" in text
    for false in ("Finished", "in turns", "own steps", "validation samples", "run's own", "Running time", " went"):
        assert false not in text
    assert list_sections(page) == ["spent", "plan", "energy", "settings", "environment"]


def test_what_a_run_let_know_is_among_its_notes() -> None:
    note = "There is no val/ in /data; test/ serves as the validation split."
    notices = [Notice(level="info", text=text, time_s=1001) for text in (note, note, HOSTILE)]
    page = build_report([started(), *notices, stepped(10, 1005)])
    assert f"step 0, 1.0 s {note}" in read_text(page)
    assert page.count(note) == 1
    assert html.escape(HOSTILE) in page


def test_a_table_has_every_curve_of_its_chart_and_every_evaluation() -> None:
    events: list[Event] = [started(steps_total=400)]
    for step in range(1, 401):
        events.append(stepped(step, 1000 + step))
        if step % 10 == 0:
            events.append(evaluated(step, 1000 + step, 0.987 if step == 130 else 0.5))
    page = build_report(events)
    (table,) = re.findall(r"<table>(?:(?!</table>).)*validation, top-5.*?</table>", page)
    heads = re.findall(r'<th scope="col"[^>]*>([^<]+)', table)
    assert heads == ["step", "epoch", "time", "training, top-1", "validation, top-1", "validation, top-5"]
    assert table.count("90.0 %") == 40
    assert "98.7 %" in table
    rows = re.findall(r'<th scope="row"[^>]*>([^<]+)', table)
    assert (rows[0], rows[-1]) == ("1", "400")
    assert "training</th>" in page
    assert "validation</th>" in page


def test_no_line_ends_between_a_number_and_its_unit() -> None:
    assert tell("82.5 % sure, 14.0 s, 5 MB") == "82.5\u00a0% sure, 14.0\u00a0s, 5\u00a0MB"
    assert tell("3 steps of 10 sheep") == "3 steps of 10 sheep"


@pytest.mark.parametrize(
    ("number", "words"),
    [(258, "258 parameters"), (1, "1 parameter"), (176_842, "0.177 M parameters"), (25_557_032, "25.6 M parameters")],
)
def test_a_network_of_the_program_is_said_to_be_one(number: int, words: str) -> None:
    config = {"model": {"name": "given"}, "data": {"source": "given"}}
    says = describe_work(started(config=config, num_parameters=number))
    assert says.startswith(f"a network of the program, {words}, on images of the program: ")


def test_one_is_no_plural_and_what_did_not_change_stayed() -> None:
    records = [started(steps_total=10), stepped(1, 1001), stepped(10, 1005), epoch_done(0, 1005), ended(10, 1006, 6.0)]
    text = read_text(build_report(records))
    assert "1 epoch " in text
    assert "In the one epoch every sample was seen exactly once." in text
    assert "Training loss stayed at 1.25." in text


def test_one_record_went_nowhere_and_is_told_as_one() -> None:
    """As of a run that diverged before its second."""
    layers = LayersMeasured(time_s=1001, step=1, gradient_norms=[0.5, 0.0], weight_norms=[1.0, 0.0], trust_ratios=[])
    wrong = MistakesFound(time_s=1002, step=1, confusion=[[0, 1, 1]], worst=[])
    page = read_text(build_report([started(layers=["a", "b"]), stepped(1, 1001), layers, wrong]))
    for words in (
        "Training loss was 1.25 at step 1.",
        "The learning rate was 0.1 at step 1.",
        "It was 64.0 images/s at step 1.",
        "Gradient norms of 2 layers at 1 step;",
        "a gap where it is zero",
        "taken for class 1, 1 time.",
    ):
        assert words in page, words


def test_the_highest_learning_rate_is_one_of_those_recorded() -> None:
    falling = [replace(stepped(step, 1000 + step), lr=lr) for step, lr in ((1, 0.5), (10, 0.25))]
    words = "The learning rate was 0.5 at step 1, the highest that was recorded"
    assert f"{words}, and 0.25 at the end." in read_text(build_report([started(), *falling]))
    rising = [falling[1], replace(falling[0], step=20)]
    assert "was 0.5 at step 20, the highest that was recorded. " in read_text(build_report([started(), *rising]))


def test_shares_of_the_steps_are_told_from_those_of_all_the_time() -> None:
    page = read_text(build_report(make_run(steps=300)))
    assert re.search(r"Of \d\d\.\d s: computing .* Of the steps alone: \d+ % compute, ", page)


def test_a_page_has_no_sign_that_only_a_terminals_table_has() -> None:
    events = make_run(steps=300)
    place = next(index for index, event in enumerate(events) if isinstance(event, PlanChosen))
    plan = events[place]
    assert isinstance(plan, PlanChosen)
    second = [{**trial, "chosen": index == 1} for index, trial in enumerate(plan.trials)]
    page = read_text(build_report([*events[:place], replace(plan, trials=second), *events[place + 1 :]]))
    assert "The quickest is ahead of the chosen one by 3.9 %; two segments stays unless" in page


def test_a_timeline_ends_with_the_last_rank_and_explains_the_rows_there_are() -> None:
    def draw(**spans: float) -> TimelineTaken:
        told = [{"lane": "step", "name": name, "step": 1, "start_s": 0.0, "end_s": s} for name, s in spans.items()]
        return TimelineTaken(time_s=1001, rank=len(drawn), first_step=1, num_steps=1, seconds=0.1, spans=told)

    drawn: list[Event] = []
    drawn.append(draw(forward=0.1, communicate=0.0))
    drawn.append(draw(forward=0.15))
    events = [started(), *drawn]
    assert find_charts(events)["timeline"]["layout"]["xaxis"]["range"] == [0, 150.0]
    page = read_text(build_report(events))
    assert "took 100.00 ms: forward 100.0 %. The row “step” is what a step is made of." in page
    assert "Beside it went on" not in page
    assert "Beside it went on: “input”, the batches that threads made, and a row for" in read_text(
        build_report(make_run(steps=300))
    )


def test_several_ranks_have_steps_and_rows_of_their_own_in_a_timeline() -> None:
    """Their clocks have nothing in common, so that a step's beginning on one rank is no mark in another's rows."""
    chart = find_charts([started(), timeline(0, {"forward": 0.25}, [0.125]), timeline(1, {"forward": 0.5}, [0.125])])
    edges = [(shape["x0"], shape["y0"], shape["y1"]) for shape in chart["timeline"]["layout"]["shapes"]]
    assert edges == [(250.0, -0.5, 1.5), (500.0, 1.5, 3.5)]


def test_a_timelines_legend_has_what_can_be_seen() -> None:
    passes = {"input": 0.1, "forward": 0.2, "communicate": 1e-7}
    traces = find_charts([started(world_size=1), timeline(0, passes, [])])["timeline"]["traces"]
    assert [trace["name"] for trace in traces if trace.get("showlegend", True)] == ["waiting for input", "forward"]


def test_lengths_of_time_have_a_unit() -> None:
    assert [tell_time(seconds) for seconds in (0.04, 7.25, 59.94, 59.96, 754, 3599.4, 3599.6, 3723)] == [
        *("0.0 s", "7.2 s", "59.9 s", "1:00 min", "12:34 min", "59:59 min", "1:00:00 h", "1:02:03 h"),
    ]


def test_the_median_of_throughput_stands_beside_that_of_all_steps() -> None:
    """Which may be far from it, and is the T of the headline."""
    records = [started(), *(stepped(step, 1000.0 + step) for step in (10, 20, 30)), ended(40, 1040.0, 40.0)]
    assert "; all steps together made 64.0." in find_text(records, "throughput")
    resumed = [*records, started(2000.0, start_step=40), stepped(50, 2005.0), stepped(60, 2010.0)]
    resumed.append(ended(60, 2011.0, 11.0, images_per_second=16.0))
    assert "; those since the last resume together made 16.0" in find_text(resumed, "throughput")


def find_text(events: Sequence[Event], name: str) -> str:
    """The sentence of a chart."""
    found = re.search(rf'<p id="{name}-says">(.*?)</p>', build_report(events))
    assert found
    return found[1].replace("\N{NO-BREAK SPACE}", " ")


def test_parts_tell_how_they_began_and_with_how_many_ranks() -> None:
    first, last = make_run(steps=200, ends=False), make_run(steps=200, first=100, begun_s=1.8e9)
    assert find_charts([*first, *last])["spent"]["layout"]["yaxis"]["ticktext"] == ["started", "resumed"]
    alone = [replace(one, world_size=1) if isinstance(one, RunStarted) else one for one in last]
    ticks = find_charts([*first, *alone])["spent"]["layout"]["yaxis"]["ticktext"]
    assert ticks == ["started, 2 ranks", "resumed, 1 rank"]
    assert "Of the steps since the last resume: " in read_text(build_report([*first, *alone]))


def test_a_run_that_failed_at_once_has_no_columns_that_say_nothing() -> None:
    failed = ended(0, 1002.0, 2.0, status="failed", images_per_second=0.0, speed_one_rank=None, efficiency=None)
    page = build_report([started(), predicted(), failed])
    assert "images/s" not in page[page.index("<header>") : page.index("</header>")]
    (heads,) = re.findall(r'<table id="prediction-table">.*?<thead><tr>(.*?)</tr>', page)
    assert re.findall(r"<th[^>]*>([^<]*)</th>", heads) == ["", "predicted", "the prediction is from"]


@pytest.mark.parametrize(
    ("topology", "words"),
    [("1x1", "on 1 rank"), ("1x2", "on 2 ranks"), ("4x8", "on 32 ranks, 8 a node"), ("2x8+1x4", "on ranks 2x8+1x4")],
)
def test_where_a_plan_is_for_is_told_in_words(topology: str, words: str) -> None:
    assert describe_ranks(topology, "nccl").replace(",", "") == f"{words} over nccl".replace(",", "")
    assert describe_ranks(topology, "") == words


def test_hours_cost_what_a_reader_says_they_do() -> None:
    records = [started(), stepped(10, 1005), ended(10, 1006, 5400.0)]  # of two ranks
    assert "energy" not in list_sections(build_report(records))
    page = read_text(build_report(records, price=2.5))
    assert "$ 7.50 at $ 2.5 a device hour" in page
    assert "kWh" not in page
    many = [*records[:2], ended(10, 1006, 9e6, energy_j=7.2e9)]
    told = read_text(build_report(many))
    assert "2,000 kWh" in told
    assert "device hours 5,000" in told
    drew = [*records[:2], ended(10, 1006, 5400.0, energy_j=7.2e6)]
    assert "2 kWh" in read_text(build_report(drew, price=0.0))
    assert "$" not in read_text(build_report(drew))


def test_every_chart_has_a_sentence_that_says_the_same() -> None:
    page = build_report(make_run(steps=300))
    for chart in read_data(page)["charts"]:
        says = re.search(rf'<p id="{chart["name"]}-says">([^<]+)</p>', page)
        assert says
        assert says[1].endswith(".")
        assert f'aria-describedby="{chart["name"]}-says"' in page


def test_ids_are_unique() -> None:
    names = re.findall(r'<[^>]* id="([^"]+)"', build_report(make_run(steps=300)))
    assert len(names) == len(set(names))


def test_a_log_cut_off_in_mid_line_still_makes_a_page(tmp_path: Path) -> None:
    events = make_run(steps=300, ends=False)
    run = write_run(tmp_path / "run", events, tail='{"kind":"StepDone","time_s":179')
    page = write_report(run).read_text()
    assert "This run did not end: its log stops after" in read_text(page)
    assert {"curves", "spent"} <= set(list_sections(page))


def test_a_resume_is_marked_and_repeated_steps_are_drawn_once() -> None:
    events = [*make_run(steps=300, ends=False), *make_run(steps=300, first=200, begun_s=1.8e9)]
    loss = next(chart for chart in read_data(build_report(events))["charts"] if chart["name"] == "loss")
    steps = loss["traces"][0]["at"]["step"]
    assert steps == sorted(set(steps))
    assert [mark["at"]["step"] for mark in loss["marks"]] == [200]


def test_long_runs_are_thinned_but_keep_their_extremes() -> None:
    events = [started(steps_total=50_000)]
    events += [replace(stepped(step, 1000 + step), loss=99.0 if step == 777 else 1.0) for step in range(1, 9000)]
    loss = read_data(build_report(events))["charts"][0]["traces"][0]
    assert len(loss["y"]) <= 2000
    assert max(loss["y"]) == 99.0


def test_marks_lie_on_the_curve_of_throughput() -> None:
    events = [
        started(),
        stepped(10, 1005, 0.5),
        stepped(20, 1009, 0.4),
        evaluated(15, 1008, 0.5),
        evaluated(30, 1012, 0.5),
    ]
    heights = find_charts(events)["throughput"]["traces"][1]["heights"]
    assert heights["step"] == heights["epoch"] == [72.0, 80.0]  # half-way from 64 to 80, and at the end
    assert heights["wall"] == [76.0, 80.0]  # three quarters of the way


def test_an_evaluation_and_a_checkpoint_at_one_step_are_both_seen() -> None:
    """What is drawn later lies over what was drawn before."""
    charts = find_charts(make_run(steps=400))
    _, checkpoint, evaluation = charts["throughput"]["traces"]
    assert (checkpoint["name"], evaluation["name"]) == ("checkpoint", "evaluation")
    assert set(checkpoint["at"]["step"]) <= set(evaluation["at"]["step"])
    assert checkpoint["marker"]["symbol"] == "square-open"
    assert checkpoint["marker"]["size"] > evaluation["marker"]["size"]


def test_one_evaluation_has_points_that_can_be_told_apart() -> None:
    events = [started(), stepped(10, 1005), evaluated(10, 1006, 0.5)]
    looks = [
        (trace["marker"]["color"], trace["marker"].get("symbol")) for trace in find_charts(events)["accuracy"]["traces"]
    ]
    assert len(set(looks)) == len(looks) == 3


def test_hostile_text_is_text() -> None:
    events = make_run(steps=200, run=HOSTILE, names=[HOSTILE, "b", "c"], device=HOSTILE, recipe=HOSTILE)
    events = [replace(event, text=HOSTILE) if isinstance(event, Notice) else event for event in events]
    events = [_spoil_plan(event) for event in events]
    page = build_report(events)
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 3
    assert page.count("</script>") == 3
    assert html.escape(HOSTILE) in page
    assert HOSTILE.replace("\u2028", " ") in read_text(page)
    assert "\u2028" not in page[page.index('id="data"') : page.index('id="plotly"')]


def test_quotes_in_a_charts_text_are_quotes() -> None:
    """Plotly knows tags and ampersands, and would show `&quot;` as it is."""
    charts = read_data(build_report(make_run(steps=200, names=[HOSTILE, "b", "c"])))["charts"]
    shown = json.dumps(next(chart for chart in charts if chart["name"] == "confusion"), ensure_ascii=False)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert "&quot;" not in shown
    assert "&#x27;" not in shown


def test_every_buffer_of_a_timeline_has_a_row_behind_step_and_input() -> None:
    (chart,) = [one for one in read_data(build_report(make_run(steps=300)))["charts"] if one["name"] == "timeline"]
    beside = ["input", "buffer 0", "buffer 1", "buffer 2", "buffer 3"]
    assert chart["layout"]["yaxis"]["ticktext"] == ["rank 0 · step", *beside, "rank 1 · step", *beside]
    rows = {height for trace in chart["traces"] for height in trace["y"]}
    assert rows == set(range(12))


def test_many_ranks_and_buffers_are_cut_to_what_can_be_read() -> None:
    events = make_run(steps=300, world_size=16)
    page = build_report(events)
    (chart,) = [one for one in read_data(page)["charts"] if one["name"] == "timeline"]
    assert len(chart["layout"]["yaxis"]["ticktext"]) == 5 * 6
    assert "The first 5 of 16 ranks are shown." in read_text(page)


def test_a_run_that_goes_on_or_was_killed_is_judged_too() -> None:
    events = [event for event in make_run(steps=300) if not isinstance(event, RunEnded)]
    sentence = f"{judge(events).sentence()}."
    assert "compute" in sentence
    assert sentence in read_text(build_report(events))
    assert sentence in build_state(events)["main"].replace("\N{NO-BREAK SPACE}", " ")


def test_a_live_page_has_no_table_that_its_charts_leave_behind() -> None:
    events = [event for event in make_run(steps=300) if not isinstance(event, RunEnded)]
    assert "<table" in build_report(events)
    assert "<table" not in build_state(events)["main"]


def _spoil_plan(event: Event) -> Event:
    if isinstance(event, PlanChosen):
        return replace(event, execution=HOSTILE, trials=[{**trial, "rule": HOSTILE} for trial in event.trials])
    return event


@pytest.mark.parametrize("value", [None, 7, -1, "x", [], {}, [1], [[1]], [["a", "b", "c"]], [{"a": 1}], [None, True]])
def test_records_of_any_shape_make_a_page(value: Any) -> None:
    run = make_run(steps=100)
    if isinstance(value, list):
        spoiled: list[Event] = [
            LayersMeasured(step=5, weight_norms=value, gradient_norms=value, trust_ratios=value),
            TimelineTaken(rank=0, first_step=1, num_steps=1, seconds=0.0, spans=value),
            MistakesFound(step=5, confusion=value, worst=value),
            replace(next(event for event in run if isinstance(event, PlanChosen)), trials=value),
        ]
        build_report([run[0], *spoiled])
    spans = [{"lane": value, "name": value, "step": value, "start_s": 0.0, "end_s": 1.0}]
    worst = [{"name": value, "label": value, "predicted": value, "confidence": value, "jpeg": value}]
    build_report(
        [
            started(config={"train": value, "model": value, "x": {"y": value}}, class_names=[value], layers=[value]),
            TimelineTaken(rank=0, first_step=1, num_steps=1, seconds=1.0, spans=spans),
            MistakesFound(step=5, confusion=[], worst=worst),
            *run[1:],
        ]
    )


SPOILED = [
    *(None, True, 0, -1, 2**62, -(2**62), 1e300, -1e300, 5e-324, "", "<b>", "\ud800", "\u2028"),
    *([], [[]], {}, {"a": {}}, [None], [1e308] * 3, ["a"] * 3, [[0, 1, 5]], [[0, 1, 2**62]]),
]


@pytest.mark.parametrize("seed", range(30))
def test_spoiled_records_make_a_page_or_one_sentence(seed: int) -> None:
    """Values of the wrong size, sign and shape, deep inside records whose fields are of the right kind."""
    rule = random.Random(seed)

    def spoil(value: Any) -> Any:
        if rule.random() < 0.15:
            return rule.choice(SPOILED)
        if isinstance(value, dict):
            return {name: spoil(one) for name, one in value.items()}
        return [spoil(one) for one in value] if isinstance(value, list) and len(value) < 200 else value

    events = []
    for event in make_run(steps=60, per_epoch=20, log_every=10):
        told = json.loads(encode(event))
        spoiled = {name: spoil(value) if rule.random() < 0.25 else value for name, value in told.items()}
        try:
            decoded = decode(json.dumps(spoiled | {"kind": event.kind}))
        except TypeError:  # refused when it is read
            continue
        events += [decoded] if decoded else []
    for build in (build_report, lambda events: encode_data(build_state(events))):
        with contextlib.suppress(LockstepError):  # where the very first record was refused
            build(events)


def test_data_can_lie_in_a_script() -> None:
    text = embed_json({"a": "</script><!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028&"}


def test_the_page_forbids_itself_everything_else() -> None:
    page = build_report(make_run(steps=100))
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1])  # type: ignore[index]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert "http" not in re.sub(r"http-equiv", "", page[: page.index('id="plotly"')])


def test_10000_steps_are_less_than_8_mb() -> None:
    page = build_report(make_run(steps=10_000, per_epoch=500, log_every=1))
    assert len(page.encode()) < 8e6


def test_a_run_leaves_its_page(tmp_path: Path) -> None:
    sink = RunSink(tmp_path, Listener())
    for event in RUN:
        sink.emit(event)
    sink.close()
    assert "Finished after 21.0 s" in read_text((tmp_path / "report.html").read_text())


def test_without_plotly_a_run_gives_notice_and_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document.importlib.util, "find_spec", lambda name: None)
    document.read_plotly.cache_clear()
    display = Listener()
    sink = RunSink(tmp_path, display)
    for event in RUN:
        sink.emit(event)
    sink.close()
    document.read_plotly.cache_clear()
    (notice,) = (event for event in display.heard if isinstance(event, Notice))
    assert "pip install plotly" in notice.text
    assert display.heard[-1] == RUN[-1]
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "summary.json").exists()


def test_a_fault_in_a_drawing_costs_the_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr("lockstep.report.page.run_page.build_document", fail)
    display = Listener()
    sink = RunSink(tmp_path, display)
    for event in RUN:
        sink.emit(event)
    sink.close()
    assert "a fault in Lockstep (ZeroDivisionError: by design)" in str(display.heard)
    assert display.heard[-1] == RUN[-1]


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), evaluated(10, 1005, 0.5), ended(10, 1006, 6.0)])
    assert commands.run("report", str(run), "--out", str(tmp_path / "a.html"))[0] == 0
    assert commands.run("report", str(run / "events.jsonl"))[0] == 0
    assert (tmp_path / "a.html").read_bytes() == (run / "report.html").read_bytes()
    for arguments in ([str(tmp_path / "none")], [str(run), "--out", str(tmp_path / "no" / "a.html")]):
        status, _, err = commands.run("report", *arguments)
        assert status == 1
        assert err.count("\n") == 1
        assert "Cannot" in err


def test_an_empty_log_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(LockstepError, match=r"holds no run, .*; name a run's folder"):
        write_report(tmp_path)


def test_records_read_back_make_the_same_page(tmp_path: Path) -> None:
    events = make_run(steps=200)
    assert build_report(read_events(write_run(tmp_path / "run", events))) == build_report(events)


def test_the_environment_tells_the_machine() -> None:
    page = build_report([started(machine={"processor": HOSTILE, "cores": "2 of 64"})])
    assert f"<dt>processor</dt><dd>{html.escape(HOSTILE)}</dd>" in page
    assert "<dt>cores</dt><dd>2 of 64</dd>" in page


def test_a_log_of_a_version_that_told_no_machine_makes_a_page(tmp_path: Path) -> None:
    told = json.loads(encode(started()))
    del told["machine"]
    (tmp_path / "events.jsonl").write_text(json.dumps(told) + "\n")
    page = write_report(tmp_path).read_text()
    assert "<dt>device</dt><dd>test CPU</dd>" in page
    assert "<dt>processor</dt>" not in page


def test_the_names_of_the_classes_are_listed_as_text() -> None:
    page = build_report([started(num_classes=3, class_names=["ant", HOSTILE, "cat"])])
    assert f"3: ant, {html.escape(HOSTILE)}, cat" in page
    many = build_report([started(num_classes=5_000, class_names=[])])
    assert "<dt>classes</dt><dd>5,000</dd>" in many
