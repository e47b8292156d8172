"""Both displays, line by line."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.events import AnchorTaken, CheckpointSaved, Event, Notice, StartedUp
from lockstep.plan.choose import PLAIN, explain_choice
from lockstep.plan.plan import Execution
from lockstep.plan.profile import Trial
from lockstep.report import display
from lockstep.report.display import LiveDisplay, PlainDisplay, build_display, fit, progress
from lockstep.report.phrases import brief, describe, describe_measuring, describe_place, describe_trials
from tests.report.records import ended, epoch_done, evaluated, saved, started, stepped

RUN: list[Event] = [
    started(1000),
    stepped(1, 1001),
    stepped(2, 1002),  # too soon for a line
    stepped(10, 1006),
    epoch_done(0, 1006),
    evaluated(10, 1008, top1=0.6),
    saved(10, 1008),
    Notice(time_s=1009, level="warning", text="a.JPEG cannot be read: [bold]truncated", rank=1),
    stepped(40, 1030),
    evaluated(40, 1032, top1=0.85),
    ended(40, 1033, wall_s=93.4),
]


def show(events: list[Event], console: Console) -> str:
    shown = build_display(console, Path("runs/tiny-1"))
    for event in events:
        shown.emit(event)
    shown.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_last_known_noise_scale_stays_in_the_line_and_ends_in_a_useful_batch() -> None:
    events = [
        started(1000),
        replace(stepped(1, 1001), noise_scale=1234.5),
        stepped(10, 1007),
        replace(stepped(20, 1020), noise_scale=8765.0),
        ended(40, 1033, wall_s=33.0),
    ]
    lines = show(events, Console(file=io.StringIO())).splitlines()
    progress_lines = [line for line in lines if line.startswith("epoch ")]
    assert [line.split("  ")[-2] for line in progress_lines] == [
        "noise scale 1,234",
        "noise scale 1,234",
        "noise scale 8,765",
    ]
    assert "useful batch       about 5,000, at the end 8,800  (gradient noise scale)" in lines


@pytest.mark.parametrize(
    ("steps", "told"),
    [(1, "epoch 0.1/0.1"), (5, "epoch 0.5/0.5"), (905, "epoch 90.5/90.5"), (10_000, "epoch 1,000.0/1,000")],
)
def test_epochs_are_told_without_powers_of_ten(steps: int, told: str) -> None:
    assert describe_place(stepped(steps, 1005.0), started(steps_total=steps))[0] == told
    assert [brief(number) for number in (0.25, 999.5, 12_345.6)] == ["0.25", "999.5", "12,346"]
    assert [brief(number, 3) for number in (0.0001234, 99.96, 5120)] == ["0.000123", "100", "5,120"]


def terminal(width: int = 80, color: bool = False) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, height=24, no_color=not color, _environ={"TERM": "xterm"}
    )


def test_plain_lines() -> None:
    assert show(RUN, Console(file=io.StringIO())).splitlines() == [
        "tiny: 1.50 M parameters, 320 samples, 10 classes, 2 ranks (test CPU)",
        "epoch 0.1/4  step 1/40  loss 1.250  train 50.0 %  lr 0.1  64.0 images/s  0:22 left",
        "epoch 1.0/4  step 10/40  loss 1.250  train 50.0 %  lr 0.1  64.0 images/s  0:17 left",
        "100 % compute, 0 % communication and waiting for other ranks, 0 % waiting for input: "
        "the devices are kept busy",
        "validation at epoch 1: top-1 60.0 %, top-5 90.0 %  (100 in 2.0 s)",
        "checkpoint at step 10  (6.1 MB in 3.0 s)",
        "warning: rank 1: a.JPEG cannot be read: [bold]truncated",
        "epoch 4.0/4  step 40/40  loss 1.250  train 50.0 %  val 60.0 %  lr 0.1  64.0 images/s  0:00 left",
        "validation at epoch 4: top-1 85.0 %, top-5 90.0 %  (100 in 2.0 s)",
        "status             finished after 1:33, 40 steps",
        "top-1              85.0 %  (85 of 100)",
        "top-5              90.0 %  (90 of 100)",
        "T  throughput      64.0 images/s  (T = S x N x e)",
        "S  one rank alone  40.0 images/s",
        "N  ranks           2",
        "e  efficiency      80.0 %",
        "run folder         runs/tiny-1",
        "80 % compute, 15 % communication and waiting for other ranks, 5 % waiting for input: "
        "more samples per rank (a larger train.global_batch, or fewer ranks) would lower communication.",
    ]


def test_plain_output_is_ascii_without_control_characters() -> None:
    events = [*RUN, Notice(level="info", text="\x1b[31mred\x07 one\ntwo")]
    text = show(events, Console(file=io.StringIO()))
    assert text.isascii()
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert text.endswith(" [31mred  one two\n")


def test_plain_output_writes_what_a_narrow_encoding_cannot_as_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainDisplay(Console(file=stream), Path()).emit(Notice(level="info", text="résumé"))
    assert raw.getvalue() == b"r\\xe9sum\\xe9\n"


def test_a_reader_that_went_away_does_not_stop_a_run() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    PlainDisplay(Console(file=Closed()), Path()).emit(started())


def test_an_interrupted_run_tells_its_own_steps_from_all_and_the_command_that_goes_on() -> None:
    console = Console(file=io.StringIO())
    display = PlainDisplay(console, Path("runs/tiny-1"), "lockstep train runs/tiny-1 --resume --ranks 2")
    for event in (started(start_step=8), ended(20, 1031, wall_s=31.0, status="interrupted")):
        display.emit(event)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "status             interrupted after 0:31, 12 steps (step 20, gone on from 8)" in lines
    assert "go on with         lockstep train runs/tiny-1 --resume --ranks 2" in lines


def test_of_few_classes_there_is_no_word_on_the_five_best() -> None:
    few = replace(evaluated(10, 1010, 0.6), top5=None)
    said = show([started(num_classes=3), few, ended(10, 1011, wall_s=11.0)], Console(file=io.StringIO()))
    assert "top-1 60.0 %  (100 in" in said
    assert "top-5" not in said
    assert "top-5 90.0 %" in show([evaluated(10, 1010, 0.6)], Console(file=io.StringIO()))


def test_a_plan_that_is_remembered_was_not_measured_now() -> None:
    assert describe_measuring("measured", 4.44) == "measured in 4.4 s"
    assert describe_measuring("remembered", 4.44) == "remembered; measuring it once took 4.4 s"


def test_a_choice_that_is_not_the_quickest_is_explained() -> None:
    slow = Trial(Execution(), PLAIN, "1 buffer", 0.100)
    near, far = (Trial(Execution(), "merged", "2 buffers", seconds) for seconds in (0.0975, 0.090))
    lines = describe_trials(explain_choice([slow, near]), batch=32)
    assert lines[1].startswith("  *   100.00 ms")
    assert lines[2] == (
        "The quickest is ahead of the chosen one (*) by 2.5 %; PyTorch's own stays unless it is slower by more than "
        "5 %, because less may be noise."
    )
    assert len(describe_trials(explain_choice([slow, far]), batch=32)) == 2


def test_a_ledger_that_does_not_add_up_is_a_warning() -> None:
    text = show([started(), epoch_done(2, 1010, ledger_ok=False)], Console(file=io.StringIO()))
    assert text.endswith("warning: epoch 3 did not see every sample exactly once\n")


def test_a_run_that_failed_before_training_says_why() -> None:
    end = ended(
        0,
        1001,
        wall_s=1.0,
        status="failed",
        reason="no data",
        images_per_second=0.0,
        speed_one_rank=None,
        efficiency=None,
        share_compute=0.0,
        share_comm=0.0,
        share_input=0.0,
    )
    assert show([started(), end], Console(file=io.StringIO())).splitlines()[1:] == [
        "status      failed after 0:01, 0 steps",
        "reason      no data",
        "run folder  runs/tiny-1",
    ]


def test_a_run_that_failed_amid_training_says_why_and_not_how_quick_it_was() -> None:
    said = show(
        [started(), ended(5, 1001, wall_s=1.0, status="failed", reason="a rank was lost")], Console(file=io.StringIO())
    )
    assert "a rank was lost" in said
    assert "throughput" not in said
    assert "compute" not in said


def test_a_terminal_gets_the_live_view_and_anything_else_plain_lines() -> None:
    assert isinstance(build_display(terminal(), Path()), LiveDisplay)
    assert isinstance(build_display(Console(file=io.StringIO()), Path()), PlainDisplay)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(build_display(dumb, Path()), PlainDisplay)


def test_the_live_view_says_where_training_stands() -> None:
    console = terminal()
    text = show(RUN[:6], console)
    assert "tiny   epoch 1.0/4   step 10/40" in text
    assert "25 %  0:21 left" in text  # 30 steps of 0.5 s, 3 evaluations of 2 s
    assert "loss 1.250   train 50.0 %   val 60.0 %   lr 0.1   64.0 images/s" in text
    assert "validation at epoch 1: top-1 60.0 %, top-5 90.0 %" in text


def test_the_live_view_ends_with_the_result_and_a_visible_cursor() -> None:
    text = show(RUN, terminal())
    end = text[text.rindex("\x1b[?25h") :]
    assert "85.0 %  (85 of 100)" in end
    assert "e  efficiency      80.0 %" in end
    verdict = "80 % compute, 15 % communication and waiting for other ranks, 5 % waiting for input"
    assert verdict in " ".join(end.split())


def test_the_live_view_leaves_the_cursor_visible_when_a_run_breaks_off() -> None:
    text = show(RUN[:4], terminal())
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    assert "[bold]truncated" in show(RUN, terminal())


def test_no_color_is_respected() -> None:
    assert "\x1b[32m" in show(RUN, terminal(color=True))
    assert "\x1b[32m" not in show(RUN, terminal(color=False))


def test_a_narrow_terminal_breaks_lines_between_fields_only() -> None:
    assert fit(["loss 1.250", "train 50.0 %", "lr 0.1"], width=26) == "loss 1.250   train 50.0 %\nlr 0.1"


def test_preparation_in_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 5.0, 5.5])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(now))
    console = Console(file=io.StringIO())
    report = progress("Rendering images", console)
    for done in (0, 1000, 2000, 4000):
        report(done, 4000)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "Rendering images: 0/4,000 (0.0 %)",
        "Rendering images: 2,000/4,000 (50.0 %)",
        "Rendering images: 4,000/4,000 (100.0 %)",
    ]


def test_preparation_in_a_terminal_is_one_line_redrawn() -> None:
    console = terminal()
    report = progress("Rendering images", console)
    report(0, 30)
    report(30, 30)
    assert isinstance(console.file, io.StringIO)
    bare = re.sub("\x1b\\[[0-9]*m", "", console.file.getvalue())
    assert bare == f"Rendering images {'-' * 30} 0/30\rRendering images {'=' * 30} 30/30\n"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"scale": None}, "full gradient 0.4  (130 samples in 0.5 s)"),
        ({"scale": 0.00123456}, "full gradient 0.4, scale 0.00123  (130"),
        (
            {"scale": 0.001, "share_at_end": 0.3712, "share_at_zero": 0.05},
            "full gradient 0.4, scale 0.001; offsets 37.1 % at an end, 5.0 % at zero  (130",
        ),
    ],
)
def test_an_anchor_tells_its_grid_and_how_far_offsets_had_reached(told: dict[str, Any], expected: str) -> None:
    values: dict[str, Any] = {"step": 4, "samples": 130, "seconds": 0.5, "loss": 2.3, "gradient_norm": 0.4}
    assert f"anchor at step 4: loss 2.3, {expected}" in describe(AnchorTaken(**values, ledger="", **told))[0]


@pytest.mark.parametrize(
    ("write_s", "seconds", "expected"),
    [
        (None, 3.0, "in 3.0 s"),
        (3.0, 0.02, "in 3.0 s beside the steps"),
        (3.0, 0.4, "in 3.0 s, steps waited 0.4 s"),
    ],
)
def test_a_checkpoint_tells_whether_steps_went_on(write_s: float | None, seconds: float, expected: str) -> None:
    event = CheckpointSaved(step=10, path="step-10", bytes=6_100_000, seconds=seconds, write_s=write_s)
    assert describe(event) == [f"checkpoint at step 10  (6.1 MB {expected})"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"ranks meet": 1.0, "data": 0.01, "network": 2.5, "first step": 4.0}, ["ranks meet 1.0 s", "network 2.5 s"]),
        ({"data": 0.5, "first step": 1.5}, []),
        ({"data": "long", "first step": math.inf}, []),
    ],
)
def test_a_start_that_took_long_is_told_part_by_part(seconds: dict[str, Any], expected: list[str]) -> None:
    lines = describe(StartedUp(seconds=seconds))
    assert [line.split(", ")[0] for line in lines] == ([f"Started up in 7.5 s: {expected[0]}"] if expected else [])
    assert all(part in lines[0] for part in expected)
    assert not any("data" in line for line in lines)  # too short to be worth a word
