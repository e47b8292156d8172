"""What `lockstep tune` says of a profile: where it was measured, and the plan in the words of a run."""

import math
from dataclasses import replace

from lockstep.plan.choose import PLAIN
from lockstep.plan.plan import Execution
from lockstep.plan.profile import Profile, Setup, Trial
from lockstep.report.plan_tables import describe_choice, describe_setup

LINKS = "2 us and 40 Gbit/s inside a node, 30 us and {} Gbit/s between nodes"
SETUP = Setup(
    "x86_64 CPU", "2x2", LINKS.format(10), "gloo", "fp32", 64, 256, 32, "resnet18", "lars", "lockstep 1, torch 2"
)
TRIALS = (
    Trial(Execution(), PLAIN, "1 buffer under the backward pass (by flat)", 0.5),
    Trial(Execution(), "merged", "3 buffers under the backward pass (by doubling)", 0.25),
    Trial(Execution(), "two-segments", "2 buffers under the backward pass (by doubling)", math.inf, "no memory"),
)


def test_profiles_of_other_links_or_versions_are_told_apart() -> None:
    told = describe_setup(SETUP)
    assert "2x2 over gloo" in told[0]
    assert told[2:] == [f"links: {LINKS.format(10)}", "lockstep 1, torch 2"]
    assert describe_setup(replace(SETUP, links=LINKS.format(1))) != told
    assert "links: not given" in describe_setup(replace(SETUP, links=""))


def test_the_plan_itself_is_told_as_a_run_tells_it() -> None:
    line, *others = describe_choice(Profile(SETUP, 2.5, trials=TRIALS), "remembered")
    assert line == (
        "The step: PyTorch's kernels, launched one by one; gradients in 3 buffers under the backward pass "
        "(by doubling) (remembered; measuring it once took 2.5 s on 4 ranks, 2 a node, over gloo)."
    )
    assert [other[:4] for other in others] == ["  * ", "    ", "    "]


def test_where_everything_failed_the_plain_step_is_told() -> None:
    (failed,) = TRIALS[2:]
    line, _ = describe_choice(Profile(SETUP, 2.5, trials=(failed,)), "measured")
    assert line.startswith("The step: PyTorch's kernels, launched one by one (measured in 2.5 s")
