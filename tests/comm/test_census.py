"""One backend for all ranks and threads for each, from records that are given."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from lockstep.comm.census import (
    NO_DEVICE,
    SLOWER,
    Agreement,
    Place,
    choose_backend,
    find_place,
    share_cores,
    take_census,
)
from lockstep.comm.seal import Seal
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from tests.engine import commands
from tests.ranks import run_ranks

ALL = 0xFFFF  # sixteen cores


def slurm(num_nodes: int, per_node: int) -> list[Place]:
    """As `--gpus-per-task=1 --cpus-per-task=4`: each task sees one GPU, always number 0, and cores of its own."""
    return [
        Place(f"node{node}", f"GPU-{node}-{task}", 0xF << 4 * task)
        for node in range(num_nodes)
        for task in range(per_node)
    ]


def test_ranks_that_see_one_gpu_of_their_own_each_use_nccl_and_all_their_cores() -> None:
    places = slurm(2, 4)
    assert choose_backend(places) == ("nccl", "", 0)
    assert share_cores(places) == [4] * 8


def test_two_ranks_on_one_gpu_use_gloo_with_a_reason_and_divide_the_cores() -> None:
    places = [Place("a", "GPU-1", ALL), Place("a", "GPU-1", ALL)]
    assert choose_backend(places) == ("gloo", f"Ranks 0 and 1 share one GPU, {SLOWER}", 1)
    assert share_cores(places) == [8, 8]


def test_without_gpus_gloo_is_the_usual_choice() -> None:
    places = [Place("a", NO_DEVICE, ALL)] * 3
    assert choose_backend(places) == ("gloo", "", 0)
    assert share_cores(places) == [5] * 3


def test_a_node_without_gpus_among_others_makes_all_use_gloo_with_a_reason() -> None:
    places = [Place("a", "GPU-1", ALL), Place("a", "GPU-2", ALL), Place("b", NO_DEVICE, ALL)]
    assert choose_backend(places) == ("gloo", f"Rank 2 has no GPU while others have one, {SLOWER}", 2)
    assert share_cores(places) == [8, 8, 16]


def test_nodes_of_several_gpus_with_common_cores_use_nccl() -> None:
    places = [Place(node, f"GPU-{node}{gpu}", ALL) for node in "ab" for gpu in range(4)]
    assert choose_backend(places).backend == "nccl"
    assert share_cores(places) == [4] * 8


def test_nccl_that_a_rank_cannot_have_is_nobodys_and_what_else_is_asked_for_is_done() -> None:
    places = [Place("a", "GPU-1", ALL), Place("b", NO_DEVICE, ALL)]
    assert choose_backend(places, "nccl") == ("none", "", 1)
    assert choose_backend(places, "gloo") == ("gloo", "", 0)
    assert choose_backend([places[0]] * 2, "nccl").backend == "shared"  # asked for by name: a test


@pytest.mark.parametrize(
    ("masks", "threads"),
    [([0b1111, 0b1100], [3, 1]), ([0b1, 0b1, 0b1], [1, 1, 1]), ([0b11, 0b11, 0b110000], [1, 1, 2])],
)
def test_masks_that_overlap_in_part_share_what_they_have_in_common(masks: list[int], threads: list[int]) -> None:
    assert share_cores([Place("a", NO_DEVICE, mask) for mask in masks]) == threads


def agree(places: list[Place], store: HashStore, **options: str) -> list[Agreement | str]:
    """What each rank hears."""
    heard: dict[int, Agreement | str] = {}

    def ask(rank: int) -> None:
        asked, secret = options.get("asked", "auto"), Seal(options.get("secret", ""))
        try:
            heard[rank] = take_census(store, rank, len(places), places[rank], asked=asked, seal=secret, timeout_s=60)
        except LockstepError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in reversed(range(len(places)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return [heard[rank] for rank in range(len(places))]


def test_all_ranks_hear_the_same_backend_and_rank_0_why() -> None:
    first, second, third = agree(
        [Place("a", "GPU-1", ALL), Place("a", "GPU-1", ALL), Place("b", "GPU-2", 1)], HashStore()
    )
    said = "Ranks 0 and 1 share one GPU, so all ranks use Gloo, which is slower than NCCL."
    assert first == Agreement("gloo", 8, said)
    assert (second, third) == (Agreement("gloo", 8, ""), Agreement("gloo", 1, ""))


def test_ranks_asked_to_share_a_gpu_over_nccl_all_know_that_they_do() -> None:
    first, second = agree([Place("a", "GPU-1", ALL)] * 2, HashStore(), asked="nccl")
    said = "Several ranks share one GPU, so NCCL's sums go through sockets: for tests."
    assert (first, second) == (Agreement("nccl", 8, said, True), Agreement("nccl", 8, "", True))
    alone = agree([Place("a", "GPU-1", ALL), Place("a", "GPU-2", ALL)], HashStore(), asked="nccl")
    assert alone == [Agreement("nccl", 8, "")] * 2


def test_nccl_without_a_device_is_one_sentence_on_every_rank() -> None:
    places = [Place("a", "GPU-1", ALL), Place("b", NO_DEVICE, ALL)]
    for sentence in agree(places, HashStore(), asked="nccl"):
        assert sentence == "comm.backend is nccl but rank 1 has no CUDA device; use gloo or auto."


def test_a_strangers_record_is_as_if_it_had_not_come() -> None:
    store = HashStore()
    store.set("lockstep/agreed/1", "- nccl 999999 0")
    heard = agree([Place("a", NO_DEVICE, ALL)] * 2, store, secret="the run's")
    assert heard == [Agreement("gloo", 8, "")] * 2


class RobbedStore(HashStore):
    """A store from which a stranger takes every answer as soon as it is there."""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.delete_key(key)
        time.sleep(0.01)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.delete_key(key)
        return expected.encode()

    def get(self, key: str) -> bytes:
        time.sleep(8)
        raise RuntimeError("wait timeout")


class SpoiltStore(HashStore):
    """A store in which a stranger overwrites every answer."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return b"nonsense"

    def get(self, key: str) -> bytes:
        return b"nonsense"


@pytest.mark.parametrize("kind", [RobbedStore, SpoiltStore])
def test_a_stranger_who_takes_or_spoils_every_answer_costs_the_timeout_and_no_more(kind: type[HashStore]) -> None:
    begun = time.monotonic()
    with pytest.raises(LockstepError, match="left no word of where it runs"):
        take_census(kind(), 0, 1, Place("a", NO_DEVICE, ALL), asked="auto", seal=Seal("ours"), timeout_s=0.5)
    assert time.monotonic() - begun < 5


def count_threads(world: World) -> tuple[int, str]:
    return world.num_threads, world.notice


def test_real_ranks_divide_the_cores_they_share() -> None:
    cores = len(os.sched_getaffinity(0))
    assert run_ranks(count_threads, 3) == [(max(1, cores // 3), "")] * 3


def test_this_machines_record_names_its_cores() -> None:
    place = find_place(torch.device("cpu"))
    assert place.device == NO_DEVICE
    assert place.cores.bit_count() == len(os.sched_getaffinity(0))


def test_nccl_on_a_machine_without_a_gpu_is_one_sentence(tmp_path: Path) -> None:
    """The rank that keeps the store says it, and no other rank complains that the store is gone."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    status, out, err = commands.run("train", "quickstart", "--ranks=2", "--set=comm.backend=nccl", cwd=tmp_path)
    assert status == 1, out
    assert err.strip() == "lockstep: comm.backend is nccl but rank 0 has no CUDA device; use gloo or auto."
