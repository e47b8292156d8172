"""T = S · N · e of made-up windows, worked by hand."""

import pytest

from lockstep.engine.account import Account
from lockstep.events import AnchorTaken
from tests.ranks import world_of_one

ANCHOR = {"samples": 100, "loss": 1.0, "gradient_norm": 1.0, "scale": None, "ledger": ""}


def count_steps(account: Account, num_steps: int, images: int, **seconds: float) -> None:
    """A window of so many steps."""
    for _ in range(num_steps):
        account.count(images)
    account.close_window({"input": 0.0, "compute": 0.0, "communicate": 0.0, "other": 0.0, **seconds})  # type: ignore[arg-type]


def test_throughput_is_over_steps_and_passes_for_anchors_and_still_s_n_e() -> None:
    # After the first step 10 steps of 50 images in 1.0 + 3.0 + 1.0 s, and two passes of 2.5 s: 500 images in 10 s.
    account = Account()
    account.hear(AnchorTaken(step=0, seconds=2.5, **ANCHOR))  # type: ignore[arg-type]
    count_steps(account, 1, 50, compute=7.0)
    count_steps(account, 10, 50, input=1.0, compute=3.0, communicate=1.0)
    account.hear(AnchorTaken(step=11, seconds=2.5, **ANCHOR))  # type: ignore[arg-type]
    world = world_of_one()
    found = account.balance(world, alone=False)
    assert (found.images, found.train_s, account.beside().anchor_s) == (500, pytest.approx(5.0), 5.0)
    assert found.images_per_second == pytest.approx(50.0)
    assert found.efficiency == pytest.approx(0.6)  # of the steps, as without anchors
    assert found.speed_one_rank == pytest.approx(50.0 / 0.6)
    assert (found.share_input, found.share_compute, found.share_comm) == pytest.approx((0.2, 0.6, 0.2))


def test_without_anchors_throughput_is_over_the_steps_alone() -> None:
    account = Account()
    count_steps(account, 1, 50, compute=7.0)
    count_steps(account, 10, 50, compute=4.0, communicate=1.0)
    found = account.balance(world_of_one(), alone=True)
    assert (found.images_per_second, found.speed_one_rank, found.efficiency) == pytest.approx((100.0, 125.0, 0.8))
