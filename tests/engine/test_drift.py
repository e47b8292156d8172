"""Ranks whose weights are no longer equal are found out, without a message of their own."""

from pathlib import Path

import pytest
import torch

from lockstep.comm.world import World
from lockstep.engine.build import Parts, assemble, build_network
from lockstep.engine.drift import DIGITS, find_drift, note_weights
from lockstep.engine.measure import fake_batch
from lockstep.engine.step import train_step
from lockstep.errors import SharedError
from lockstep.optim.schedule import Schedule
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.engine.small import small_config
from tests.ranks import over_nccl, run_ranks, world_of_one


def take_step(world: World, *wrong: tuple[int, int, float]) -> tuple[str, torch.Tensor]:
    """What is said after one step, and the weights; `wrong` are (rank, place, factor) of damaged weights."""
    config = small_config("fp32")
    parts = assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))
    for rank, place, factor in wrong:
        if world.rank == rank:
            parts.weights[place] *= factor
    note_weights(parts)
    side = train_step(parts, fake_batch(config, world), 0.01)
    try:
        said = find_drift(parts, side, world)
    except SharedError as error:
        return str(error), parts.weights
    return said, parts.weights


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), over_nccl(2), over_nccl(4)])
def test_equal_weights_are_nothing_to_speak_of(backend: str, size: int) -> None:
    results = run_ranks(take_step, size, backend=backend)  # type: ignore[arg-type]
    assert [said for said, _ in results] == [""] * size


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), over_nccl(2)])
def test_a_rank_far_off_ends_the_run_and_is_named_by_all(backend: str, size: int) -> None:
    results = run_ranks(take_step, size, (1, 40, 1e9), backend=backend)  # type: ignore[arg-type]
    assert len({said for said, _ in results}) == 1
    assert results[0][0].startswith("Ranks 0 and 1 no longer hold" if size == 2 else "Rank 1 no longer holds")


def test_a_difference_in_the_last_digit_is_mended_and_said() -> None:
    results = run_ranks(take_step, 3, (2, 40, 1 + 2e-7))
    for said, weights in results:
        assert "differed in their last digits" in said
        assert torch.equal(weights, results[0][1])


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
