"""What was predicted beside what was measured, worked by hand; and which assumption was wrong."""

import math
from typing import Any

import pytest

from lockstep.events import Event, InputChosen, TimelineTaken
from lockstep.plan.hindsight import Hindsight, look_back, to_table
from tests.report.records import ended, predicted, started, stepped, timeline

PASSES = {"input": 0.0, "forward": 0.1, "backward": 0.2, "communicate": 0.15, "update": 0.05, "other": 0.01}


def make_end(*, input_s: float = 0.0, compute_s: float = 0.35, comm_s: float = 0.15, **changes: Any) -> Event:
    """The end of a part of 40 steps, of which 39 count, with so many seconds a step of each kind."""
    step_s = input_s + compute_s + comm_s
    shares = {"share_input": input_s, "share_compute": compute_s, "share_comm": comm_s}
    values: dict[str, Any] = {name: seconds / step_s for name, seconds in shares.items()}
    values |= {"train_s": 39 * step_s, "images": 39 * 32, "images_per_second": 32 / step_s}
    return ended(40, 1030.0, 30.0, **(values | changes))


def look(*events: Event, **changes: Any) -> Hindsight:
    found = look_back([started(), predicted(**changes), *events])
    assert found is not None
    return found


def measured_of(found: Hindsight) -> dict[str, float | None]:
    return {row.name: row.measured for row in found.rows}


def test_every_part_stands_beside_what_was_measured() -> None:
    # Rank 1 gets to its last gradient 80 ms later than rank 0, so 40 ms later than the mean. The first message begins
    # on rank 0 while rank 1 still computes: it lasts as long as on rank 1.
    late = {**PASSES, "backward": 0.28, "communicate": 0.07}
    timelines = [timeline(0, PASSES, [0.18, 0.03]), timeline(1, late, [0.1, 0.04])]
    # 440 ms of computing a step: by timelines 0.2 forward, 0.48 backward, 0.1 update of 0.78.
    found = look(*timelines, make_end(input_s=0.02, compute_s=0.44, comm_s=0.11))
    assert found.is_compared
    measured = measured_of(found)
    assert measured["waiting for input"] == pytest.approx(0.02)
    assert measured["computing, together"] == pytest.approx(0.44)
    assert [measured[name] for name in ("forward", "backward", "update")] == pytest.approx(
        [0.44 * 0.2 / 0.78, 0.44 * 0.48 / 0.78, 0.44 * 0.1 / 0.78]
    )
    assert measured["waiting for the slowest rank"] == pytest.approx(0.04)
    assert measured["exposed communication"] == pytest.approx(0.07)
    assert measured["all messages, hidden or not"] == pytest.approx(0.13)
    assert measured["a step"] == pytest.approx(0.57)
    assert measured["throughput T"] == pytest.approx(32 / 0.57)
    assert measured["all steps but the first"] == pytest.approx(39 * 0.57)
    rows = {row.name: row for row in found.rows}
    assert rows["a step"].ratio == pytest.approx(0.57 / 0.5)
    assert rows["waiting for input"].ratio is None  # nothing was predicted to divide by
    assert rows["all steps but the first"].predicted == pytest.approx(39 * 0.5)
    assert rows["backward"].source == "measured before step 0"
    assert found.sentence == (
        "A step took 570 ms, 1.14 times the 500 ms that were predicted: computing took 1.26 times what was measured "
        "before step 0: 440 ms, not 350 ms, most of the difference in the backward pass."
    )
    table = to_table(found)
    assert table["sentence"] == found.sentence
    assert len(table["rows"]) == len(found.rows)


def test_where_all_is_as_predicted_nothing_is_blamed() -> None:
    found = look(timeline(0, PASSES, [0.2]), timeline(1, PASSES, [0.2]), make_end(compute_s=0.37, comm_s=0.14))
    assert found.sentence == (
        "A step took 510 ms, 1.02 times the 500 ms that were predicted: no part of it was off by more than 10 % of a "
        "step."
    )


def make_input(rate: float | None) -> InputChosen:
    return InputChosen(
        decoder="cpu",
        threads=2,
        read_processes=0,
        prefetch_batches=3,
        threads_help=False,
        is_resident=False,
        images_per_second=rate,
        text="Input: 2 decode threads.",
    )


def test_input_that_is_waited_for_is_named() -> None:
    end = make_end(input_s=0.3)
    assert look(make_input(40.0), end).sentence.endswith(
        "1.60 times the 500 ms that were predicted: input was assumed never to be waited for, and steps waited 300 ms "
        "for it, which makes 40 images/s a rank."
    )
    sources = {"input": "an earlier part of this run"}
    assert look(make_input(None), end, input_rate=300.0, input_s=0.0, sources=sources).sentence.endswith(
        ": input was taken to make 300 images/s a rank (an earlier part of this run) and to be waited for 0.00 ms, and "
        "steps waited 300 ms for it."
    )


def test_messages_that_last_longer_than_measured_are_named() -> None:
    timelines = [timeline(rank, PASSES, [0.3, 0.06]) for rank in range(2)]
    says = look(*timelines, make_end(comm_s=0.3)).sentence
    assert says.endswith(
        ": messages took 1.80 times what was measured before step 0: a step waited 300 ms for them, where 100 ms were "
        "expected."
    )
    # As long as measured, and yet waited for.
    timelines = [timeline(rank, PASSES, [0.14, 0.06]) for rank in range(2)]
    says = look(*timelines, make_end(comm_s=0.3)).sentence
    assert "messages took what was measured before step 0, but less of them was hidden under the backward pass" in says
    # Without timelines of all ranks nobody can tell messages from the slowest rank.
    found = look(timelines[0], make_end(comm_s=0.3))
    assert measured_of(found)["waiting for others and for messages"] == pytest.approx(0.3)
    assert "a step waited 300 ms for them, where 150 ms were expected" in found.sentence


