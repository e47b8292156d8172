"""What the doctor says: the layer, how often, and when to give up."""

import torch

from lockstep.layout import ParameterSpec, plan_layout
from lockstep.optim.doctor import STALLED_STEPS, Doctor
from lockstep.optim.loss_scale import LossScale

LAYOUT = plan_layout([ParameterSpec(name, (4, 4), True, True, half=True) for name in ("conv1", "conv2", "fc")])


def settle(scale: LossScale, *bad: str, times: int = 1) -> None:
    for _ in range(times):
        scale.settle(torch.tensor([slot.name not in bad for slot in LAYOUT.slots]))


def test_it_says_nothing_of_good_steps() -> None:
    scale = LossScale(LAYOUT)
    doctor = Doctor(LAYOUT, scale)
    settle(scale, times=3)
    assert (doctor.examine().text, doctor.examine().num_skipped) == ("", 0)


def test_it_names_the_layer_where_an_overflow_began_and_how_often() -> None:
    scale = LossScale(LAYOUT)
    doctor = Doctor(LAYOUT, scale)
    settle(scale, "conv1", "conv2", times=2)
    settle(scale, "conv1")
    settle(scale)
    diagnosis = doctor.examine()
    assert diagnosis.num_skipped == 3
    assert not diagnosis.is_at_floor
    assert diagnosis.text == (
        "Skipped 3 steps whose gradients overflowed, first in conv2 (2 times), conv1 (1 time); "
        "the loss scale is now 8,192."
    )


def test_each_look_tells_only_what_is_new() -> None:
    scale = LossScale(LAYOUT)
    settle(scale, "conv1")
    doctor = Doctor(LAYOUT, scale)  # a run that goes on from a checkpoint
    assert doctor.examine().num_skipped == 0
    settle(scale, "fc")
    assert "first in fc (1 time)" in doctor.examine().text
    assert doctor.examine().text == ""


def test_overflows_at_the_floor_are_told_apart() -> None:
    scale = LossScale(LAYOUT, initial=2.0)
    doctor = Doctor(LAYOUT, scale)
    settle(scale, "fc")
    diagnosis = doctor.examine()
    assert diagnosis.is_at_floor
    assert not diagnosis.is_stalled
    assert diagnosis.text.endswith("the loss scale cannot fall any further.")


def test_a_scale_that_keeps_overflowing_at_its_floor_is_stalled() -> None:
    scale = LossScale(LAYOUT, initial=2.0)
    doctor = Doctor(LAYOUT, scale)
    settle(scale, "conv2", times=STALLED_STEPS - 1)
    assert not doctor.examine().is_stalled
    settle(scale, "conv2")
    diagnosis = doctor.examine()
    assert diagnosis.is_stalled
    assert "the last 20 steps overflowed even at the lowest loss scale, 1, first in conv2 (20 times)" in diagnosis.text
    assert "lower optim.lr" in diagnosis.text
    settle(scale)
    assert not doctor.examine().is_stalled


def test_a_static_scale_is_advised_to_be_lower() -> None:
    scale = LossScale(LAYOUT, initial=1e6, floor=1e6, ceiling=1e6)
    settle(scale, "fc", times=STALLED_STEPS)
    assert "lower precision.initial_scale" in Doctor(LAYOUT, scale).examine().text
