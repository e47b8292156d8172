"""Places for ranks: which one is left out when, and when it is tried again."""

import pytest

from lockstep.engine.places import Places


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def open_places(least: int, most: int, *devices: str) -> tuple[Places, Clock]:
    clock = Clock()
    return Places(least, most, devices, clock, retry_s=10.0), clock


def test_one_loss_is_an_accident() -> None:
    places, _ = open_places(1, 4)
    for local_rank in (2, 1, 2, 3):
        places.lose(local_rank)
    assert places.num_ranks == 4


def test_a_place_that_loses_its_rank_twice_running_is_left_out() -> None:
    places, _ = open_places(1, 4, "GPU-a", "GPU-b", "GPU-c", "GPU-d")
    assert places.describe() == {}
    assert not places.lose(2)
    assert places.lose(2)
    assert places.num_ranks == 3
    assert places.describe() == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-d"}
    places.lose(2)  # another place now: the third of those that are left
    assert places.num_ranks == 3
    places.lose(2)
    assert places.describe() == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}


def test_no_fewer_than_the_least() -> None:
    places, _ = open_places(2, 3)
    for _ in range(9):
        places.lose(0)
    assert places.num_ranks == 2


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_fixed_number_stays(count: int) -> None:
    places, _ = open_places(count, count)
    for _ in range(5):
        places.lose(0)
    assert places.num_ranks == count


def test_a_place_is_tried_again_and_after_one_more_loss_is_left_out_for_twice_as_long() -> None:
    places, clock = open_places(1, 2)
    places.lose(1)
    places.lose(1)
    clock.now_s = 9.9
    assert not places.is_waiting
    clock.now_s = 10.0
    assert places.is_waiting
    places.restore()
    assert places.num_ranks == 2
    assert not places.is_waiting
    places.lose(1)
    assert places.num_ranks == 1
    clock.now_s = 29.9
    assert not places.is_waiting
    clock.now_s = 30.0
    assert places.is_waiting


def test_without_gpus_there_is_nothing_to_tell_the_ranks() -> None:
    places, _ = open_places(1, 2)
    places.lose(0)
    places.lose(0)
    assert places.describe() == {}


def test_ranks_that_share_a_gpu_take_fewer_of_its_queues() -> None:
    assert Places(2, 2, devices=["0", "1"]).describe() == {}
    shared = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert Places(3, 3, devices=["0", "1"]).describe() == shared
    places, _ = open_places(1, 2, "0")
    places.lose(0)
    places.lose(0)
    assert places.num_ranks == 1
    assert places.describe() == shared  # and none is named, as the place that is left has none to itself
