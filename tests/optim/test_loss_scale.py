"""The loss scale's own rules: when it falls and rises, and whom it holds responsible."""

import pytest
import torch

from lockstep.layout import ParameterSpec, plan_layout
from lockstep.optim.loss_scale import GOOD, ROW, SCALE, SKIPPED, LossScale

# In forward order; the layout holds the half ones first: c, a, then norm.
LAYOUT = plan_layout(
    [
        ParameterSpec("a", (4, 4), True, True, half=True),
        ParameterSpec("norm", (4,), False, False),
        ParameterSpec("c", (2, 4), True, True, half=True),
    ]
)


def settle(scale: LossScale, *bad: str) -> bool:
    return bool(scale.settle(torch.tensor([slot.name not in bad for slot in LAYOUT.slots])))


def names(counts: torch.Tensor) -> dict[str, int]:
    return {slot.name: count for slot, count in zip(LAYOUT.slots, counts.tolist(), strict=True) if count}


def test_it_starts_at_65536_and_doubles_after_2000_good_steps() -> None:
    scale = LossScale(LAYOUT)
    for _ in range(1999):
        assert settle(scale)
    assert scale.state.tolist() == [65536.0, 1999.0, 0.0, 0.0]
    settle(scale)
    assert scale.state.tolist() == [131072.0, 0.0, 0.0, 0.0]


def test_an_overflow_halves_it_and_starts_the_count_of_good_steps_anew() -> None:
    scale = LossScale(LAYOUT, growth_steps=3)
    settle(scale)
    settle(scale)
    assert not settle(scale, "a")
    assert scale.state[SCALE] == 32768
    assert scale.state[GOOD] == 0
    settle(scale)
    settle(scale)
    assert scale.state[SCALE] == 32768
    settle(scale)
    assert scale.state[SCALE] == 65536


def test_a_static_scale_never_moves_but_still_skips() -> None:
    scale = LossScale(LAYOUT, initial=128.0, floor=128.0, ceiling=128.0, growth_steps=1)
    assert settle(scale)
    assert not settle(scale, "c")
    assert scale.state.tolist() == [128.0, 0.0, 1.0, 1.0]


def test_of_those_that_overflow_together_the_nearest_to_the_loss_is_the_first() -> None:
    scale = LossScale(LAYOUT)
    settle(scale, "a", "norm")  # norm comes after a in the network, though its slot stands behind
    settle(scale, "a")
    settle(scale, "a", "norm", "c")
    settle(scale)
    assert names(scale.firsts) == {"norm": 1, "a": 1, "c": 1}
    assert names(scale.overflows) == {"a": 3, "norm": 2, "c": 1}


def test_the_row_of_skipped_steps_ends_with_a_good_one() -> None:
    scale = LossScale(LAYOUT)
    settle(scale, "a")
    settle(scale, "a")
    assert (scale.state[ROW], scale.state[SKIPPED]) == (2, 2)
    settle(scale)
    settle(scale, "a")
    assert (scale.state[ROW], scale.state[SKIPPED]) == (1, 3)


@pytest.mark.parametrize(("bad", "expected"), [((), [1.0, 2.0]), (("a",), [0.0, 0.0])])
def test_the_numbers_of_a_skipped_step_are_dropped(bad: tuple[str, ...], expected: list[float]) -> None:
    scale = LossScale(LAYOUT)
    settle(scale, *bad)
    assert scale.drop_skipped(torch.tensor([1.0, 2.0])).tolist() == expected
    if bad:
        assert scale.drop_skipped(torch.tensor([float("nan")])).tolist() == [0.0]
