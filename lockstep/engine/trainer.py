"""The loop around the step: log, certify, evaluate, checkpoint, stop when asked (step 10 on the walk)."""

import math
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lockstep import __version__
from lockstep.comm.links import measure_links
from lockstep.comm.straggler import NOTABLE_SHARE, RankTimes, find_straggler, typical_times
from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Ledger, expected_ledger, mix
from lockstep.data.pipeline import Batch, EvalPipeline, TrainPipeline
from lockstep.engine.build import Parts, Sources, build_eval_pipeline, build_train_pipeline, count_steps
from lockstep.engine.evaluate import evaluate
from lockstep.engine.execution import Step, choose_execution
from lockstep.engine.input_report import InputReport
from lockstep.engine.state import State, load_state, save_state, sum_ledger
from lockstep.engine.step import CORRECT, LOSS, STOP
from lockstep.engine.timing import Kind
from lockstep.engine.tune import default_tuning_folder, describe_tuning, tune_parts
from lockstep.errors import LockstepError, SharedError
from lockstep.events import CheckpointSaved, EpochDone, Evaluated, Event, Notice, RunEnded, RunStarted, Sink, StepDone
from lockstep.optim.doctor import Doctor

Status = Literal["finished", "interrupted"]
TRAINING: tuple[Kind, ...] = ("input", "compute", "communicate")


@dataclass
class StopRequest:
    """The stop signal this rank has received, if any."""

    signal: int = 0


@dataclass
class Window:
    """Some steps: how many, what they trained, and where this rank's time went meanwhile."""

    steps: int = 0
    images: int = 0
    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(TRAINING, 0.0))

    def add(self, other: "Window") -> None:
        self.steps += other.steps
        self.images += other.images
        for kind in TRAINING:
            self.seconds[kind] += other.seconds[kind]

    @property
    def total_s(self) -> float:
        return sum(self.seconds[kind] for kind in TRAINING)

    @property
    def rank_times(self) -> RankTimes:
        """What a step cost this rank alone."""
        return RankTimes(self.seconds["input"] / self.steps, self.seconds["compute"] / self.steps)