def test_a_slow_rank_is_named() -> None:
    late = {**PASSES, "forward": 0.5}
    found = look(timeline(0, PASSES, [0.2]), timeline(1, late, [0.2]), make_end(comm_s=0.3))
    assert measured_of(found)["waiting for the slowest rank"] == pytest.approx(0.2)
    assert found.sentence.endswith(
        ": the slowest rank was expected 50.0 ms behind the mean one, and was 200 ms behind it."
    )


def test_no_step_waits_longer_for_messages_than_they_last() -> None:
    # In the steps drawn ranks were level and messages short; over all steps ranks waited 200 ms.
    found = look(timeline(0, PASSES, [0.03]), timeline(1, PASSES, [0.02]), make_end(comm_s=0.2))
    measured = measured_of(found)
    assert measured["all messages, hidden or not"] == pytest.approx(0.02)
    assert measured["exposed communication"] == pytest.approx(0.02)
    assert measured["waiting for the slowest rank"] == pytest.approx(0.18)
    assert "the slowest rank was expected 50.0 ms behind" in found.sentence


def test_decoding_on_the_same_cores_is_told_beside_computing_on_a_cpu() -> None:
    says = look(make_input(64.0), make_end(compute_s=0.5)).sentence
    assert says.endswith("; decoding keeps threads on the same cores busy for 250 ms of a step.")  # 16 images of a rank
    on_gpu = look_back([started(device="NVIDIA H200"), predicted(), make_input(64.0), make_end(compute_s=0.5)])
    assert on_gpu is not None
    assert "decoding" not in on_gpu.sentence


@pytest.mark.parametrize(
    ("trial_s", "says"),
    [
        (0.8, "took 800 ms, as the run's did: the parts of a step go together otherwise than was assumed."),
        (0.51, "took 510 ms, as predicted: what made the difference came with the run."),
        (0.65, "took 650 ms."),
        (None, ""),
    ],
)
def test_whole_steps_tried_before_say_whether_the_run_or_the_model_differs(trial_s: float | None, says: str) -> None:
    assert look(make_end(compute_s=0.65), trial_s=trial_s).beside.endswith(says)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (ended(9, 1030.0, 30.0), "Only 9 steps were taken, too few"),
        (make_end(status="failed"), "The run failed"),
        (make_end(world_size=3), "The prediction is for 2 ranks, not for 3."),
        (make_end(images=39 * 20), "The steps were of other batches"),
        (make_end(train_s=math.nan), "does not say where its time went"),
        (make_end(share_compute=0.0), "does not say where its time went"),
        (stepped(5, 1004.0), "has not ended"),
    ],
)
def test_what_cannot_be_compared_is_not(end: Event, why: str) -> None:
    found = look(end)
    assert not found.is_compared
    assert why in found.sentence
    assert {row.measured for row in found.rows} == {None}


def test_a_part_that_goes_on_counts_its_own_steps() -> None:
    found = look_back([started(start_step=25), predicted(steps=15), make_end(train_s=14 * 0.5, images=14 * 32)])
    assert found is not None
    assert measured_of(found)["a step"] == pytest.approx(0.5)
    assert measured_of(found)["all steps but the first"] == pytest.approx(7.0)
    few = look_back([started(start_step=32), predicted(steps=8), make_end()])
    assert few is not None
    assert few.sentence == "Only 8 steps were taken, too few to be compared with the prediction."


def test_an_interrupted_run_has_no_time_for_all_steps() -> None:
    found = look(make_end(status="interrupted"))
    assert found.is_compared
    assert "all steps but the first" not in measured_of(found)


def test_a_run_without_a_prediction_says_nothing() -> None:
    assert look_back([started(), make_end()]) is None
    for change in ({"step_s": math.nan}, {"compute_s": 0.0}, {"images": -1.0}, {"forward_s": -0.1}, {"train_s": 1e300}):
        assert look_back([started(), predicted(**change), make_end()]) is None


def test_spans_that_are_none_are_passed_over() -> None:
    forged: list[Any] = [
        None,
        {"lane": "step", "name": "forward", "step": 13, "start_s": 0.5, "end_s": 0.1},
        {"lane": "step", "name": "forward", "step": "13", "start_s": 0.0, "end_s": 0.1},
        {"lane": "step", "name": "forward", "step": 10**9, "start_s": 0.0, "end_s": 0.1},
        {"lane": "step", "name": "forward", "step": 13, "start_s": "0", "end_s": None},
        {"lane": "step", "name": "forward", "step": 13, "start_s": 0.0, "end_s": math.inf},
    ]
    bad = TimelineTaken(rank=0, first_step=13, num_steps=2, seconds=1.0, spans=forged)
    empty = TimelineTaken(rank=1, first_step=13, num_steps=0, seconds=0.0, spans=[])
    found = look(bad, empty, make_end(), sources={"computing": 7}, assumptions=[7, "x" * 1000])
    measured = measured_of(found)
    assert measured["forward"] is None
    assert measured["computing, together"] == pytest.approx(0.35)
    assert found.assumptions == ("x" * 400,)
    assert {row.source for row in found.rows} == {""}
