"""Tuning before step 0: every rank follows the same plan, weights and statistics stay, and the run remembers."""

from pathlib import Path

import torch

from lockstep.comm.tuner import Trial, read_tuning
from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine.build import build_parts, open_sources
from lockstep.engine.tune import PLAIN, describe_tuning, pick_trial, tune_parts
from lockstep.events import Notice
from tests.engine import commands
from tests.engine.conftest import tiny_config, tiny_settings
from tests.ranks import run_ranks


def tune_twice(world: World, config: RunConfig, place: Path) -> tuple[object, ...]:
    parts = build_parts(config, world, open_sources(config.data))
    before = [parts.weights.clone(), *(buffer.clone() for buffer in parts.model.buffers())]
    first = tune_parts(config, parts, world, [place])
    assert first is not None
    unchanged = all(torch.equal(a, b) for a, b in zip(before, [parts.weights, *parts.model.buffers()], strict=True))
    second = tune_parts(config, parts, world, [place])
    return first, second, parts.reducer.plan, unchanged, describe_tuning(first)


def test_all_ranks_follow_one_plan_that_is_measured_once(images: Path, tmp_path: Path) -> None:
    results = run_ranks(tune_twice, 3, tiny_config(images, "comm.tune_s=3"), tmp_path / "tuning")
    first, second, plan, unchanged, text = results[0]
    assert unchanged
    assert all(result == results[0] for result in results)
    assert second == first, "the second time it is read, not measured"
    assert plan == first.plan  # type: ignore[attr-defined]
    assert first.seconds < 10  # type: ignore[attr-defined]
    assert "measured in" in text  # type: ignore[operator]
    (file,) = (tmp_path / "tuning").iterdir()
    assert read_tuning(file) == first


def test_what_the_recipe_pins_is_followed(images: Path, tmp_path: Path) -> None:
    pins = ["comm.algorithm=doubling", "comm.overlap=on", "comm.fusion=two-segments", "comm.tune_s=2"]
    _, _, plan, _, _ = run_ranks(tune_twice, 2, tiny_config(images, *pins), tmp_path / "tuning")[0]
    assert {choice.algorithm for choice in plan.choices} == {"doubling"}  # type: ignore[attr-defined]
    assert plan.overlap  # type: ignore[attr-defined]
    assert len(plan.buffers) == 2  # type: ignore[attr-defined]


def test_a_run_tunes_says_so_and_goes_on_with_the_same_plan(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [
        f"--set={setting}"
        for setting in [*tiny_settings(images), "comm.tune_s=2", "train.duration=1ep", "optim.warmup=0st"]
    ]
    cache = {"LOCKSTEP_CACHE": str(tmp_path / "cache")}
    status, _, err = commands.run("train", "quickstart", "--ranks=3", f"--out={run}", *settings, **cache)
    assert status == 0, err
    texts = [event.text for event in commands.events(run) if isinstance(event, Notice)]
    assert any(text.startswith("Gradients travel in") for text in texts)
    kept = read_tuning(run / "tuning.toml")
    assert kept is not None
    # Sums of three depend on their order, so going on elsewhere, without the cache, must not choose anew.
    status, _, err = commands.run(
        "train", str(run), "--resume", "--ranks=3", "--set=train.duration=2ep", LOCKSTEP_CACHE=str(tmp_path / "other")
    )
    assert status == 0, err
    assert read_tuning(run / "tuning.toml") == kept


def test_tune_measures_and_explains(images: Path, tmp_path: Path) -> None:
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), "comm.tune_s=2"]]
    cache = {"LOCKSTEP_CACHE": str(tmp_path / "cache")}
    assert "Nothing has been tuned" in commands.run("tune", "--show", **cache)[2]
    status, out, err = commands.run("tune", "quickstart", "--ranks=2", *settings, **cache)
    assert status == 0, err
    assert "1x2 over gloo" in out
    status, shown, err = commands.run("tune", "--show", **cache)
    assert status == 0, err
    assert "flat" in shown
    assert "a backward pass with gradients" in shown


def test_pytorchs_own_stays_unless_something_is_clearly_quicker() -> None:
    plain, close, clear = Trial(PLAIN, 1.0), Trial("merged", 0.97), Trial("one buffer", 0.9)
    assert pick_trial([plain, close]) == plain
    assert pick_trial([plain, close, clear]) == clear
    assert pick_trial([close, clear]) == clear
