"""Counters of joules, in files like those of Linux and on a real GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.engine.energy import Energy
from tests.ranks import world_of_one


def write_package(folder: Path, name: str, microjoules: int) -> Path:
    package = folder / name
    package.mkdir(parents=True, exist_ok=True)
    (package / "energy_uj").write_text(f"{microjoules}\n")
    (package / "max_energy_range_uj").write_text("9999999\n")
    return package


def test_packages_are_added_up_without_their_parts(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        write_package(tmp_path, name, 1_000_000)
    energy = Energy(world_of_one(), tmp_path)
    for name, value in (("intel-rapl:0", 3_000_000), ("intel-rapl:1", 1_500_000), ("intel-rapl:0:0", 9_000_000)):
        write_package(tmp_path, name, value)
    assert energy.count(world_of_one(), alone=False) == pytest.approx(2.5)


def test_a_counter_that_begins_again_goes_on(tmp_path: Path) -> None:
    write_package(tmp_path, "intel-rapl:0", 9_500_000)
    energy = Energy(world_of_one(), tmp_path)
    write_package(tmp_path, "intel-rapl:0", 500_000)
    assert energy.count(world_of_one(), alone=True) == pytest.approx(1.0)


def test_no_counter_is_no_number(tmp_path: Path) -> None:
    assert Energy(world_of_one(), tmp_path).count(world_of_one(), alone=False) is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert Energy(world_of_one(), tmp_path).count(world_of_one(), alone=False) is None


def test_the_first_rank_of_a_node_counts_for_all(tmp_path: Path) -> None:
    write_package(tmp_path, "intel-rapl:0", 0)
    assert Energy(replace(world_of_one(), local_rank=1), tmp_path).count(world_of_one(), alone=True) is None


@pytest.mark.gpu
def test_a_gpu_that_works_uses_energy() -> None:
    world = world_of_one()
    energy = Energy(world)
    matrix = torch.randn(4096, 4096, device=world.device)
    for _ in range(2000):
        matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
    used = energy.count(world, alone=False)
    assert used is None or 0.1 < used < 10_000
