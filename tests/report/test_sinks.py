"""The viewers of others: by their own readers where they are installed, and what happens when they fail."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.events import Event, LayersMeasured, Notice, read_events
from lockstep.report import sinks
from lockstep.report.run import RunSink, SilentSink
from lockstep.report.sinks import Behind, is_installed, measure, open_viewers, parse_viewers, read_name, write_name
from tests.report.records import ended, evaluated, started, stepped

CONFIG = {"train": {"seed": 3, "eval_every": "1ep"}, "optim": {"lr": 0.1}}


def first_part() -> list[Event]:
    return [started(config=CONFIG), stepped(10, 1005.0), evaluated(10, 1007.0, 0.6), stepped(20, 1012.0)]


def second_part() -> list[Event]:
    """Goes on from step 10: what came after it is done again."""
    resumed = started(time_s=2000.0, config=CONFIG, start_step=10)
    return [resumed, stepped(20, 2006.0), stepped(30, 2010.0), evaluated(30, 2012.0, 0.8), ended(30, 2013.0, 13.0)]


def show(name: str, folder: Path, events: list[Event]) -> list[Notice]:
    """Let a viewer have some records; what it complained of."""
    (viewer,) = open_viewers([name], folder)
    notices = [notice for event in events if (notice := viewer.emit(event))]
    viewer.close()
    return notices + [notice for notice in [viewer.emit(events[-1])] if notice]


class Ear(SilentSink):
    def __init__(self) -> None:
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)


def test_an_unknown_viewer_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match=r"--log tensorbord is no viewer; give one or more of tensorboard, wandb"):
        parse_viewers("mlperf, tensorbord")
    assert parse_viewers("") == []
    assert parse_viewers(" mlperf,mlperf ,") == ["mlperf"]


def test_a_package_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks.VIEWERS, "wandb", (sinks.Wandb, "no_such_package"))
    with pytest.raises(LockstepError, match=r"--log wandb needs the package no_such_package; install it with: pip"):
        parse_viewers("wandb")


def test_a_folder_that_a_viewer_left_behind_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("left_behind")
    assert is_installed("json")


def test_every_number_has_a_name_and_none_is_not_finite() -> None:
    step, numbers = measure(stepped(7, 1000.0))
    assert step == 7
    assert numbers["train/loss"] == 1.25
    assert "train/loss_scale" not in numbers
    layers = LayersMeasured(step=3, weight_norms=[3.0, 4.0], gradient_norms=[6.0, 8.0], trust_ratios=[])
    assert measure(layers) == (3, {"layers/weight_norm": 5.0, "layers/gradient_norm": 10.0})
    assert measure(Notice(level="info", text="hello")) == (0, {})


def test_a_viewer_that_fails_costs_one_notice(tmp_path: Path) -> None:
    def fail() -> Any:
        raise RuntimeError("the server is gone\nwith details")

    ear = Ear()
    viewer = Behind("wandb", fail)
    viewer._thread.join(60)
    sink = RunSink(tmp_path, ear, [viewer])
    for event in first_part():
        sink.emit(event)
    sink.close()
    notices = [event.text for event in ear.heard if isinstance(event, Notice)]
    assert notices == ["The run is no longer shown in wandb (the server is gone); training goes on."]
    assert [event for event in ear.heard if not isinstance(event, Notice)] == first_part()
    assert len(read_events(tmp_path)) == 5


def test_a_viewer_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MOST_WAITING", 3)
    is_over = threading.Event()

    class Hanging(SilentSink):
        def emit(self, event: Event) -> None:
            is_over.wait(10)

    viewer = Behind("mlflow", Hanging)
    start = time.monotonic()
    notices = [notice for _ in range(20) if (notice := viewer.emit(stepped(1, 1.0)))]
    viewer.close(wait_s=0.1)
    assert time.monotonic() - start < 3
    assert [notice.text for notice in notices] == [
        "The run is no longer shown in mlflow (it is 3 records behind); training goes on."
    ]
    is_over.set()


def test_names_are_kept_one_beside_the_other(tmp_path: Path) -> None:
    assert read_name(tmp_path, "wandb") == ""
    write_name(tmp_path, "wandb", "abc")
    write_name(tmp_path, "mlflow", "123")
    assert (read_name(tmp_path, "wandb"), read_name(tmp_path, "mlflow")) == ("abc", "123")
    (tmp_path / "viewers.json").write_text("[")
    assert read_name(tmp_path, "wandb") == ""


def test_tensorboards_own_reader_sees_one_run_without_what_was_lost(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert show("tensorboard", tmp_path, [*first_part(), stepped(25, 1014.0)]) == []
    time.sleep(1.1)  # the files' names have seconds, and are read in their order
    assert show("tensorboard", tmp_path, second_part()) == []
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [(scalar.step, scalar.wall_time) for scalar in reader.Scalars("train/loss")] == [
        (10, 1005.0),
        (20, 2006.0),
        (30, 2010.0),
    ]
    assert [scalar.value for scalar in reader.Scalars("val/top1")] == pytest.approx([0.6, 0.8])
    assert reader.Scalars("end/T")[0].value == 64.0


@pytest.mark.filterwarnings("ignore")
def test_wandb_goes_on_under_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert show("wandb", tmp_path, first_part()) == []
    name = read_name(tmp_path, "wandb")
    assert name
    time.sleep(1.1)
    assert show("wandb", tmp_path, second_part()) == []
    assert read_name(tmp_path, "wandb") == name
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size > 1000 for file in files)


@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "tiny-1"
    folder.mkdir()
    assert show("mlflow", folder, first_part()) == []
    assert show("mlflow", folder, second_part()) == []
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lockstep")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == read_name(folder, "mlflow")
    assert run.info.status == "FINISHED"
    assert run.data.params["train.seed"] == "3"
    assert {(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "val/top1")} == {
        (10, 0.6),
        (30, 0.8),
    }
