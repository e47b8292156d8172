"""What a run says of itself: when, how much, and that no weight depends on it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.reducer import Landing
from lockstep.comm.world import World
from lockstep.data.order import Cursor
from lockstep.engine.build import build_parts, build_train_pipeline, open_sources, plan_input
from lockstep.engine.instruments import Cadence, Instruments
from lockstep.engine.noise import NoiseScale
from lockstep.engine.step import run_passes, set_knobs
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.events import (
    Event,
    LayersMeasured,
    MistakesFound,
    RunEnded,
    RunStarted,
    StartedUp,
    StepDone,
    TimelineTaken,
    decode,
    encode,
)
from lockstep.report.run import SilentSink
from tests.engine.conftest import tiny_config
from tests.ranks import run_ranks, world_of_one

LENGTH = 20


class Ear(SilentSink):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)


def train(world: World, images: Path, folder: Path, settings: list[str], is_measured: bool = True) -> Any:
    """A run of 20 steps: its records as lines, and its weights."""
    config = tiny_config(images, f"train.duration={LENGTH}st", "train.log_every=4", "optim.warmup=0st", *settings)
    sources = open_sources(config.data)
    parts = build_parts(config, world, sources)
    ear = Ear()
    trainer = Trainer(config, "tiny", world, sources, parts, folder, ear, StopRequest())
    with pytest.MonkeyPatch.context() as patch:
        if not is_measured:
            patch.setattr(Instruments, "begin_step", lambda self, step, list_made: None)
            patch.setattr(Instruments, "report", lambda self, step, batch: None)
        trainer.run()
    if parts.hybrid:
        parts.hybrid.close()
    return [encode(event) for event in ear.heard], parts.weights


def train_seen_and_unseen(world: World, images: Path, folder: Path, settings: list[str]) -> list[Any]:
    return [train(world, images, folder / str(is_seen), settings, is_seen) for is_seen in (True, False)]


def pick(lines: list[str], kind: type[Event]) -> list[Any]:
    return [event for line in lines if isinstance(event := decode(line), kind)]


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, []),
        (1, ["precision.compute=fp16", "train.accumulate=2"]),
        (1, ["optim.name=adamw", "optim.lr=0.001", "optim.clip_norm=0.5"]),
        (2, []),
        (2, ["comm.buffer_mb=0.1", "comm.algorithm=flat"]),
    ],
)
def test_no_weight_depends_on_what_is_measured(images: Path, tmp_path: Path, size: int, settings: list[str]) -> None:
    answers = run_ranks(train_seen_and_unseen, size, images, tmp_path, settings)
    for (_, weights), (_, expected) in answers:
        assert torch.equal(weights, expected)
    (seen, _), (unseen, _) = answers[0]
    assert pick(seen, LayersMeasured)
    assert not pick(unseen, LayersMeasured)


def test_a_run_says_what_a_report_draws(images: Path, tmp_path: Path) -> None:
    lines, _ = train(world_of_one(), images, tmp_path, [])
    (started,) = pick(lines, RunStarted)
    (ended,) = pick(lines, RunEnded)
    layers = pick(lines, LayersMeasured)
    steps = pick(lines, StepDone)
    (mistakes,) = pick(lines, MistakesFound)
    (up,) = pick(lines, StartedUp)
    assert list(up.seconds) == ["plan", "input", "first step"]  # as nobody has told the trainer what came before
    assert all(seconds >= 0 for seconds in up.seconds.values())
    assert started.layers[:2] == ["fc.bias", "fc.weight"]
    assert len(started.class_names) == started.num_classes == 10
    assert layers[0].step == 1
    assert layers[-1].step == LENGTH
    for record in layers:
        sizes = {len(record.weight_norms), len(record.gradient_norms), len(record.trust_ratios)}
        assert sizes == {len(started.layers)}
    # At first the last γ of every block is zero, and nothing behind it gets a gradient.
    assert not all(layers[0].gradient_norms)
    assert all(norm > 0 for record in layers[1:] for norm in record.gradient_norms)
    assert {step.loss_scale for step in steps} == {None}
    assert {step.noise_scale for step in steps} == {None}
    assert mistakes.step == LENGTH
    beside = ended.startup_s + ended.evaluate_s + ended.checkpoint_s
    assert beside > 0
    assert beside + ended.train_s <= ended.wall_s
    assert ended.evaluate_s > 0
    assert ended.checkpoint_s > 0


def test_the_loss_scale_and_what_it_skips_are_told(images: Path, tmp_path: Path) -> None:
    settings = ["precision.compute=fp16", "precision.initial_scale=16777216"]
    lines, _ = train(world_of_one(), images, tmp_path, settings)
    steps = pick(lines, StepDone)
    assert sum(step.skipped for step in steps) > 0
    assert steps[-1].loss_scale == 2.0**24 / 2 ** sum(step.skipped for step in steps)


def test_every_rank_shows_its_steps_and_the_spans_add_up(images: Path, tmp_path: Path) -> None:
    (lines, _), _ = run_ranks(train, 2, images, tmp_path, ["comm.buffer_mb=0.1", "comm.algorithm=doubling"])
    timelines = pick(lines, TimelineTaken)
    assert Counter(timeline.rank for timeline in timelines) == {0: 2, 1: 2}
    for timeline in timelines:
        assert timeline.num_steps == 3
        lane = [span for span in timeline.spans if span["lane"] == "step"]
        total = sum(span["end_s"] - span["start_s"] for span in lane)
        assert total == pytest.approx(timeline.seconds, rel=0.02)
        names = {span["name"] for span in lane}
        assert {"forward", "backward", "communicate", "update"} <= names <= {*names, "input", "other"}
        assert {span["step"] for span in lane} == set(range(timeline.first_step, timeline.first_step + 3))
        sums = [span for span in timeline.spans if span["lane"] == "all-reduce"]
        buffers = {span["name"] for span in sums}
        assert len(sums) == 3 * len(buffers)
        assert len(buffers) > 1
        assert all(span["start_s"] <= span["end_s"] <= timeline.seconds for span in sums)
        batches = [span for span in timeline.spans if span["lane"] == "input"]
        assert batches  # the threads are steps ahead, and make some all the time
        for span in batches:
            assert span["name"] == f"batch of step {span['step']}"
            assert 0 <= span["start_s"] < span["end_s"] <= timeline.seconds
            assert timeline.first_step <= span["step"]
            taken = [one["start_s"] for one in lane if one["step"] == span["step"] and one["name"] == "forward"]
            assert all(span["end_s"] <= start_s + 1e-6 for start_s in taken)  # made before it is used


def test_several_ranks_estimate_the_noise(images: Path, tmp_path: Path) -> None:
    (lines, _), _ = run_ranks(train, 2, images, tmp_path, ["optim.name=sgd", "optim.lr=0.001", "optim.clip_norm=0.5"])
    found = [step.noise_scale for step in pick(lines, StepDone) if step.noise_scale is not None]
    assert all(noise > 0 for noise in found)
    assert not pick(lines, LayersMeasured)[0].trust_ratios


def own_squares(world: World, images: Path, settings: list[str]) -> tuple[float, float]:
    """This rank's squared gradient as the sums noted it, and by a pass that sends nothing."""
    config = tiny_config(images, *settings)
    sources = open_sources(config.data)
    parts = build_parts(config, world, sources)
    assert parts.hybrid is not None
    with build_train_pipeline(config, world, sources.train, Cursor(), plan_input(config, world)) as pipeline:
        batch = next(pipeline)
    set_knobs(parts, 0.0, False)
    with parts.reducer.muted():
        run_passes(parts, batch.images, batch.labels, batch.global_size)
        parts.reducer.finish()
        expected = sum(array.double().square().sum().item() for array in parts.reducer.flat)
    parts.hybrid.squares = []
    run_passes(parts, batch.images, batch.labels, batch.global_size)
    parts.reducer.finish()
    found = sum(square.item() for square in parts.hybrid.squares)
    parts.hybrid.close()
    return found, expected


