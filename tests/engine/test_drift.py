"""Ranks whose weights are no longer equal are found out, without a message of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from lockstep.comm.world import World
from lockstep.engine import drift
from lockstep.engine.build import Parts, assemble, build_network
from lockstep.engine.drift import DIGITS, Gap, find_drift, measure_gap, note_weights
from lockstep.engine.measure import fake_batch
from lockstep.engine.state import list_changing
from lockstep.engine.step import train_step
from lockstep.errors import SharedError
from lockstep.layout import ALIGNMENT
from lockstep.optim.schedule import Schedule
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.engine.small import small_config
from tests.ranks import Backend, over_nccl, run_ranks, world_of_one

Place = int | Literal["all", "largest"]
Wrong = tuple[int, Place, float]  # rank, place and factor of damaged weights


def damage(array: torch.Tensor, place: Place, factor: float) -> None:
    where = {"all": slice(None), "largest": int(array.abs().argmax())}.get(place, place)  # type: ignore[arg-type]
    array[where] *= factor


def take_step(
    world: World, *wrong: Wrong, average: float = 0.0, compute: str = "fp32"
) -> tuple[str, dict[str, torch.Tensor]]:
    """What is said after one step, and all that lies over the layout then."""
    config = small_config(compute, optim={"average": average})
    parts = assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))
    for rank, place, factor in wrong:
        if world.rank == rank:
            damage(parts.average.weights if parts.average else parts.weights, place, factor)
    note_weights(parts)
    side = train_step(parts, fake_batch(config, world), 0.01)
    try:
        said = find_drift(parts, side, world)
    except SharedError as error:
        said = str(error)
    return said, list_changing(parts).over_layout | {"half": parts.half_weights}


def take_step_in_half(world: World, *wrong: Wrong) -> tuple[str, dict[str, torch.Tensor]]:
    return take_step(world, *wrong, compute="bf16")


def take_averaged_step(world: World, *wrong: Wrong) -> tuple[str, dict[str, torch.Tensor]]:
    return take_step(world, *wrong, average=0.9)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), over_nccl(2), over_nccl(4)])
def test_equal_weights_are_nothing_to_speak_of(backend: str, size: int) -> None:
    results = run_ranks(take_step, size, backend=backend)  # type: ignore[arg-type]
    assert [said for said, _ in results] == [""] * size


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), over_nccl(2)])
def test_a_rank_far_off_ends_the_run_and_is_named_by_all(backend: str, size: int) -> None:
    results = run_ranks(take_step, size, (1, 40, 1e9), backend=backend)  # type: ignore[arg-type]
    assert len({said for said, _ in results}) == 1
    assert results[0][0].startswith("Ranks 0 and 1 no longer hold" if size == 2 else "Rank 1 no longer holds")


@pytest.mark.parametrize(
    ("size", "wrong", "who"),
    [
        (2, (1, "all", -1.0), "Ranks 0 and 1 no longer hold the same weights"),
        (2, (0, "largest", -1.0), "Ranks 0 and 1 no longer hold the same weights"),
        (3, (2, "all", -1.0), "Rank 2 no longer holds the weights of the others"),
        (3, (1, "largest", -1.0), "Rank 1 no longer holds the weights of the others"),
        (3, (0, "largest", -1.0), "Rank 0 no longer holds the weights of the others"),
    ],
)
def test_weights_of_the_other_sign_are_far_off_though_their_norm_is_the_same(size: int, wrong: Wrong, who: str) -> None:
    said = {said for said, _ in run_ranks(take_step, size, wrong)}
    assert len(said) == 1
    assert said.pop().startswith(who)


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
def test_the_distance_of_negated_weights_is_twice_their_norm(backend: Backend) -> None:
    said, _ = run_ranks(take_step, 2, (1, "all", -1.0), backend=backend)[0]
    assert "those of ranks 0 and 1 differ by 2 of their norm, and in one place by 2 of the largest" in said


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
@pytest.mark.parametrize("step", [take_step, take_step_in_half, take_averaged_step])
@pytest.mark.parametrize("wrong", [(2, 40, 1 + 2e-7), (0, "all", 1 + 2e-7)])
def test_differences_in_the_last_digits_are_mended_and_said(
    backend: Backend, step: Callable[..., object], wrong: Wrong
) -> None:
    results = run_ranks(step, 3, wrong, backend=backend)
    first = results[0][1]
    assert len(first) >= 3
    for said, arrays in results:
        assert "differed in their last digits" in said
        assert all(torch.equal(arrays[name], first[name]) for name in first)


def test_an_average_that_is_damaged_is_found_though_it_moves_no_weights() -> None:
    results = run_ranks(take_averaged_step, 3, (1, "largest", -1.0))
    assert torch.equal(results[0][1]["weights"], results[1][1]["weights"])
    for said, _ in results:
        assert said.startswith("Rank 1 no longer holds the averaged weights of the others")


NAN = float("nan")
NEAR, FAR, LOST = Gap(1e-6, 1e-5), Gap(1e-6, 0.5), Gap(NAN, NAN)


@pytest.mark.parametrize(
    ("gaps", "who"),
    [
        ([Gap(0, 0), NEAR, NEAR], ""),
        ([Gap(0, 0), FAR], "Ranks 0 and 1 no longer hold"),
        ([Gap(0, 0), NEAR, FAR, Gap(2, 2)], "Ranks 0 and 3 no longer hold"),
        ([Gap(0, 0), NEAR, Gap(0.1, 0), NEAR], "Rank 2 no longer holds"),
        ([Gap(0, 0), FAR, FAR, FAR], "Rank 0 no longer holds"),
        ([Gap(0, 0), NEAR, LOST], "Rank 2 no longer holds"),
        ([LOST, LOST, LOST], "Rank 0 no longer holds"),
    ],
)
def test_the_rank_that_most_others_contradict_is_named(gaps: list[Gap], who: str) -> None:
    try:
        drift._refuse_far("weights", gaps)
        said = ""
    except SharedError as error:
        said = str(error)
    assert said.startswith(who)
    assert bool(said) == bool(who)


def draw_array(rank: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank))


def measure_in_pieces(world: World) -> Gap:
    drift.PIECE = 96  # more than one, and the last of them shorter
    return measure_gap(draw_array(world.rank), world)


def test_a_gap_is_that_of_the_whole_arrays_to_the_first_rank() -> None:
    first = draw_array(0).double().numpy()
    for rank, (of_norm, of_largest) in enumerate(run_ranks(measure_in_pieces, 3)):
        apart = draw_array(rank).double().numpy() - first
        assert of_norm == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(first), rel=1e-12)
        assert of_largest == pytest.approx(np.abs(apart).max() / np.abs(first).max(), rel=1e-12)


def build_parts() -> Parts:
    config, world = small_config("fp32"), world_of_one()
    return assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))


def test_the_checksum_sees_any_single_bit() -> None:
    parts = build_parts()
    note_weights(parts)
    before = parts.note[DIGITS].clone()
    for place, bit in ((0, 0), (1, 12), (100, 30)):
        parts.weights.view(torch.int32)[place] ^= 1 << bit
        note_weights(parts)
        assert not torch.equal(parts.note[DIGITS], before)
        parts.weights.view(torch.int32)[place] ^= 1 << bit
    note_weights(parts)
    assert torch.equal(parts.note[DIGITS], before)
    assert (before == before.round()).all()
    assert (before.min() >= 0) & (before.max() < 256)


def read_digits(parts: Parts) -> list[float]:
    note_weights(parts)
    return parts.note[DIGITS].tolist()


def test_the_checksum_is_that_of_the_whole_array_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = build_parts().weights
    whole = drift._sum_bits(weights)
    bits = weights.view(torch.int32).numpy().astype(np.int64).reshape(-1, ALIGNMENT)
    assert whole == (bits.sum(axis=0) * np.arange(1, 2 * ALIGNMENT, 2)).sum()
    monkeypatch.setattr(drift, "PIECE", 1000 * ALIGNMENT)  # the last of them shorter
    assert len(weights) % drift.PIECE
    assert drift._sum_bits(weights) == whole


def test_the_checksum_sees_signs_and_places_that_are_exchanged() -> None:
    parts = build_parts()
    parts.weights[100], parts.weights[101], parts.weights[132] = 0.5, -0.5, 0.25
    before = read_digits(parts)
    for first, second in ((100, 101), (101, 132)):
        parts.weights[[first, second]] = parts.weights[[second, first]]
        assert read_digits(parts) != before
        parts.weights[[first, second]] = parts.weights[[second, first]]
    parts.weights[[100, 101]] *= -1.0
    assert read_digits(parts) != before


def test_no_rank_takes_the_mean_of_two_others_for_its_own_digits() -> None:
    """It would go on while they wait for it. Sums of bits that lie evenly apart have digits that do not."""
    parts = build_parts()
    bits = parts.weights.view(torch.int32)
    digits = []
    for _ in range(200):
        bits[40] += 1
        digits.append(np.array(read_digits(parts)))
    for apart in (1, 2, 3):
        for low, mid, high in zip(digits, digits[apart:], digits[2 * apart :], strict=False):
            assert (low + high != 2 * mid).any()


def test_a_run_of_unlike_ranks_goes_on_and_one_whose_memory_fails_ends(images: Path, tmp_path: Path) -> None:
    """A rank's weights are damaged in mid-run by a module that Python loads at its start."""
    (tmp_path / "sitecustomize.py").write_text(DAMAGE)
    folder = tmp_path / "run"
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), "train.log_every=2"]]
    status, out, err = commands.run(
        "train", "quickstart", "--ranks=2", f"--out={folder}", *settings, PYTHONPATH=f"{tmp_path}:{commands.ROOT}"
    )
    assert status == 1
    assert "Ranks 0 and 1 no longer hold the same weights" in err
    assert err.count("lockstep:") == 1
    assert "Traceback" not in out + err


DAMAGE = """
import os, sys
if "train" in sys.orig_argv:
    import importlib.abc, importlib.util

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "lockstep.engine.drift":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                note, count = module.note_weights, [0]

                def damage(parts):
                    count[0] += 1
                    if count[0] == 2 and os.environ.get("RANK") == "1":
                        parts.weights[7] += 1000.0
                    note(parts)

                module.note_weights = damage

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
"""
