"""The viewers of others as listeners of a run: TensorBoard, Weights & Biases, MLflow; MLPerf's lines at the end.

Each is an optional package that is imported only when asked for (`lockstep train … --log tensorboard,wandb`). A viewer
works in a thread of its own, behind a queue: whatever it raises, and however long its server takes, costs one notice
and never the run. Names under which a run is known elsewhere lie in its folder, so that one that goes on goes on there
too. Torch-free.
"""

import importlib.util
import json
import math
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import LockstepError
from lockstep.events import Evaluated, Event, LayersMeasured, Notice, RunEnded, RunStarted, StepDone, read_events
from lockstep.files import write_whole
from lockstep.report.mlperf import check_submission, write_mlperf

NAMES_FILE = "viewers.json"  # under which name a viewer knows the run
PROJECT = "lockstep"
MOST_WAITING = 10_000  # records that a viewer may be behind
CLOSE_S = 60.0  # that a run waits at its end for viewers to take the last of it


class Viewer(Protocol):
    """One viewer, from the beginning of a run to its end; whatever it raises is somebody else's matter."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


def measure(event: Event) -> tuple[int, dict[str, float]]:
    """The numbers of a record by the names that all viewers show them under, and their step."""
    numbers: dict[str, float | None] = {}
    step = 0
    match event:
        case StepDone():
            step = event.step
            numbers = {
                "train/loss": event.loss,
                "train/top1": event.top1,
                "train/lr": event.lr,
                "train/epoch": event.epoch,
                "train/loss_scale": event.loss_scale,
                "train/noise_scale": event.noise_scale,
                "speed/images_per_second": event.images_per_second,
                "speed/step_s": event.step_s,
                "speed/compute_s": event.compute_s,
                "speed/communicate_s": event.comm_s,
                "speed/input_s": event.input_s,
            }
        case Evaluated():
            step = event.step
            numbers = {
                "val/top1": event.top1,
                "val/top5": event.top5,
                "val/loss": event.loss,
                "val/average_top1": event.average_top1,
                "val/average_top5": event.average_top5,
                "val/average_loss": event.average_loss,
            }
        case LayersMeasured():
            step = event.step
            numbers = {
                "layers/weight_norm": math.hypot(*event.weight_norms),
                "layers/gradient_norm": math.hypot(*event.gradient_norms),
            }
        case RunEnded():
            step = event.step
            numbers = {
                "end/T": event.images_per_second,
                "end/S": event.speed_one_rank,
                "end/N": float(event.world_size),
                "end/e": event.efficiency,
                "end/energy_j": event.energy_j,
            }
    return step, {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Every setting by its whole name."""
    return {
        f"{table}.{key}": str(value)
        for table, settings in config.items()
        if isinstance(settings, Mapping)
        for key, value in settings.items()
    }


class TensorBoard:
    """Event files in the run's folder; those of a part that goes on take the place of what was lost."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder / "tensorboard"))

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            # Tells the viewer to forget the steps behind the checkpoint that this part goes on from.
            begun = self._events.SessionLog(status=self._events.SessionLog.START)
            self._write(event, event.start_step + 1, session_log=begun)
            return
        step, numbers = measure(event)
        if numbers:
            values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            self._write(event, step, summary=self._summaries.Summary(value=values))

    def _write(self, event: Event, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=event.time_s, step=step, **content))

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; without a key for its server it is kept in the folder, for `wandb sync`."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._wandb = wandb
        self._folder = folder
        self._run: Any = None

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            name = read_name(self._folder, "wandb") or secrets.token_hex(4)
            is_known = "WANDB_MODE" in os.environ or bool(self._wandb.api.api_key)
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=event.run,
                id=name,
                resume="allow",
                dir=str(self._folder),
                config=event.config,
                mode=None if is_known else "offline",
                settings=self._wandb.Settings(console="off", silent=True),
            )
            write_name(self._folder, "wandb", name)
            # By a number of our own: a part that goes on from a checkpoint begins before the last step there.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        step, numbers = measure(event)
        if numbers and self._run:
            self._run.log({"step": step, **numbers})

    def close(self) -> None:
        if self._run:
            self._run.finish()


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in a database beside the run's folder."""

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        self._folder = folder
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=place)
        self._run = ""

    def emit(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event)
        step, numbers = measure(event)
        if numbers and self._run:
            now_ms = int(1e3 * event.time_s)
            metrics = [self._metric(name, value, now_ms, step) for name, value in numbers.items()]
            self._client.log_batch(self._run, metrics=metrics)
        if isinstance(event, RunEnded) and self._run:
            status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(event.status, "FAILED")
            self._client.set_terminated(self._run, status)

    def _begin(self, start: RunStarted) -> None:
        self._run = read_name(self._folder, "mlflow")
        if self._run:
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
        self._run = self._client.create_run(experiment, run_name=start.run).info.run_id
        write_name(self._folder, "mlflow", self._run)
        params = [self._param(name, value[:500]) for name, value in flatten(start.config).items()]
        self._client.log_batch(self._run, params=params)

    def close(self) -> None:
        pass


