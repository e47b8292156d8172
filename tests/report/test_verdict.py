"""What is slow, in words, from records made by hand."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.events import InputChosen
from lockstep.report.verdict import Verdict, count_missing, round_together
from tests.report.records import ended, started, stepped, timeline


def chosen(**changes: Any) -> InputChosen:
    values: dict[str, Any] = {
        "decoder": "cpu",
        "threads": 4,
        "read_processes": 0,
        "prefetch_batches": 2,
        "threads_help": True,
        "is_resident": False,
        "images_per_second": 40.0,
        "text": "Input: 4 decode threads.",
    }
    return InputChosen(**(values | changes))


def judge(shares: tuple[float, float, float], *, device: str = "NVIDIA H200", **changes: Any) -> str:
    """The sentence at the end of a run of two ranks that reached 64 images a second."""
    verdict = Verdict()
    verdict.emit(started(device=device))
    verdict.emit(chosen(**changes))
    compute, comm, wait = shares
    verdict.emit(ended(40, 1030.0, 30.0, share_compute=compute, share_comm=comm, share_input=wait))
    return verdict.sentence()


def test_threads_that_are_missing_are_counted() -> None:
    # A rank reaches 32 images a second and would reach 32 / 0.64 = 50 if it never waited; a thread makes 10.
    assert judge((0.55, 0.09, 0.36)) == (
        "55 % compute, 9 % communication and waiting for other ranks, 36 % waiting for input: "
        "one more decode thread would remove it"
    )
    assert judge((0.5, 0.0, 0.5), threads=2, images_per_second=16.0).endswith("six more decode threads would remove it")


def test_percentages_of_the_whole_time_sum_to_100() -> None:
    spent = "78 % compute, 17 % communication and waiting for other ranks, 5 % waiting for input"
    assert judge((0.786, 0.167, 0.047)).startswith(spent)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=7).filter(any))
def test_shares_are_rounded_to_a_sum_of_100_each_by_less_than_one(parts: list[int]) -> None:
    rounded = round_together([part / sum(parts) for part in parts])
    assert sum(rounded) == 100
    assert all(abs(whole - 100 * part / sum(parts)) < 1 + 1e-9 for whole, part in zip(rounded, parts, strict=True))


def test_shares_of_less_than_the_whole_and_of_nothing_known() -> None:
    assert round_together([0.5, 0.25]) == [50, 25]
    assert round_together([math.nan, 0.5]) == [0, 0]


@pytest.mark.parametrize(
    ("shares", "changes", "advice"),
    [
        ((0.97, 0.02, 0.01), {}, "the devices are kept busy"),
        ((0.8, 0.15, 0.05), {}, "more samples per rank (a larger train.global_batch, or fewer ranks) would lower"),
        ((0.8, 0.0, 0.2), {"images_per_second": 400.0}, "batches further ahead (data.prefetch_batches) would hide it"),
        ((0.8, 0.0, 0.2), {"images_per_second": 4.0}, ": smaller images"),
        ((0.8, 0.0, 0.2), {"images_per_second": None}, "more decode threads (data.decode_threads), smaller images"),
        ((0.8, 0.0, 0.2), {"decoder": "both"}, "more decode threads (data.decode_threads), smaller images"),
        ((0.8, 0.0, 0.2), {"read_processes": 8}, "more processes that decode (data.read_processes), smaller images"),
        ((0.6, 0.0, 0.4), {"device": "x86_64 CPU"}, "as would two more decode threads on cores of their own"),
    ],
)
def test_the_advice_follows_from_the_largest_waste(
    shares: tuple[float, float, float], changes: dict[str, Any], advice: str
) -> None:
    assert advice in judge(shares, **changes)


def test_while_a_run_goes_on_the_first_step_does_not_count() -> None:
    verdict = Verdict()
    verdict.emit(started())
    assert verdict.sentence() == ""
    verdict.emit(stepped(1, 1001.0, step_s=9.0))
    assert verdict.sentence() == ""
    verdict.emit(stepped(11, 1005.0))
    spent = "100 % compute, 0 % communication and waiting for other ranks, 0 % waiting for input: "
    assert verdict.sentence().startswith(spent)
    assert verdict.slow == ""


def test_missing_threads_are_whole() -> None:
    assert count_missing(4, 40.0, 40.0) == 0
    assert count_missing(4, 40.0, 40.1) == 1
    assert count_missing(4, 40.0, 80.0) == 4
    assert count_missing(4, 40.0, 1.0) == 0


def test_the_rank_that_held_the_others_up_is_where_to_look() -> None:
    verdict = Verdict()
    verdict.emit(started())
    shares = {"share_compute": 0.7, "share_comm": 0.3, "share_input": 0.0}
    straggler = "Rank 1 (node 0) holds the others up by 30 ms a step: input."
    verdict.emit(ended(40, 1030.0, 30.0, straggler=straggler, **shares))
    assert verdict.sentence().endswith(": rank 1 held the others up, so look there first")
    verdict.emit(started(2000.0))
    verdict.emit(ended(40, 2030.0, 30.0, **shares))
    assert "more samples per rank" in verdict.sentence()


@pytest.mark.parametrize(("message_s", "told"), [(0.02, "ranks wait for each other"), (0.09, "lower communication")])
def test_ranks_that_wait_for_each_other_are_told_from_slow_messages(message_s: float, told: str) -> None:
    """By what rank 1, which joins in last, sees of a message: rank 0 only waits for it."""
    verdict = Verdict()
    verdict.emit(started())
    verdict.emit(timeline(0, {"forward": 0.2, "communicate": 0.18}, [0.18]))
    verdict.emit(timeline(1, {"forward": 0.36, "communicate": message_s}, [message_s]))
    verdict.emit(ended(40, 1030.0, 30.0, share_compute=0.7, share_comm=0.3, share_input=0.0))
    assert told in verdict.sentence()
    assert "more samples per rank (a larger train.global_batch, or fewer ranks) would" in verdict.sentence()
    verdict.emit(started(2000.0))  # resumed: what was measured before says nothing of it
    verdict.emit(ended(40, 2030.0, 30.0, share_compute=0.7, share_comm=0.3, share_input=0.0))
    assert verdict.sentence().endswith("lower communication")