@pytest.mark.parametrize("settings", [["comm.algorithm=flat"], ["comm.algorithm=doubling", "comm.buffer_mb=0.1"]])
def test_squares_are_those_of_the_rank_alone(images: Path, settings: list[str]) -> None:
    for found, expected in run_ranks(own_squares, 2, images, settings):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("landing", "settings"),
    [("stays", []), ("at once", []), ("by buffer", []), ("at once", ["precision.compute=fp16"])],
)
def test_the_first_pass_of_one_rank_is_kept(images: Path, landing: Landing, settings: list[str]) -> None:
    config = tiny_config(images, "train.max_batch_per_rank=10", "train.own_kernels=off", *settings)
    world = world_of_one()
    sources = open_sources(config.data)
    parts = build_parts(config, world, sources)
    parts.reducer.landing = landing
    with build_train_pipeline(config, world, sources.train, Cursor(), plan_input(config, world)) as pipeline:
        batch = next(pipeline)
    count = 28 // 3  # of 9, 9 and 10 samples
    parameters = list(parts.model.parameters())
    loss = parts.loss(parts.model(batch.images[:count].to(parts.dtype)), batch.labels[:count]) / batch.global_size
    scale = parts.loss_scale.factor if parts.loss_scale else torch.ones(())
    alone = torch.autograd.grad(loss * scale, parameters)
    for is_wanted in (False, True):
        parts.reducer.measures = is_wanted
        run_passes(parts, batch.images, batch.labels, batch.global_size)
        parts.reducer.finish()
        expected = sum(gradient.double().square().sum().item() for gradient in alone) if is_wanted else 0.0
        assert parts.reducer.first_square.item() == pytest.approx(expected, rel=1e-4)


def test_one_rank_in_several_passes_estimates_the_noise(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, float]] = []
    monkeypatch.setattr(NoiseScale, "add", lambda self, **squares: heard.append(squares))
    lines, _ = train(
        world_of_one(), images, tmp_path, ["train.accumulate=2", "train.duration=5st", "train.log_every=1"]
    )
    assert len(heard) == len(pick(lines, LayersMeasured)) > 2
    # A step of 28 samples against its first pass of 14, and the last of an epoch, 18, against 9.
    assert {(round(1 / squares["small_inverse"]), squares["big"]) for squares in heard} == {(14, 28), (9, 18)}
    assert all(squares["small_square"] > squares["big_square"] > 0 for squares in heard)


@given(st.integers(0, 5000), st.integers(1, 100_000), st.integers(1, 500))
def test_a_run_of_any_length_is_measured_about_a_hundred_times(start: int, length: int, every: int) -> None:
    total = start + length
    cadence = Cadence(start, total, every)
    records = {start + 1, total, *range(start // every * every + every, total + 1, every)}
    measured = [step for step in records if cadence.is_measured(step)]
    assert 1 <= len(measured) <= 110
    assert {start + 1, total} <= set(measured)
    # Measuring takes half of a GPU's small step: of a run that is not short, no more than a hundredth.
    cadence_on_gpu = Cadence(start, total, every, on_gpu=True)
    assert sum(map(cadence_on_gpu.is_measured, records)) <= 5 + length / 50
    ends = [step for step in records if cadence.ends_timeline(step)]
    assert 1 <= len(ends) <= 2
    assert sum(cadence.begins_timeline(step) for step in range(start + 1, total + 1)) == len(ends)
