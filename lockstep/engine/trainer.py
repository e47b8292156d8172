"""The loop around the step: log, certify, evaluate, checkpoint, stop when asked (step 10 on the walk)."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Ledger, expected_ledger, mix, share
from lockstep.data.pipeline import Batch, EvalPipeline, TrainPipeline
from lockstep.engine.account import Account, Startup, forget_peak, read_peak
from lockstep.engine.anchor_pass import Anchors, build_anchors
from lockstep.engine.apply import Step
from lockstep.engine.averaged import describe_evaluation, evaluate_both
from lockstep.engine.build import Parts, Sources, build_eval_pipeline, build_train_pipeline, count_steps
from lockstep.engine.drift import find_drift, note_weights
from lockstep.engine.fit import describe_fit
from lockstep.engine.giving_up import SLOW, is_given_up
from lockstep.engine.input_report import InputReport
from lockstep.engine.instruments import Cadence, Instruments
from lockstep.engine.keeper import Keeper
from lockstep.engine.mistakes import Mistakes
from lockstep.engine.opening import describe_chosen, describe_start, predict_run
from lockstep.engine.planning import Chosen
from lockstep.engine.resume import list_evaluated
from lockstep.engine.reuse import Kept
from lockstep.engine.setup import default_plan_folder
from lockstep.engine.start_weights import load_start
from lockstep.engine.starting import phrase_last_good
from lockstep.engine.state import State, sum_ledger
from lockstep.engine.step import CORRECT, LOSS, STOP
from lockstep.errors import Diverged, LockstepError, SharedError
from lockstep.events import (
    EpochDone,
    Evaluated,
    Event,
    MistakesFound,
    Notice,
    RunEnded,
    Sink,
    StartedUp,
    StepDone,
)
from lockstep.optim.doctor import Diagnosis, Doctor
from lockstep.plan.folder import write_plan
from lockstep.plan.profile import InputRate
from lockstep.restarts import count_restarts
from lockstep.terminal import say

Status = Literal["finished", "interrupted"]
# Steps longer than this may be given up between two passes when the run is asked to stop.
LONG_STEP_S = 5.0


@dataclass
class StopRequest:
    """The stop signal this rank has received, if any, and whether somebody who listens to the run asked for its end."""

    signal: int = 0
    is_asked: bool = False

    @property
    def is_wanted(self) -> bool:
        return bool(self.signal) or self.is_asked

    def ask(self) -> None:
        """Whoever listens wants the run to end."""
        self.is_asked = True


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
        explain: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        kept: Kept | None = None,
        startup: Startup | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        self.name = name
        self.world = world
        self.sources = sources
        self.parts = parts
        self.folder = folder
        self.sink = sink
        self.stop = stop
        self.kept = kept or Kept()
        self.explain = explain  # a context that turns what the engines below raise into a sentence
        self.steps_per_epoch, self.total_steps = count_steps(config, sources.train.num_samples)
        self.state = State()
        self.account = Account()
        self.startup = startup or Startup()
        self.tally = torch.zeros_like(parts.reducer.side)  # the reducer's side numbers, summed over the window's steps
        self.doctor: Doctor | None = None
        self.is_slow = True  # whether steps may be given up: by all ranks' word, and until they have given one
        self.is_unevaluated = False  # whether the run was stopped before an evaluation that was due
        self.is_compared = False  # whether the step at hand carries the checksums of all ranks' weights
        self.evaluation: EvalPipeline  # from the start of `run` to its end
        self.instruments: Instruments  # likewise
        self.anchors: Anchors | None = None  # of rules that have them
        self.input = InputReport(world, sink)
        self.keeper = Keeper(config, folder, world, sources, parts, self._emit, self._warn, is_ours)

    def run(self, notes: Sequence[str] = ()) -> Status:
        """Train to the end or until asked to stop; either way the last step taken is on disk. Notes are said first."""
        start = time.monotonic()  # a clock may be set
        self.keeper.begin(self.state.step)
        now, step = time.time(), self.state.step
        self._emit(
            describe_start(self.config, self.folder.name, self.name, self.world, self.sources, self.parts, step, now)
        )
        for note in notes:
            self._inform(note)
        if self.world.is_first and not self.state.step:
            for notice in describe_fit(self.config, self.sources):
                self._emit(notice)
        on_gpu = self.world.device.type == "cuda"
        cadence = Cadence(self.state.step, self.total_steps, self.config.train.log_every, on_gpu=on_gpu)
        self.instruments = Instruments(self.parts, self.world, self.sink, cadence)
        try:
            with self.explain():
                status = self._train(start)
        except BaseException as error:
            self.world.note_failure(error)
            with contextlib.suppress(Exception):  # this error is the one to tell
                self.keeper.settle()
            if isinstance(error, SharedError):  # which would come again: nobody will start this run again by himself
                self.keeper.drop_snapshots()
            self._say_ended("failed", start, error)
            raise
        self.keeper.drop_snapshots()  # before the last word: nobody comes back to a run that has said it
        self._say_ended(status, start)
        self.world.barrier()  # a rank that leaves early would make the launcher stop the one still writing
        return status

    def _train(self, start: float) -> Status:
        chosen = self._choose_plan()
        step = self._apply(chosen)
        self.parts.reducer.count_from(self.state.step)  # trials have counted theirs
        self.startup.mark("plan")
        num_samples, is_recorded = self.sources.train.num_samples, chosen.plan.execution.recorded
        self.anchors = build_anchors(self.config, self.parts, self.world, num_samples, is_recorded, self._warn)
        with (
            build_train_pipeline(
                self.config, self.world, self.sources.train, self.state.cursor, chosen.plan.input, self.kept.shelf
            ) as pipeline,
            build_eval_pipeline(self.config, self.world, self.sources.val, self.kept.shelf) as self.evaluation,
        ):
            self.startup.mark("input")
            self.account.note_startup(time.monotonic() - start)
            forget_peak(self.world.device)
            if self.is_unevaluated:
                self._evaluate()
                self.startup.mark("evaluation")
            status = self._loop(pipeline, step)
            self.input.say_choice(pipeline)
            self._keep_rate(pipeline, chosen)
        self.keeper.save_at_last(self.state)
        return status

    def _choose_plan(self) -> Chosen:
        """How steps are taken; the run remembers, so that it adds in the same order when it goes on."""
        num_steps = self.total_steps - self.state.step
        places = [self.folder, default_plan_folder()]
        train = self.sources.train
        chosen = self.kept.choose_plan(
            self.config, self.parts, self.world, places, num_steps, train, is_resumed=self.state.step > 0
        )
        self._emit(describe_chosen(chosen, self.world))
        if self.world.is_first:  # nobody else is asked
            samples, start = train.num_samples, self.state.step
            if predicted := predict_run(self.config, chosen, self.parts, self.world, samples, start):
                self._emit(predicted)
        return chosen

    def _keep_rate(self, pipeline: TrainPipeline, chosen: Chosen) -> None:
        """Add to the run's profile what the input turned out to do."""
        crew = pipeline.crew()
        if not self.world.is_first or crew.images_per_second is None:
            return
        rate = InputRate(crew.images_per_second, crew.decoder, crew.threads)
        with contextlib.suppress(LockstepError):  # a full disk costs the profile, not the run
            write_plan(self.folder, chosen.plan, replace(chosen.profile, input=rate))

    def _apply(self, chosen: Chosen) -> Step:
        start, stop = share(self.config.train.global_batch, self.world.rank, self.world.size)
        return self.kept.apply_plan(chosen, self.parts, stop - start, self.config.train.global_batch, self._warn)

    def _warn(self, text: str) -> None:
        """Say it on any rank; the display belongs to rank 0."""
        self._emit(Notice(level="warning", text=text, rank=self.world.rank))
        if not self.world.is_first:
            say(f"lockstep: rank {self.world.rank}: {text}", sys.stderr)

    def _inform(self, text: str) -> None:
        self._emit(Notice(level="info", text=text))

    def _loop(self, pipeline: TrainPipeline, take_step: Step) -> Status:
        state, parts, clock = self.state, self.parts, self.parts.clock
        if parts.loss_scale:
            self.doctor = Doctor(parts.layout, parts.loss_scale)
        parts.note[SLOW].fill_(self.is_slow)
        clock.take()
        while not self._is_last:
            if self.anchors and self.anchors.is_due(state.step) and not self._take_anchor(self.anchors, pipeline):
                return "interrupted"
            self.instruments.begin_step(state.step + 1, pipeline.list_made)
            batch = next(pipeline)
            clock.mark("input")
            lr = parts.schedule.lr_at(state.step)
            self._seed_dropout()
            if self._is_evaluated(state.step + 1):
                self.evaluation.prepare()
            self.is_compared = self.world.size > 1 and (state.step + 1) % self.config.train.log_every == 0
            if self.is_compared:
                note_weights(parts)
            asked = self._is_asked if self.is_slow else None
            side = take_step(batch, lr, self._is_asked(), asked)
            if asked and is_given_up(side):
                self._give_up(batch)
                return "interrupted"
            state.step += 1
            state.cursor = batch.cursor
            state.ledger.add(batch.epoch, batch.samples)
            self.tally += parts.loss_scale.drop_skipped(side) if parts.loss_scale else side
            self.account.count(batch.global_size)
            stopping = self._read_vote(side) and not self._is_last
            if stopping or self._is_last or self._is_due(self.config.train.log_every) or self.account.is_empty:
                is_first = self.account.is_empty
                self._log(lr, batch)
                self._compare(side)
                if is_first:
                    self.startup.mark("first step")
                    self._emit(StartedUp(seconds={what: round(s, 4) for what, s in self.startup.seconds.items()}))
            self._follow_up(batch, pipeline, stopping)
            clock.mark("other")
            if stopping:
                return "interrupted"
        return "finished"

    def _is_asked(self) -> bool:
        return self.stop.is_wanted

    def _give_up(self, batch: Batch) -> None:
        """Leave the run as it was before the step at hand, which no rank has taken."""
        self.instruments.drop_step()
        self._inform(f"Step {self.state.step + 1} was given up between two passes, as the run was asked to stop.")
        if self.account.window.steps:
            self._log(self.parts.schedule.lr_at(self.state.step - 1), batch)
        if self.state.step:
            self.keeper.save(self.state)

    def _take_anchor(self, anchors: Anchors, pipeline: TrainPipeline) -> bool:
        """Pass over the epoch for the full gradient; False if the run is to stop, and whoever goes on will do it."""
        epoch = self.state.cursor.epoch
        taken = anchors.take(pipeline.pass_over(epoch), self.state.step, epoch, self._is_asked)
        self.parts.clock.mark("other")
        if taken:
            self._emit(taken)
            if self.account.is_empty:
                self.startup.mark("full gradient")  # which is no part of the first step
        elif self.state.step:
            self.keeper.save(self.state)
        return taken is not None

    @property
    def _is_last(self) -> bool:
        return self.state.step >= self.total_steps

    @property
    def _epoch(self) -> float:
        return self.state.step / self.steps_per_epoch

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
        """Whether any rank wants to stop; all ranks see the same sum.

        A GPU is asked only when the log waits anyway, or where steps are so long that waiting for one is nothing.
        """
        if side.is_cuda and not self.is_slow and not self._is_due(self.config.train.log_every):
            return False
        return float(side[STOP]) > 0

    def _follow_up(self, batch: Batch, pipeline: TrainPipeline, stopping: bool) -> None:
        """What is due between two steps."""
        train = self.config.train
        self.keeper.look()
        if batch.cursor.epoch > batch.epoch:
            self._certify(batch.epoch, pipeline)
        # The checkpoint first: whatever an evaluation meets, the steps are safe.
        if self._is_last or stopping or self._is_due(train.checkpoint_every.steps(self.steps_per_epoch)):
            self.keeper.save(self.state)
        else:
            self.keeper.snap(self.state)
        if self._is_evaluated(self.state.step) and (self._is_last or not stopping):
            self._evaluate()

    def _log(self, lr: float, batch: Batch) -> None:
        """Close the window of steps since the last record and report it."""
        window, state = self.account.close_window(self.parts.clock.take()), self.state
        tally = self.tally.tolist()
        diagnosis = self._examine()
        num_skipped = diagnosis.num_skipped if diagnosis else 0
        self.is_slow = tally[SLOW] > 0
        self.parts.note[SLOW].fill_(window.total_s / window.steps > LONG_STEP_S)
        num_good = window.steps - num_skipped
        loss = tally[LOSS] / num_good if num_good else math.nan
        if num_good and not math.isfinite(loss):
            raise Diverged(
                f"The loss became {loss} by step {state.step}; lower optim.lr (now {self.config.optim.lr:g}) or "
                f"lengthen optim.warmup, and {phrase_last_good(self.keeper.find_good())}"
            )
        self._emit(
            StepDone(
                step=state.step,
                epoch=self._epoch,
                loss=loss,
                top1=tally[CORRECT] / window.images * window.steps / max(1, num_good),
                lr=lr,
                images_per_second=window.images / window.total_s,
                input_s=window.mean_s("input"),
                compute_s=window.mean_s("compute"),
                comm_s=window.mean_s("communicate"),
                step_s=window.total_s / window.steps,
                loss_scale=diagnosis.scale if diagnosis else None,
                skipped=num_skipped,
                noise_scale=self.instruments.report(state.step, batch),
            )
        )
        self.tally.zero_()

    def _compare(self, side: Tensor) -> None:
        """See that all ranks still hold the same weights, if the last step carried word of it."""
        if self.is_compared and (difference := find_drift(self.parts, side, self.world)):
            self._emit(Notice(level="warning", text=difference))

    def _examine(self) -> Diagnosis | None:
        """Say what the loss scale's doctor has to say of the window's steps; None where there is no loss scale."""
        if self.doctor is None:
            return None
        diagnosis = self.doctor.examine()
        if diagnosis.is_stalled:
            raise Diverged(diagnosis.text)
        if diagnosis.text:
            self._emit(Notice(level="warning" if diagnosis.is_at_floor else "info", text=diagnosis.text))
        return diagnosis

    def _certify(self, epoch: int, pipeline: TrainPipeline) -> None:
        """Prove that the epoch's ledger over all ranks is that of every sample exactly once."""
        total = sum_ledger(self.state.ledger, self.world)
        expected = expected_ledger(self.sources.train.num_samples, epoch)
        self.state.ledger = Ledger()
        bad_samples = self.input.name_bad(pipeline, "its neighbour took its place")
        self.input.say_choice(pipeline)
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
        mistakes = Mistakes(self.sources.val, self.world) if self._is_last else None
        result, average = evaluate_both(self.parts, self.evaluation, self.world, mistakes)
        num_bad = self.input.name_bad(self.evaluation, "it was left out")
        counts = describe_evaluation(result, average, len(self.sources.train.classes))
        place: dict[str, Any] = {"step": self.state.step, "epoch": self._epoch, "bad_samples": num_bad}
        self._emit(Evaluated(**place, **counts, seconds=time.perf_counter() - start))
        if mistakes and (found := mistakes.find()):
            self._emit(MistakesFound(step=self.state.step, **found))

    def resume(self, has_finished: bool = True, may_be_finished: bool = False) -> bool:
        """Take up the newest good state, or begin if the run ended before its first; to be called before `run`.

        False if nothing is left to do, and whoever asks cannot know: a rank was lost after the run's last word, or the
        same command starts a run and goes on with it. A run that took its last step and was killed before that word
        goes on, to say it.
        """
        taken_up = self.keeper.take_up()
        if taken_up is None:
            self._inform(f"{self.folder} has no checkpoint yet; starting it from step 0, with its own configuration.")
            for note in load_start(self.config.model.weights, self.parts, self.world, len(self.sources.train.classes)):
                self._inform(note)
            return True
        self.state = taken_up.state
        evaluated = list_evaluated(self.folder) if self.world.is_first else set()
        is_known = bool(self.world.broadcast_value(taken_up.written.step in evaluated))
        self.is_unevaluated = self.state.step > 0 and self._is_evaluated(self.state.step) and not is_known
        if self._is_last and has_finished:
            if may_be_finished or count_restarts(os.environ):
                return False
            raise SharedError(
                f"{self.folder} is finished (step {self.state.step} of {self.total_steps}); to train on, add "
                "--set train.duration=… with a longer one."
            )
        for text in taken_up.describe(self.world.size, self.config.train.global_batch, self.total_steps):
            self._inform(text)
        return True

    def _emit(self, event: Event) -> None:
        self.account.hear(event)
        self.sink.emit(event)

    def _say_ended(self, status: Status | Literal["failed"], start: float, error: BaseException | None = None) -> None:
        """After a failure the other ranks may be gone, and rank 0 speaks for itself."""
        has_failed = error is not None
        straggler, times = "", []
        if not has_failed:
            times, topology = self.account.gather_times(self.world), self.parts.topology
            straggler = self.account.name_straggler(times, self.world, topology, self.parts.layout.gradient_bytes)
        balance = self.account.balance(self.world, alone=has_failed)
        self._emit(
            RunEnded(
                status=status,
                step=self.state.step,
                epoch=self._epoch,
                wall_s=time.monotonic() - start,
                world_size=self.world.size,
                reason=str(error) if error else "",
                diverged=isinstance(error, Diverged),
                straggler=straggler,
                rank_times=[[round(seconds, 6) for seconds in one] for one in times] if len(times) > 1 else [],
                energy_j=self.instruments.energy.count(self.world, alone=has_failed),
                memory_bytes=read_peak(self.world.device),
                **asdict(self.account.beside()),
                **balance._asdict(),
            )
        )
