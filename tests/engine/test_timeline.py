"""Spans from traces made by hand, and from real steps on a GPU."""

import time
from itertools import pairwise

import pytest
import torch

from lockstep.comm.world import join_world
from lockstep.data.pipeline import Made
from lockstep.engine.apply import apply_execution
from lockstep.engine.recorded import RecordedStep, refuse_waits
from lockstep.engine.step import train_step
from lockstep.engine.timeline import Passes, Timeline, cut_steps, pick_middle, place_batches, place_sums
from lockstep.engine.timing import Trace
from tests.engine.small import small_config
from tests.engine.test_recorded import RECORDED, build, draw_batches


def names(trace: Trace, first_step: int = 7) -> list[tuple[str, int, float]]:
    """(name, step, length) of every span, which must touch each other."""
    spans = cut_steps(trace, first_step)
    assert spans[0].start_s == 0
    assert all(one.end_s == other.start_s for one, other in pairwise(spans))
    return [(span.name, span.step, round(span.end_s - span.start_s, 6)) for span in spans]


def test_the_parts_of_the_middle_step_are_its_own_and_add_up() -> None:
    """On a machine that is shared any part may take long once; medians part by part would leave the update no time."""
    steps = [Passes(19.0, 9.0, 8.0), Passes(11.0, 2.0, 8.0), Passes(12.0, 9.0, 2.0)]
    middle = pick_middle(steps, lambda passes: passes.step_s)
    assert middle == steps[2]
    assert middle.update_s == 1.0
    assert pick_middle(steps[:1], lambda passes: passes.step_s) == steps[0]


def test_marks_and_cuts_become_the_parts_of_each_step() -> None:
    points = [("input", 1.0), ("forward", 3.0), ("backward", 6.0), ("compute", 6.5), ("communicate", 7.0)]
    points += [("compute", 8.0), ("other", 8.5), ("input", 8.5), ("forward", 9.0), ("backward", 10.0)]
    points += [("forward", 11.0), ("backward", 12.0), ("compute", 12.0), ("communicate", 12.0), ("compute", 13.0)]
    assert names(Trace(0.0, list(points))) == [
        ("input", 7, 1.0),
        ("forward", 7, 2.0),
        ("backward", 7, 3.5),  # what is left of it up to the mark is its own
        ("communicate", 7, 0.5),
        ("update", 7, 1.0),
        ("other", 7, 0.5),
        ("forward", 8, 0.5),  # nothing waited for input
        ("backward", 8, 1.0),
        ("forward", 8, 1.0),  # a second pass
        ("backward", 8, 1.0),
        ("update", 8, 1.0),
    ]


def test_replays_are_cut_like_the_last_one() -> None:
    points = [("input", 1.0), ("compute", 5.0), ("communicate", 6.0), ("compute", 7.0), ("other", 7.0)]
    points += [("input", 8.0), ("compute", 16.0), ("communicate", 17.0), ("compute", 18.0)]
    cuts = [("forward", 10.0), ("backward", 15.0)]  # passed by the second replay: a quarter, and seven eighths
    trace = Trace(0.0, list(points), {1: cuts, 6: cuts})  # type: ignore[dict-item]
    assert names(trace)[:5] == [
        ("input", 7, 1.0),
        ("forward", 7, 1.0),
        ("backward", 7, 3.0),
        ("communicate", 7, 1.0),
        ("update", 7, 1.0),
    ]
    assert names(trace)[5:] == [
        ("input", 8, 1.0),
        ("forward", 8, 2.0),
        ("backward", 8, 6.0),
        ("communicate", 8, 1.0),
        ("update", 8, 1.0),
    ]


def test_a_rank_alone_has_its_update_in_the_replay() -> None:
    cuts = [("forward", 2.0), ("backward", 4.0)]
    trace = Trace(0.0, [("input", 1.0), ("compute", 5.0)], {1: cuts})  # type: ignore[dict-item]
    assert names(trace) == [("input", 7, 1.0), ("forward", 7, 1.0), ("backward", 7, 2.0), ("update", 7, 1.0)]


def test_each_sum_is_named_by_its_buffer_and_step() -> None:
    moments = [(1.0, 2.0), (2.0, 4.0), (5.0, 6.0), (6.0, None)]
    spans = place_sums(0.5, moments, ["a", "b"], 7, 2)
    assert [(span.name, span.step, span.start_s, span.end_s) for span in spans] == [
        ("a", 7, 0.5, 1.5),
        ("b", 7, 1.5, 3.5),
        ("a", 8, 4.5, 5.5),
    ]
    assert place_sums(0.5, moments[:3], ["a", "b"], 7, 2) == []  # not whole: nobody knows which is which


def test_the_input_has_the_batches_that_were_made_meanwhile() -> None:
    before, across, inside = Made(-1, 98.0, 99.0), Made(0, 99.5, 101.0), Made(1, 101.5, 102.0)
    unfinished, later = Made(2, 103.0, None), Made(3, 104.5, None)
    spans = place_batches(100.0, 4.0, [before, across, inside, unfinished, later], 9)
    assert [(span.lane, span.name, span.step, span.start_s, span.end_s) for span in spans] == [
        ("input", "batch of step 9", 9, 0.0, 1.0),
        ("input", "batch of step 10", 10, 1.5, 2.0),
        ("input", "batch of step 11", 11, 3.0, 4.0),
    ]


def test_the_start_of_a_trace_is_known_by_the_hosts_clock() -> None:
    assert Trace(7.0, seen=(10.0, 1003.0)).start_s == 1000.0


@pytest.mark.gpu
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_gpus_timeline_adds_up_and_never_makes_the_host_wait(is_recorded: bool) -> None:
    config = small_config("fp16")
    with join_world(None) as world:
        parts = build(config, world)
        apply_execution(RECORDED, parts)
        step = RecordedStep(parts, 16, 16, pytest.fail)
        batches = list(draw_batches(config, world, 8))
        train_step(parts, batches[0], 0.0)  # kernels are made at their first use, for which the host waits
        if is_recorded:
            step.prepare(batches[0], 3)
        torch.cuda.synchronize()
        parts.clock.take()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with refuse_waits():
            made = [Made(0, time.perf_counter(), None)]
            timeline = Timeline(parts, 1, lambda: made)
            begun.record()
            for batch in batches[:3]:
                parts.clock.mark("input")
                step(batch, 0.05)
            ended.record()
        parts.clock.take()
        made[0] = made[0]._replace(done_s=time.perf_counter())
        taken = timeline.end(3)
        ended.synchronize()
        seconds = begun.elapsed_time(ended) / 1e3
    steps = [span for span in taken["spans"] if span["lane"] == "step"]
    assert sum(span["end_s"] - span["start_s"] for span in steps) == pytest.approx(seconds, rel=0.02)
    # Of a batch that was made all the while: a millisecond is for the launch of the first event and the host's return.
    (batch,) = [span for span in taken["spans"] if span["lane"] == "input"]
    assert batch["end_s"] - batch["start_s"] == pytest.approx(seconds, rel=0.02, abs=1e-3)
    assert {"forward", "backward", "update"} <= {span["name"] for span in steps if span["step"] == 3}
