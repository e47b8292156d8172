"""The averaged weights in a run: steps, evaluation, checkpoints, resumes, ranks, and whoever uses the network."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.comm.world import World, join_world
from lockstep.config import RunConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import apply_plan
from lockstep.engine.averaged import build_way, evaluate_both
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.inference import load_run, world_of
from lockstep.engine.measure import fake_batch
from lockstep.engine.run import run_rank
from lockstep.engine.scoring import open_scored, score
from lockstep.engine.state import State, list_changing, load_state
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.events import Evaluated
from lockstep.optim.schedule import Schedule
from lockstep.optim.storage import named_arrays
from lockstep.plan.plan import Execution
from tests.engine.conftest import tiny_config
from tests.engine.saving import save_state
from tests.engine.small import Keeping, alone, small_config
from tests.ranks import run_ranks

DECAY, EVERY, GLOBAL = 0.7, 2, 24
ORDER = {"seed": 5, "num_samples": 130}


def build_model(norm: bool) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6) if norm else nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def build_parts(
    world: World, *, compute: str = "fp32", average: float = DECAY, norm: bool = True, **precision: Any
) -> Parts:
    optim = {"average": average, "average_every": EVERY if average else 1}
    config = RunConfig.model_validate(
        {
            "optim": {"name": "sgd", "lr": 0.1, **optim},
            "precision": {"compute": compute, **precision},
            "train": {"global_batch": GLOBAL, "duration": "9st"},
        }
    )
    return assemble(config, world, build_model(norm), Schedule("constant", 0.1, total_steps=9))


def draw_batch(world: World, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.randn(GLOBAL, 3, 6, 6, generator=generator), torch.arange(GLOBAL) % 4
    own = slice(GLOBAL * world.rank // world.size, GLOBAL * (world.rank + 1) // world.size)
    images = images[own].contiguous(memory_format=torch.channels_last)
    return Batch(images, labels[own], GLOBAL, 0, np.arange(own.stop - own.start), Cursor())


def take_steps(parts: Parts, world: World, first: int, last: int) -> list[dict[str, Tensor]]:
    """The network before the first step and after each."""
    seen = [copy_network(parts)]
    for seed in range(first, last):
        train_step(parts, draw_batch(world, seed), 0.1)
        seen.append(copy_network(parts))
    return seen


def copy_network(parts: Parts) -> dict[str, Tensor]:
    buffers = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
    return named_arrays(parts.weights, parts.layout) | buffers


def copy_all(parts: Parts) -> list[Tensor]:
    return [array.clone() for array in list_changing(parts).arrays()]


def average_in_fp64(history: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    """The definition over the networks of good steps alone."""
    average = {name: array.double().numpy() for name, array in history[0].items()}
    for update, network in enumerate(history[EVERY::EVERY]):
        kept = min(DECAY, (1 + update) / (10 + update))
        average = {
            name: kept * values + (1 - kept) * network[name].double().numpy() for name, values in average.items()
        }
    return average


def check_average(parts: Parts, history: list[dict[str, Tensor]]) -> None:
    assert parts.average
    expected = average_in_fp64(history)
    found = named_arrays(parts.average.weights, parts.layout)
    found |= {"1.running_mean": parts.average.statistics[:6], "1.running_var": parts.average.statistics[6:]}
    assert len(found) == 7
    for name, values in found.items():
        np.testing.assert_allclose(values.numpy(), expected[name], rtol=0, atol=1e-6)
        assert np.abs(expected[name] - history[-1][name].numpy()).max() > 1e-6, name


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_steps_average_masters_and_statistics_as_the_definition_has_it(compute: str) -> None:
    world = alone()
    parts = build_parts(world, compute=compute)
    check_average(parts, take_steps(parts, world, 0, 7))


def test_a_run_without_an_average_steps_to_the_last_bit_alike() -> None:
    world = alone()
    plain, averaged = build_parts(world, average=0.0), build_parts(world)
    assert plain.average is None
    for mine, other in zip(take_steps(plain, world, 0, 4), take_steps(averaged, world, 0, 4), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_steps_that_the_loss_scale_skips_do_not_move_it() -> None:
    """From 2**24 on the scale halves until gradients are finite; the average counts what is left."""
    world = alone()
    parts = build_parts(world, compute="fp16", initial_scale=2.0**24)
    history = take_steps(parts, world, 0, 24)
    assert parts.loss_scale
    skipped = int(parts.loss_scale.state[3])
    assert 0 < skipped < 20
    good = [history[0]]
    for before, after in pairwise(history):
        good += [after] if not torch.equal(before["5.weight"], after["5.weight"]) else []
    assert len(good) == 25 - skipped == int(parts.rule.count) + 1
    check_average(parts, good)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_same_modules_compute_with_the_average_and_then_with_their_own_again(compute: str) -> None:
    world = alone()
    parts = build_parts(world, compute=compute)
    take_steps(parts, world, 0, 6)
    assert parts.average
    plain = copy.deepcopy(build_model(True))
    plain.load_state_dict(
        named_arrays(parts.average.weights, parts.layout)
        | {"1.running_mean": parts.average.statistics[:6], "1.running_var": parts.average.statistics[6:]},
        strict=False,
    )
    batch, model = draw_batch(world, 99), parts.model.eval()
    addresses = [array.data_ptr() for array in (*model.parameters(), *model.buffers())]
    images = batch.images.to(parts.dtype)
    with torch.no_grad():
        own = model(images).float()
        with build_way(parts, parts.average, world)():
            averaged = model(images).float()
        again = model(images).float()
        expected = plain.eval()(batch.images)
    assert torch.equal(own, again)
    assert addresses == [array.data_ptr() for array in (*model.parameters(), *model.buffers())]
    torch.testing.assert_close(averaged, expected, rtol=0, atol={"fp32": 1e-5, "bf16": 0.05}[compute])
    assert (own - averaged).abs().max() > 0.01


def evaluate_on(world: World) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    parts = build_parts(world)
    take_steps(parts, world, 0, 5)
    before = copy_all(parts)
    batches = [draw_batch(world, seed) for seed in (7, 8)]
    return *evaluate_both(parts, batches, world), before, copy_all(parts)  # type: ignore[arg-type]


def test_an_evaluation_counts_both_and_changes_nothing() -> None:
    """Two ranks evaluate with the mean of their statistics, and of their averages."""
    ranks = run_ranks(evaluate_on, 2)
    assert ranks[0][:2] == ranks[1][:2]
    for result, average, before, after in (*ranks, evaluate_on(alone())):
        assert result.total == average.total == 2 * GLOBAL
        assert result.loss != average.loss
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def train_and_save(world: World, folder: Path) -> list[Tensor]:
    """Seven steps, of which a checkpoint is written after the third, between two updates of the average."""
    parts = build_parts(world)
    take_steps(parts, world, 0, 3)
    save_state(folder, State(step=3), parts, world, ORDER, keep=1)
    take_steps(parts, world, 3, 7)
    return copy_all(parts)


def load_and_train(world: World, folder: Path) -> list[Tensor]:
    parts = build_parts(world)
    load_state(folder, parts, world, ORDER, pytest.fail)
    take_steps(parts, world, 3, 7)
    return copy_all(parts)


def test_a_run_goes_on_amid_it_to_the_last_bit_and_near_it_on_other_ranks(tmp_path: Path) -> None:
    before = run_ranks(train_and_save, 2, tmp_path)
    for mine, other in zip(before, run_ranks(load_and_train, 2, tmp_path), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
    kept = load_file(tmp_path / "step-00000003" / "statistics.safetensors")
    assert kept.keys() == {"ranks", "average"}
    assert not torch.equal(kept["average"][0], kept["average"][1])
    network = load_file(tmp_path / "step-00000003" / "average.safetensors")
    torch.testing.assert_close(network["1.running_mean"], kept["average"].mean(dim=0)[:6])
    (alone,) = run_ranks(load_and_train, 1, tmp_path)
    assert len(alone) == len(before[0])


def test_an_average_that_a_checkpoint_lacks_begins_with_its_weights(tmp_path: Path) -> None:
    world = alone()
    plain = build_parts(world, average=0.0)
    take_steps(plain, world, 0, 3)
    save_state(tmp_path, State(step=3), plain, world, ORDER, keep=1)
    assert not (tmp_path / "step-00000003" / "average.safetensors").exists()
    parts = build_parts(world)
    load_state(tmp_path, parts, world, ORDER, pytest.fail)
    assert parts.average
    assert torch.equal(parts.average.weights, plain.weights)
    assert torch.equal(parts.average.statistics, torch.cat([plain.model[1].running_mean, plain.model[1].running_var]))


def average_of(world: World) -> Tensor:
    parts = build_parts(world, norm=False)
    take_steps(parts, world, 0, 6)
    assert parts.average
    return parts.average.weights


def test_it_does_not_depend_on_the_number_of_ranks() -> None:
    one = average_of(alone())
    for size in (2, 3):
        ranks = run_ranks(average_of, size)
        assert all(torch.equal(other, ranks[0]) for other in ranks)
        torch.testing.assert_close(ranks[0], one, rtol=0, atol=1e-6)


def test_whoever_uses_the_run_gets_the_averaged_network_unless_told_otherwise(images: Path, tmp_path: Path) -> None:
    settings = ["train.duration=8st", "train.checkpoint_every=0st", "optim.warmup=0st", "train.eval_every=0st"]
    config = tiny_config(images, *settings, "optim.average=0.8")
    heard, run = Keeping(), tmp_path / "run"
    run_rank(config, "tiny", run, resume=False, membership=None, open_sink=lambda world, folder: heard)
    (evaluated,) = [event for event in heard.events if isinstance(event, Evaluated)]
    assert evaluated.average_correct1 is not None
    assert evaluated.average_loss != evaluated.loss
    found = {}
    for average in (None, False):
        trained = load_run(run, average=average)
        result = score(trained, open_scored(trained), world_of(torch.device("cpu")))
        assert result
        found[trained.is_average] = (result.accuracy.correct1, result.accuracy.correct5)
        loss = evaluated.average_loss if trained.is_average else evaluated.loss
        assert result.accuracy.loss == pytest.approx(loss, rel=1e-5)
    assert found == {
        True: (evaluated.average_correct1, evaluated.average_correct5),
        False: (evaluated.correct1, evaluated.correct5),
    }
    newest = list_checkpoints(run / "checkpoints")[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    assert "average.safetensors" in manifest["sha256"]


def test_an_average_that_is_not_there_is_a_sentence(trained_run: Path) -> None:
    assert not load_run(trained_run).is_average
    with pytest.raises(LockstepError, match=r"holds no averaged weights: optim.average was not set"):
        load_run(trained_run, average=True)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_recorded_step_holds_the_average(compute: str, every: int) -> None:
    config = small_config(compute, optim={"average": 0.8, "average_every": every})
    with join_world(None) as world:
        found = []
        for recorded in (False, True):
            set_number_formats(config.precision)
            schedule = Schedule("constant", 0.1, total_steps=1)
            parts = assemble(config, world, build_network(config, 10), schedule)
            assert parts.average
            step = apply_plan(Execution("own", recorded=recorded), parts.reducer.plan, parts, 16, 16)
            batch, history = fake_batch(config, world), [parts.weights.double()]
            for _ in range(9):
                step(batch, 0.1, False)
                history.append(parts.weights.double())
            expected = history[0]
            for update, weights in enumerate(history[every::every]):
                expected = expected.lerp(weights, 1 - min(0.8, (1 + update) / (10 + update)))
            assert (parts.average.weights - expected).norm() / expected.norm() < 1e-6
            assert (parts.average.weights - parts.weights).norm() / expected.norm() > 1e-5
            found.append(parts.average.weights.clone())
    assert (found[0] - found[1]).norm() / found[0].norm() < {"fp16": 2e-3, "fp32": 1e-4}[compute]
