"""Runs that follow each other in one process: each gives the weights of the same run alone, to the last bit."""

from pathlib import Path

import pytest
import torch

from lockstep.comm import world as world_module
from lockstep.comm.world import join_world
from lockstep.config import ModelConfig, RunConfig
from lockstep.engine import reuse
from lockstep.engine.build import build_parts, open_sources
from lockstep.engine.reuse import FREE, Kept
from lockstep.engine.run import run_rank
from lockstep.engine.state import list_changing
from lockstep.engine.statistics import list_passing
from lockstep.plan.plan import Execution
from lockstep.report.run import RunSink, SilentSink
from tests.engine import commands
from tests.engine.conftest import tiny_config
from tests.engine.small import small_config
from tests.engine.test_recorded import RATES, build, draw_batches

SHORT = (
    *("train.duration=4st", "optim.warmup=2st", "train.checkpoint_every=0st", "train.eval_every=0st"),
    *("data.image_size=32", "data.eval_resize=32", "model.width=4", "train.global_batch=12"),
)
# What each run changes, and whether it can go on with the parts of the one before.
TRIALS = (
    ((), False),
    (("train.seed=1", "optim.lr=0.3"), True),
    (("optim.weight_decay=0.01", "optim.schedule=constant", "optim.warmup=0st", "data.flip=false"), True),
    (("train.global_batch=20", "optim.lr=0.5"), False),
    (("optim.name=sgd", "optim.nesterov=true", "optim.lr=0.05", "optim.decay_norm_and_bias=true"), False),
)


def run(config: RunConfig, folder: Path, kept: Kept | None) -> dict[str, torch.Tensor]:
    def open_sink(world: object, folder: Path) -> RunSink:
        return RunSink(folder, SilentSink(), draws=False)

    outcome = run_rank(config, "tiny", folder, resume=False, membership=None, open_sink=open_sink, kept=kept)
    assert outcome == "finished"
    assert not (folder / "report.html").exists()
    return commands.last_weights(folder)


def test_a_run_among_others_gives_the_weights_of_the_run_alone(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "count_cores", lambda: 1)  # for steps so small, threads only wait for each other
    kept, seen, renewed = Kept(), [], []
    renew = reuse.renew
    monkeypatch.setattr(reuse, "renew", lambda parts, *rest: renewed.append(parts) or renew(parts, *rest))
    for number, (settings, is_renewed) in enumerate(TRIALS):
        config = tiny_config(images, *SHORT, *settings)
        renewed.clear()
        found = run(config, tmp_path / f"kept-{number}", kept)
        assert len(renewed) == is_renewed
        alone = run(config, tmp_path / f"alone-{number}", None)
        assert found.keys() == alone.keys()
        assert all(torch.equal(found[name], alone[name]) for name in alone)
        assert all(
            any(not torch.equal(found[name], one[name]) for name in one) for one in seen if one.keys() == found.keys()
        )
        seen.append(found)


def test_the_data_are_opened_once(images: Path) -> None:
    kept, opened = Kept(), []
    config = tiny_config(images)

    def open_now() -> object:
        opened.append(open_sources(config.data))
        return opened[-1]

    for settings in ((), ("data.crop_area=[0.5, 1.0]",), ("train.seed=4",)):
        found = kept.open_sources(tiny_config(images, *settings).data, open_now)  # type: ignore[arg-type]
        assert found is opened[0]
    assert kept.open_sources(tiny_config(images, "data.val_share=0.1").data, open_now) is opened[1]  # type: ignore[arg-type]


def test_whatever_a_run_has_left_behind_is_gone(images: Path) -> None:
    """Every array that the list of `state.py` names, and numbers that are not finite among them."""
    config, other = (tiny_config(images, "precision.compute=fp16", f"train.seed={seed}") for seed in (0, 1))
    sources, kept = open_sources(config.data), Kept()
    with join_world(None) as world, torch.no_grad():
        _, parts, _ = kept.build_parts(config, world, sources)
        for array in [*list_changing(parts).arrays(), *list_passing(parts.model), parts.half_weights, parts.note]:
            array.fill_(torch.nan if array.is_floating_point() else 77)
        parts.rule.measures = parts.reducer.measures = True
        _, again, _ = kept.build_parts(other, world, sources)
        fresh = build_parts(other, world, sources)
        assert again.weights is parts.weights
        for found, expected in zip(list_changing(again).arrays(), list_changing(fresh).arrays(), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(again.half_weights, fresh.half_weights)
        assert not again.note.any()
        assert not again.rule.measures
        assert not again.reducer.measures
        state, expected_state = again.model.state_dict(), fresh.model.state_dict()
        assert all(torch.equal(state[name], expected_state[name]) for name in expected_state)


def test_what_is_free_to_differ_are_settings_that_there_are(images: Path) -> None:
    tables = tiny_config(images).model_dump()
    for section, keys in FREE.items():
        assert keys <= tables[section].keys()


def test_a_network_of_the_users_is_built_anew(images: Path) -> None:
    """Its code may keep more than its arrays, and nobody here knows what."""
    config = tiny_config(images).model_copy(update={"model": ModelConfig(name="tests.own:build_net")})
    sources, kept = open_sources(config.data), Kept()
    with join_world(None) as world:
        _, first, _ = kept.build_parts(config, world, sources)
        assert kept.build_parts(config, world, sources)[1].weights is not first.weights


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_a_recording_serves_the_next_run(compute: str) -> None:
    """The second run replays the first one's recording with its own weights, decay and learning rates."""
    from lockstep.engine.apply import apply_plan

    execution = Execution("own", recorded=True)
    first, second = small_config(compute), small_config(compute, optim={"weight_decay": 0.05}, seed=5)
    weights = []
    with join_world(None) as world:
        batches = draw_batches(first, world, len(RATES))
        sources = open_sources(first.data)
        for configs in ((second,), (first, second)):
            kept = Kept()
            for config in configs:
                _, parts, _ = kept.build_parts(config, world, sources)
                if config is configs[0]:
                    step = apply_plan(execution, parts.reducer.plan, parts, 16, 16)
                for lr, batch in zip(RATES, batches, strict=True):
                    step(batch, lr, False)
            weights.append(parts.weights.clone())
        plain = build(first, world).weights
    alone, following = weights
    assert (alone - following).norm() / alone.norm() < {"fp16": 2e-3, "fp32": 1e-4}[compute]
    assert (alone - plain).norm() / alone.norm() > 0.1