class Trainer:
    """One rank's run, from the first step it takes to the last."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        world: World,
        sources: Sources,
        parts: Parts,
        folder: Path,
        sink: Sink,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.name = name
        self.world = world
        self.sources = sources
        self.parts = parts
        self.folder = folder
        self.sink = sink
        self.stop = stop
        self.steps_per_epoch, self.total_steps = count_steps(config, sources.train.num_samples)
        self.state = State()
        self.first = Window()  # the first step, which pays for memory, threads and kernels that no later step pays for
        self.spent = Window()  # all later ones
        self.window = Window()  # since the last step record
        self.rank_times: list[RankTimes] = []  # of every window
        self.tally = torch.zeros_like(parts.reducer.side)  # the reducer's side numbers, summed over the window's steps
        self.doctor: Doctor | None = None
        self.evaluation: EvalPipeline  # from the start of `run` to its end
        self.input = InputReport(world, sink)
        self.unsaved = ""  # why the last checkpoint could not be written

    def run(self) -> Status:
        """Train to the end or until asked to stop; either way the last step taken is on disk."""
        start = time.time()
        self._say_started(start)
        try:
            self._tune()
            step = choose_execution(
                self.config, self.parts, self.world, self.total_steps - self.state.step, self._inform
            )
            with (
                build_train_pipeline(self.config, self.world, self.sources.train, self.state.cursor) as pipeline,
                build_eval_pipeline(self.config, self.world, self.sources.val) as self.evaluation,
            ):
                status = self._loop(pipeline, step)
                self.input.say_means(pipeline)
        except BaseException as error:
            self._say_ended("failed", start, reason=str(error))
            raise
        self._say_ended(status, start)
        self.world.barrier()  # a rank that leaves early would make the launcher stop the one still writing
        if self.unsaved:
            raise LockstepError(self.unsaved)
        return status

    def _tune(self) -> None:
        """Choose how gradients travel; the run remembers, so that it adds in the same order when it goes on."""
        tuning = tune_parts(self.config, self.parts, self.world, [self.folder / "tuning.toml", default_tuning_folder()])
        if tuning:
            self._inform(describe_tuning(tuning))

    def _inform(self, text: str) -> None:
        self._emit(Notice(level="info", text=text))

    def _loop(self, pipeline: TrainPipeline, take_step: Step) -> Status:
        state, parts, clock = self.state, self.parts, self.parts.clock
        if parts.loss_scale:
            self.doctor = Doctor(parts.layout, parts.loss_scale)
        clock.take()
        while not self._is_last:
            batch = next(pipeline)
            clock.mark("input")
            lr = parts.schedule.lr_at(state.step)
            self._seed_dropout()
            if self._is_evaluated(state.step + 1):
                self.evaluation.prepare()
            side = take_step(batch, lr, bool(self.stop.signal))
            state.step += 1
            state.cursor = batch.cursor
            state.ledger.add(batch.epoch, batch.samples)
            self.tally += parts.loss_scale.drop_skipped(side) if parts.loss_scale else side
            self.window.steps += 1
            self.window.images += batch.global_size
            stopping = self._read_vote(side) and not self._is_last
            if stopping or self._is_last or self._is_due(self.config.train.log_every) or not self.first.steps:
                self._log(lr)
            self._follow_up(batch, pipeline, stopping)
            clock.mark("other")
            if stopping:
                return "interrupted"
        return "finished"

    @property
    def _is_last(self) -> bool:
        return self.state.step >= self.total_steps

    @property
    def _epoch(self) -> float:
        return self.state.step / self.steps_per_epoch

    @property
    def _order(self) -> dict[str, int]:
        """What the data order depends on."""
        return {"seed": self.config.train.seed, "num_samples": self.sources.train.num_samples}

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def _is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        every = self.config.train.eval_every.steps(self.steps_per_epoch)
        return step >= self.total_steps or (every > 0 and step % every == 0)

    def _seed_dropout(self) -> None:
        """Chance inside the network is a function of (seed, step, rank), so that none of it has to be saved."""
        torch.manual_seed(int(mix(self.config.train.seed, self.state.step, self.world.rank)) >> 1)

    def _read_vote(self, side: Tensor) -> bool:
        """Whether any rank wants to stop; all ranks see the same sum. A GPU is asked only when the log waits anyway."""
        if side.is_cuda and not self._is_due(self.config.train.log_every):
            return False
        return float(side[STOP]) > 0

    def _follow_up(self, batch: Batch, pipeline: TrainPipeline, stopping: bool) -> None:
        """What is due between two steps."""
        train = self.config.train
        if batch.cursor.epoch > batch.epoch:
            self._certify(batch.epoch, pipeline)
        if self._is_evaluated(self.state.step) and (self._is_last or not stopping):
            self._evaluate()
        if self._is_last or stopping or self._is_due(train.checkpoint_every.steps(self.steps_per_epoch)):
            self._save()

    def _log(self, lr: float) -> None:
        """Close the window of steps since the last record and report it."""
        window, state = self.window, self.state
        window.seconds = self.parts.clock.take()
        tally = self.tally.tolist()
        num_good = window.steps - self._examine()
        loss = tally[LOSS] / num_good if num_good else math.nan
        if num_good and not math.isfinite(loss):
            raise SharedError(
                f"The loss became {loss} by step {state.step}; lower optim.lr (now {self.config.optim.lr:g}) or "
                "lengthen optim.warmup."
            )
        self._emit(
            StepDone(
                step=state.step,
                epoch=self._epoch,
                loss=loss,
                top1=tally[CORRECT] / window.images * window.steps / max(1, num_good),
                lr=lr,
                images_per_second=window.images / window.total_s,
                input_s=window.seconds["input"] / window.steps,
                compute_s=window.seconds["compute"] / window.steps,
                comm_s=window.seconds["communicate"] / window.steps,
                step_s=window.total_s / window.steps,
            )
        )
        (self.spent if self.first.steps else self.first).add(window)
        self.rank_times.append(window.rank_times)
        self.window = Window()
        self.tally.zero_()

    def _examine(self) -> int:
        """Say what the loss scale's doctor has to say; returns how many steps of the window were skipped."""
        if self.doctor is None:
            return 0
        diagnosis = self.doctor.examine()
        if diagnosis.is_stalled:
            raise SharedError(diagnosis.text)
        if diagnosis.text:
            self._emit(Notice(level="warning" if diagnosis.is_at_floor else "info", text=diagnosis.text))
        return diagnosis.num_skipped

    def _certify(self, epoch: int, pipeline: TrainPipeline) -> None:
        """Prove that the epoch's ledger over all ranks is that of every sample exactly once."""
        total = sum_ledger(self.state.ledger, self.world)
        expected = expected_ledger(self.sources.train.num_samples, epoch)
        self.state.ledger = Ledger()
        bad_samples = self.input.name_bad(pipeline, "its neighbour took its place")
        self.input.say_means(pipeline)
        self._emit(
            EpochDone(epoch=epoch, ledger=f"{total.value:016x}", ledger_ok=total == expected, bad_samples=bad_samples)
        )
        if total != expected:
            raise SharedError(
                f"Epoch {epoch + 1} did not see every sample exactly once ({total}, expected {expected}); "
                "this is a defect of Lockstep, please report it."
            )

    def _evaluate(self) -> None:
        start = time.perf_counter()
        result = evaluate(self.parts.model, self.evaluation, self.world, self.parts.dtype)
        self.input.name_bad(self.evaluation, "it was left out")
        self._emit(
            Evaluated(
                step=self.state.step,
                epoch=self._epoch,
                top1=result.top1,
                top5=result.top5,
                correct1=result.correct1,
                correct5=result.correct5,
                total=result.total,
                loss=result.loss,
                seconds=time.perf_counter() - start,
            )
        )

    def _save(self) -> None:
        """Write a checkpoint; a disk that cannot take it costs the checkpoint, not the run."""
        folder = self.folder / "checkpoints"
        try:
            saved = save_state(
                folder, self.state, self.parts, self.world, self._order, keep=self.config.train.keep_checkpoints
            )
        except OSError as error:
            self.unsaved = (
                f"The checkpoint of step {self.state.step} could not be written to {folder} "
                f"({error.strerror or error}); free some space there."
            )
            self._emit(Notice(level="warning", text=self.unsaved))
            return
        self.unsaved = ""
        if saved:
            self._emit(
                CheckpointSaved(
                    step=self.state.step, path=str(saved.path), bytes=saved.num_bytes, seconds=saved.seconds
                )
            )

    def resume(self) -> None:
        """Take up the last good checkpoint; to be called before `run`."""

        def warn(text: str) -> None:
            self._emit(Notice(level="warning", text=text))

        self.state, wrote = load_state(self.folder / "checkpoints", self.parts, self.world, self._order, warn)
        if self._is_last:
            raise SharedError(
                f"{self.folder} is finished (step {self.state.step} of {self.total_steps}); to train on, add "
                "--set train.duration=… with a longer one."
            )
        ranks = f"{self.world.size} rank{'s' if self.world.size > 1 else ''}"
        self._inform(f"Going on from step {self.state.step} on {ranks}; {wrote} wrote the checkpoint.")

    def _emit(self, event: Event) -> None:
        self.sink.emit(event)

    def _say_started(self, now: float) -> None:
        sources, layout = self.sources, self.parts.layout
        device = self.world.device
        self._emit(
            RunStarted(
                time_s=now,
                run=self.folder.name,
                recipe=self.name,
                config=self.config.model_dump(mode="json"),
                world_size=self.world.size,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
                num_train=sources.train.num_samples,
                num_val=sources.val.num_samples,
                num_classes=len(sources.train.classes),
                num_parameters=sum(slot.numel for slot in layout.slots),
                steps_total=self.total_steps,
                steps_per_epoch=self.steps_per_epoch,
                start_step=self.state.step,
                versions={"lockstep": __version__, "torch": torch.__version__, "python": platform.python_version()},
            )
        )

    def _say_ended(self, status: Literal["finished", "interrupted", "failed"], start: float, reason: str = "") -> None:
        """T = S · N · e: S is what one rank would do if it never waited, e the share of the time it did not."""
        spent = self.spent if self.spent.images else self.first
        straggler = ""
        seconds = torch.tensor([spent.seconds[kind] for kind in TRAINING], dtype=torch.float64)
        if status != "failed":  # after a failure the other ranks may be gone, and rank 0 speaks for itself
            straggler = self._name_straggler(spent)
            seconds = self.world.sum(seconds) / self.world.size
        waited, computed, communicated = seconds.tolist()
        total = max(waited + computed + communicated, 1e-9)
        throughput = spent.images / total
        speed = spent.images / self.world.size / computed if computed else None
        self._emit(
            RunEnded(
                status=status,
                step=self.state.step,
                epoch=self._epoch,
                wall_s=time.time() - start,
                train_s=total,
                images=spent.images,
                images_per_second=throughput,
                speed_one_rank=speed,
                world_size=self.world.size,
                efficiency=throughput / (speed * self.world.size) if speed else None,
                share_compute=computed / total,
                share_comm=communicated / total,
                share_input=waited / total,
                reason=reason,
                straggler=straggler,
            )
        )

    def _name_straggler(self, spent: Window) -> str:
        """The sentence on who held the others up, if anyone did; every rank must call it."""
        if not self.rank_times:
            return ""
        times: list[RankTimes] = self.world.gather_objects(typical_times(self.rank_times[1:] or self.rank_times))
        topology = self.parts.topology
        waited = self.world.broadcast_object(spent.seconds["communicate"] / max(spent.total_s, 1e-9))
        links = measure_links(self.world, topology) if waited > NOTABLE_SHARE else []
        nodes = [topology.node_of(rank) for rank in range(self.world.size)]
        num_bytes = self.parts.layout.gradient_bytes
        straggler = find_straggler(times, spent.total_s / spent.steps, links, num_bytes, nodes)
        return straggler.text if straggler else ""
