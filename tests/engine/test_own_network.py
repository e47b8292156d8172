"""A network of the user's own, from the recipe's words to trained weights: on ranks, in half precision, resumed."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lockstep
from lockstep.comm.world import World, join_world
from lockstep.config import RunConfig, to_toml
from lockstep.data.order import share
from lockstep.engine.apply import apply_plan
from lockstep.engine.build import Parts, assemble, build_network, set_number_formats
from lockstep.engine.measure import fake_batch
from lockstep.engine.planning import choose_plan
from lockstep.engine.run import run_rank
from lockstep.engine.step import LOSS, train_step
from lockstep.errors import LockstepError, SharedError
from lockstep.optim.schedule import Schedule
from lockstep.plan.plan import Execution
from lockstep.recipes.read import load_recipe
from tests.engine import commands
from tests.engine.conftest import tiny_config, tiny_settings
from tests.engine.own_networks import Patches, Shared
from tests.engine.test_run import open_sink, read_config
from tests.ranks import run_ranks, world_of_one

MODEL = "model={name = 'tests.engine.own_networks:Patches', settings = {width = 24, depth = 3}}"
ADAMW = ["optim.name=adamw", "optim.lr=0.002", "optim.warmup=0st"]
SGD = ["optim.name=sgd", "optim.lr=0.1"]  # where AdamW would make much of what is nearly nothing


def build(config: RunConfig, world: World) -> Parts:
    set_number_formats(config.precision)
    return assemble(config, world, build_network(config, 10), Schedule("constant", 0.01, total_steps=1))


def own_config(images: Path, *settings: str) -> RunConfig:
    return tiny_config(images, MODEL, *ADAMW, *settings)


def test_two_ranks_train_it_and_a_resumed_run_ends_with_the_same_weights(images: Path, tmp_path: Path) -> None:
    """Started in a folder that holds the code, and resumed there."""
    source = Path(__file__).with_name("own_networks.py").read_text()
    (tmp_path / "mine.py").write_text(source)
    model = MODEL.replace("tests.engine.own_networks", "mine")
    settings = [f"--set={each}" for each in (*tiny_settings(images), model, *ADAMW, "optim.schedule=constant")]
    for name, duration, more in (
        ("whole", "6st", []),
        ("parts", "3st", []),
        ("parts", "6st", ["--resume"]),
    ):
        wanted = [] if more else settings  # the run's own folder has them
        asked = [f"--out={name}", "--ranks=2", *wanted, f"--set=train.duration={duration}", *more]
        status, _, err = commands.run("train", "quickstart", *asked, cwd=tmp_path)
        assert status == 0, err
    whole, parts = (
        load_file(tmp_path / name / "checkpoints" / "step-00000006" / "model.safetensors")
        for name in ("whole", "parts")
    )
    assert read_config(tmp_path / "parts")["model"]["name"] == "mine:Patches"
    assert whole.keys() == Patches(10, depth=3).state_dict().keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole if name != "drawn")
    start = build_network(own_config(images), 10).state_dict()
    assert not torch.equal(whole["blocks.2.norm1.weight"], start["blocks.2.norm1.weight"])
    assert torch.equal(whole["unused.bias"], start["unused.bias"])
    assert (whole["table"].dtype, whole["mask"].dtype, whole["drawn"].dtype) == (
        torch.int16,
        torch.bool,
        torch.float32,
    )


def test_a_network_whose_modules_share_arrays_can_be_used(images: Path, tmp_path: Path) -> None:
    config = tiny_config(images, "model={name = 'tests.engine.own_networks:Shared'}", "train.duration=1ep", *ADAMW)
    run_rank(config, "own", tmp_path / "run", resume=False, membership=None, open_sink=open_sink)
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-00000005" / "model.safetensors")
    assert "back.weight" not in saved
    assert "norm2.running_mean" not in saved
    trained = lockstep.load(tmp_path / "run", device="cpu")
    assert all(torch.equal(trained.network.state_dict()[name], array) for name, array in saved.items())
    [exported] = lockstep.export(tmp_path / "run")
    other = Shared(10)
    other.load_state_dict(load_file(exported.file))
    noise = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(noise), trained.network(noise))


def train_alone(world: World, images: Path, count: int) -> tuple[Tensor, list[str], dict[str, Tensor]]:
    config = own_config(images, *SGD)
    parts, batch = build(config, world), fake_batch(config, world_of_one())
    start, stop = share(len(batch.labels), world.rank, world.size)
    own = replace(batch, images=batch.images[start:stop], labels=batch.labels[start:stop])
    parts.model.eval()  # dropout draws another number on every rank
    for _ in range(count):
        train_step(parts, own, 0.1)
    return parts.weights.clone(), [slot.name for slot in parts.layout.slots], dict(parts.model.named_buffers())


def test_ranks_come_to_the_weights_of_one(images: Path) -> None:
    alone, names, _ = train_alone(world_of_one(), images, 2)
    found = run_ranks(train_alone, 2, images, 2)
    assert all(torch.equal(values, found[1][2][name]) for name, values in found[0][2].items())
    for weights, same, _ in found:
        assert same == names
        torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precision_keeps_norms_scales_and_positions_in_full(compute: str, images: Path) -> None:
    config = own_config(images, f"precision.compute={compute}")
    with join_world(None) as world:
        parts = build(config, world)
        full = {name for name, p in parts.model.named_parameters() if p.dtype == torch.float32}
        assert full == {
            name
            for name, _ in parts.model.named_parameters()
            if "norm" in name or name.endswith(("scale", "pos_embed", "cls_token"))
        }
        parts.model.eval()  # without dropout
        batch = fake_batch(config, world)
        losses = [float(train_step(parts, batch, 0.01)[LOSS]) for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]
    reference = build(own_config(images), world_of_one())
    reference.model.eval()
    exact = fake_batch(own_config(images), world_of_one())
    assert float(train_step(reference, exact, 0.01)[LOSS]) == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model.name=nothing.of:This", "nothing.of:This cannot be imported"),
        ("model.name=vgg", "There is no model 'vgg'"),
        ("model.freeze=['blocks.7']", "model.freeze names 'blocks.7'"),
        ("model.weights=none.pth", r"model.weights = none.pth is no file and no folder"),
    ],
)
def test_a_mistake_is_one_sentence_of_one_rank_and_leaves_no_run_behind(
    setting: str, sentence: str, images: Path, tmp_path: Path
) -> None:
    config = own_config(images, setting)
    with pytest.raises(SharedError, match=sentence):
        run_rank(config, "own", tmp_path / "runs" / "one", resume=False, membership=None, open_sink=open_sink)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.name=a b"], 'model.name = "a b" must be a network\'s name'),
        (["model.name=3"], "model.name = 3 must be text"),
        (["model.settings=3"], "model.settings = 3 must be a table of names"),
        (["model.settings={a = {b = 1}}"], "must be a table of names"),
        (["model.settings={a = nan}"], "must be a table of names"),
        (["model.settings={'a b' = 1}"], "must be a table of names"),
        (["model.settings={width = 8}"], r"model.settings holds width, which has a key of its own; write model.width"),
        (["model.freeze=3"], "model.freeze = 3 must be a list"),
        (["optim.layer_decay=0"], "optim.layer_decay = 0 must be above 0"),
        (["optim.layer_decay=1.5"], "optim.layer_decay = 1.5 must be at most 1"),
    ],
)
def test_a_recipes_mistakes_are_named(overrides: list[str], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        load_recipe("quickstart", overrides)


def test_settings_are_given_one_by_one_or_as_a_table() -> None:
    given = ["model.name=mine:Net", "model.settings.depth=3", "model.settings.kinds=['a', 'b']"]
    _, config = load_recipe("quickstart", given)
    assert config.model.settings == {"depth": 3, "kinds": ["a", "b"]}
    assert config == load_recipe("quickstart", [given[0], "model.settings={depth = 3, kinds = ['a', 'b']}"])[1]
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_it_is_recorded_and_its_own_kernels_are_those_of_pytorch(compute: str, images: Path) -> None:
    config = own_config(images, f"precision.compute={compute}", "comm.tune_s=5")
    with join_world(None) as world:
        parts = build(config, world)
        chosen = choose_plan(config, parts, world)
        assert {trial.execution.kernels for trial in chosen.profile.trials} == {"torch"}
        assert [trial.failure for trial in chosen.profile.trials if trial.execution.recorded] == [""]
        batch, results = fake_batch(config, world), []
        for recorded in (False, True):
            parts = build(config, world)
            parts.model.eval()
            size = len(batch.labels)
            execution = Execution("own" if recorded else "torch", recorded)  # as when it is asked for
            step: Any = apply_plan(execution, parts.reducer.plan, parts, size, size)
            for _ in range(8):
                loss = float(step(batch, 0.002, False)[LOSS])
            results.append((parts.weights.clone(), loss))
    # cuDNN adds up in any order, and a weight here and there takes another way.
    is_close = torch.isclose(results[0][0], results[1][0], rtol=1e-2, atol=1e-3)
    assert is_close.float().mean() > 0.999
    assert results[0][1] == pytest.approx(results[1][1], rel=0.05)


@pytest.mark.gpu
def test_on_a_gpu_a_network_that_waits_for_it_is_launched_and_loses_no_memory(images: Path) -> None:
    config = tiny_config(images, "model={name = 'tests.engine.own_networks:Waiting'}", *SGD)
    with join_world(None) as world:
        parts = build(config, world)
        chosen = choose_plan(config, parts, world)
        (failure,) = (trial.failure for trial in chosen.profile.trials if trial.execution.recorded)
        assert failure == "called a synchronizing CUDA operation"
        assert not chosen.plan.execution.recorded
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        before, other = torch.cuda.memory_reserved(), torch.cuda.Stream()
        for _ in range(20):  # arrays that another stream has used, as batches are
            torch.empty(1 << 26, dtype=torch.uint8, device=world.device).record_stream(other)
            torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() - before < 5 << 26