class Mlperf:
    """MLPerf's lines, from the run's own log when it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def emit(self, event: Event) -> None:
        if isinstance(event, RunEnded):
            write_mlperf(self._folder / "mlperf.log", read_events(self._folder))

    def close(self) -> None:
        pass


VIEWERS: dict[str, tuple[type[TensorBoard] | type[Wandb] | type[Mlflow] | type[Mlperf], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (Mlflow, "mlflow"),
    "mlperf": (Mlperf, ""),
}


def parse_viewers(text: str) -> list[str]:
    """The viewers that a list names; one that is unknown or not installed is a sentence, before anything begins."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in VIEWERS:
            raise LockstepError(f"--log {name[:40]} is no viewer; give one or more of {', '.join(VIEWERS)}.")
        package = VIEWERS[name][1]
        if package and not is_installed(package):
            raise LockstepError(f"--log {name} needs the package {package}; install it with: pip install {package}")
    if "mlperf" in names:
        check_submission(os.environ)
    return names


def is_installed(package: str) -> bool:
    """Whether there is such a package, and not only a folder of that name: wandb leaves one wherever it runs."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def open_viewers(names: list[str], folder: Path) -> "list[Behind]":
    """The viewers of a run, each behind a queue of its own."""
    return [Behind(name, partial(VIEWERS[name][0], folder)) for name in names]


class Behind:
    """A viewer in a thread of its own, which takes records when it can."""

    def __init__(self, name: str, build: Callable[[], Viewer]) -> None:
        self._name = name
        self._build = build
        self._queue: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._problem = ""
        self._is_told = False
        self._thread = threading.Thread(target=self._work, name=f"lockstep-{name}", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> Notice | None:
        """Pass a record on, unless the viewer has failed; that it has is said once."""
        if not self._problem:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self._problem = f"it is {MOST_WAITING:,} records behind"
        if not self._problem or self._is_told:
            return None
        self._is_told = True
        text = f"The run is no longer shown in {self._name} ({self._problem}); training goes on."
        return Notice(level="warning", text=text)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Let the viewer take what is left, for a while."""
        try:
            self._queue.put(None, timeout=0.1)
        except queue.Full:
            return
        self._thread.join(wait_s)

    def _work(self) -> None:
        viewer: Viewer | None = None
        try:
            viewer = self._build()
            while (event := self._queue.get()) is not None:
                viewer.emit(event)
            viewer.close()
        except Exception as error:  # these packages raise nearly anything
            self._problem = next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def read_name(folder: Path, viewer: str) -> str:
    """The name under which a viewer knows this run; empty if it does not."""
    try:
        names = json.loads((folder / NAMES_FILE).read_text())
        return str(names.get(viewer, ""))
    except (OSError, ValueError, AttributeError):
        return ""


_names_lock = threading.Lock()


def write_name(folder: Path, viewer: str, name: str) -> None:
    """Keep it for when the run goes on."""
    with _names_lock:
        known = {other: found for other in VIEWERS if (found := read_name(folder, other))}
        write_whole(folder / NAMES_FILE, json.dumps(known | {viewer: name}, indent=2) + "\n")
