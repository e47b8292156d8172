"""Real runs say what they expect of themselves, and what became of it."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.comm.world import World
from lockstep.config import ImageSize, RunConfig
from lockstep.data.sources import ImageFolder
from lockstep.engine.build import build_parts, open_sources
from lockstep.engine.opening import predict_run
from lockstep.engine.planning import choose_plan
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.events import Event, PlanChosen, RunEnded, RunPredicted
from lockstep.plan.folder import read_profile
from lockstep.plan.hindsight import look_back
from lockstep.report.run import SilentSink
from lockstep.report.summary import summarize
from tests.engine import commands
from tests.engine.conftest import tiny_config, tiny_settings
from tests.ranks import run_ranks

STEPS = 20


def test_a_run_on_two_ranks_writes_what_it_expected_beside_what_came(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [
        f"--set={setting}"
        for setting in [*tiny_settings(images), "comm.tune_s=0.5", f"train.duration={STEPS}st", "optim.warmup=0st"]
    ]
    cache = {"LOCKSTEP_CACHE": str(tmp_path / "cache")}
    status, out, err = commands.run("train", "quickstart", "--ranks=2", f"--out={run}", *settings, **cache)
    assert status == 0, err
    events = commands.events(run)
    place = next(number for number, event in enumerate(events) if isinstance(event, PlanChosen))
    predicted, ended = events[place + 1], events[-1]
    assert isinstance(predicted, RunPredicted)
    assert isinstance(ended, RunEnded)
    assert (predicted.steps, predicted.world_size, predicted.images) == (STEPS, 2, 130 / 5)
    assert predicted.forward_s and predicted.backward_s and predicted.update_s  # noqa: PT018
    together = predicted.input_s + predicted.compute_s + predicted.slowest_s + predicted.communicate_s
    assert predicted.step_s == pytest.approx(together)
    told: Any = commands.summary(run)["prediction"]
    rows = {row["what"]: row for row in told["rows"]}
    assert told["compared"]
    assert rows["a step"]["predicted"] == predicted.step_s
    assert rows["a step"]["measured"] == pytest.approx(ended.train_s / (STEPS - 1))
    assert rows["throughput T"]["measured"] == ended.images_per_second
    assert rows["all messages, hidden or not"]["measured"] > 0
    parts = ("waiting for input", "forward", "backward", "update")
    parts += ("waiting for the slowest rank", "exposed communication")
    for side in ("predicted", "measured"):  # what a step is made of adds up to it
        assert sum(rows[name][side] for name in parts) == pytest.approx(rows["a step"][side])
    assert out.count(told["sentence"]) == 1
    assert "Predicted: " in out
    assert "Predicted against measured" in (run / "report.html").read_text()

    status, out, err = commands.run("train", str(run), "--resume", "--ranks=2", "--set=train.duration=24st", **cache)
    assert status == 0, err
    first, second = (event for event in commands.events(run) if isinstance(event, RunPredicted))
    assert first == predicted
    assert (second.steps, second.sources["computing"]) == (4, "measured once, remembered")
    profile = read_profile(run)  # the first part knows by now what its input makes; the plans of others do not
    assert profile is not None
    assert profile.input is not None
    assert second.input_rate is not None
    for folder in (tmp_path / "cache" / "plans").iterdir():
        kept = read_profile(folder)
        assert kept is not None
        assert kept.input is None
    told = commands.summary(run)["prediction"]
    assert not told["compared"]
    assert told["sentence"] == "Only 4 steps were taken, too few to be compared with the prediction."
    assert told["sentence"] not in out


class Ear(SilentSink):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)


def train(world: World, config: RunConfig, folder: Path, sleep_s: float) -> list[Event]:
    """One rank's records; each image takes `sleep_s` longer to read."""
    read = ImageFolder.read

    def read_slowly(source: ImageFolder, index: int) -> bytes:
        time.sleep(sleep_s)
        return read(source, index)

    ear = Ear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageFolder, "read", read_slowly)
        patch.setenv("LOCKSTEP_CACHE", str(folder / "cache"))
        sources = open_sources(config.data)
        parts = build_parts(config, world, sources)
        Trainer(config, "tiny", world, sources, parts, folder, ear, StopRequest()).run()
        assert parts.hybrid is not None
        parts.hybrid.close()
    return ear.heard


def test_a_run_whose_input_is_slow_names_the_input(images: Path, tmp_path: Path) -> None:
    settings = ["comm.tune_s=5", "train.duration=12st", "optim.warmup=0st", "data.decode_threads=1"]
    settings += ["train.eval_every=0st", "train.checkpoint_every=0st"]
    heard, _ = run_ranks(train, 2, tiny_config(images, *settings), tmp_path, 0.05)
    found = look_back(heard)
    assert found is not None
    assert "input was assumed never to be waited for, and steps waited " in found.sentence
    assert summarize(heard)["prediction"]["sentence"] == found.sentence


def predict(world: World, config: RunConfig) -> list[RunPredicted | None]:
    """For one size of images, for a size that grows, and for the part of such a run that no longer does."""
    parts = build_parts(config, world, open_sources(config.data))
    before = parts.weights.clone()
    chosen = choose_plan(config, parts, world)
    sizes = (ImageSize.model_validate({"until": "2ep", "size": 16}),)
    growing = config.model_copy(update={"data": config.data.model_copy(update={"image_sizes": sizes})})
    cases = ((config, 0), (growing, 9), (growing, 10))
    found = [predict_run(each, chosen, parts, world, 130, step) for each, step in cases]
    assert torch.equal(parts.weights, before)
    assert parts.hybrid is not None
    parts.hybrid.close()
    return found


def test_growing_images_are_not_predicted_and_several_passes_are(images: Path) -> None:
    config = tiny_config(images, "comm.tune_s=0.5", "train.accumulate=3", "train.duration=4ep")
    (plain, growing, grown), _ = run_ranks(predict, 2, config)
    assert growing is None
    assert plain is not None
    assert grown is not None
    assert (plain.steps, grown.steps) == (20, 10)
    assert grown.step_s == plain.step_s
    assert plain.forward_s + plain.backward_s + plain.update_s == pytest.approx(plain.compute_s)
