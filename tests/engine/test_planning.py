"""Before step 0: every rank follows the same plan, nothing a trial does stays, and the run remembers."""

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.allreduce import Scratch
from lockstep.comm.world import World, join_world
from lockstep.config import RunConfig
from lockstep.data.pipeline import Batch
from lockstep.engine import planning
from lockstep.engine.apply import apply_plan
from lockstep.engine.build import Parts, assemble, build_network, build_parts, open_sources, set_number_formats
from lockstep.engine.measure import NO_TIME, fake_batch, suits_own_kernels
from lockstep.engine.planning import Chosen, choose_plan, tune_recipe
from lockstep.engine.recorded import RecordedStep
from lockstep.engine.state import list_changing, put_back
from lockstep.engine.step import LOSS
from lockstep.events import PlanChosen
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import PLAIN
from lockstep.plan.folder import PLAN_FILE, PROFILE_FILE, read_profile
from lockstep.plan.plan import Execution
from tests.engine import commands
from tests.engine.conftest import tiny_config, tiny_settings
from tests.engine.small import compile_without_a_compiler, small_config
from tests.ranks import run_ranks


def build(config: RunConfig, world: World) -> Parts:
    set_number_formats(config.precision)
    return assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))


def copy_changing(parts: Parts) -> list[Tensor]:
    return [array.clone() for array in [*list_changing(parts).arrays(), parts.half_weights]]


def choose_twice(world: World, config: RunConfig, place: Path) -> tuple[Chosen, Chosen, bool]:
    parts = build_parts(config, world, open_sources(config.data))
    before = copy_changing(parts)
    first = choose_plan(config, parts, world, [place])
    unchanged = all(torch.equal(old, new) for old, new in zip(before, copy_changing(parts), strict=True))
    return first, choose_plan(config, parts, world, [place]), unchanged


def test_all_ranks_follow_one_plan_that_is_measured_once(images: Path, tmp_path: Path) -> None:
    results = run_ranks(choose_twice, 3, tiny_config(images, "comm.tune_s=3"), tmp_path / "plans")
    first, second, unchanged = results[0]
    assert unchanged
    assert all(result == results[0] for result in results)
    assert (first.source, second.source) == ("measured", "remembered")
    assert (second.plan, second.profile) == (first.plan, first.profile)
    assert first.profile.seconds < 10
    assert PLAIN in {trial.rule for trial in first.profile.trials}
    (folder,) = (tmp_path / "plans").iterdir()
    assert read_profile(folder) == first.profile
    (step,) = first.profile.steps
    assert 0 < step.slots[0].ready_s <= step.backward_s < step.step_s  # the layer nearest to the loss is ready first
    assert min(step.update_s, step.forward_s) > 0
    assert step.update_s + step.forward_s < step.step_s
    assert 0 < step.mean_s <= step.slowest_s


def test_what_the_recipe_pins_is_followed(images: Path, tmp_path: Path) -> None:
    pins = ["comm.algorithm=doubling", "comm.overlap=on", "comm.fusion=two-segments", "comm.tune_s=2"]
    chosen, _, _ = run_ranks(choose_twice, 2, tiny_config(images, *pins), tmp_path / "plans")[0]
    plan = chosen.plan.reduction
    assert {choice.algorithm for choice in plan.choices} == {"doubling"}
    assert plan.overlap
    assert len(plan.buffers) == 2


def test_a_run_measures_says_so_and_goes_on_with_the_same_plan(images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [
        f"--set={setting}"
        for setting in [*tiny_settings(images), "comm.tune_s=2", "train.duration=1ep", "optim.warmup=0st"]
    ]
    cache = {"LOCKSTEP_CACHE": str(tmp_path / "cache")}
    status, out, err = commands.run("train", "quickstart", "--ranks=3", f"--out={run}", *settings, **cache)
    assert status == 0, err
    (said,) = (event for event in commands.events(run) if isinstance(event, PlanChosen))
    assert said.source == "measured"
    assert sum(trial["chosen"] for trial in said.trials) == 1
    assert f"The step: {said.execution}; gradients in {said.reduction} (measured in" in out
    kept = (run / PLAN_FILE).read_text()
    assert (run / PROFILE_FILE).is_file()
    # Sums of three depend on their order, so going on elsewhere, without the cache, must not choose anew.
    status, _, err = commands.run(
        "train", str(run), "--resume", "--ranks=3", "--set=train.duration=2ep", LOCKSTEP_CACHE=str(tmp_path / "other")
    )
    assert status == 0, err
    assert (run / PLAN_FILE).read_text() == kept
    assert commands.events(run)[-1].kind == "RunEnded"
    assert [event.source for event in commands.events(run) if isinstance(event, PlanChosen)][1] == "remembered"


def choose_with_slow_steps(world: World, tune_s: float, step_s: float) -> tuple[Chosen, int, float]:
    """The plan where each forward pass takes `step_s` at least, how many there were, and the loss after one more."""
    config = small_config("fp32", comm={"tune_s": tune_s})
    parts = build(config, world)
    taken = []

    def dawdle(*_: object) -> None:
        taken.append(1)
        time.sleep(step_s)

    parts.model.register_forward_pre_hook(dawdle)
    chosen = choose_plan(config, parts, world)
    num_steps = len(taken)
    step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 8, 16)
    return chosen, num_steps, step(fake_batch(config, world), 0.1, False)[LOSS].item()


def test_steps_too_slow_for_the_time_leave_one_rehearsal_and_one_reduction() -> None:
    (first, num_steps, loss), (second, same_steps, same_loss) = run_ranks(choose_with_slow_steps, 2, 0.5, 0.5)
    assert first == second
    assert num_steps == same_steps == 2  # a rehearsal with nothing sent, and one step of the plain reduction
    assert loss == same_loss > 0
    tried = [trial for trial in first.profile.trials if not trial.failure]
    assert [trial.rule for trial in tried] == [PLAIN]
    assert {trial.failure for trial in first.profile.trials if trial.failure} == {NO_TIME}
    assert first.plan.reduction.overlap


def test_all_that_is_measured_shares_the_time() -> None:
    tune_s, step_s = 1.2, 0.3
    (chosen, num_steps, _), (_, same_steps, _) = run_ranks(choose_with_slow_steps, 2, tune_s, step_s)
    # Without it there were 4 rehearsals and one turn at least of each reduction, whatever messages took before.
    assert 2 <= num_steps == same_steps
    assert num_steps * step_s <= tune_s + 2 * step_s
    assert any(not trial.failure for trial in chosen.profile.trials)


ROOM = 400_000  # bytes of scratch that a rank may have for one purpose


def choose_where_one_rank_lacks_memory(world: World) -> tuple[Chosen, float]:
    """Rank 1 has no memory for what a sum of all gradients at once needs beside them, and the others have it."""
    config = small_config("fp32", comm={"tune_s": 30.0, "algorithm": "doubling", "buffer_mb": 0.5})
    parts = build(config, world)
    take = Scratch.take

    def take_little(self: Scratch, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if world.rank == 1 and type(self) is Scratch and numel * dtype.itemsize > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return take(self, purpose, numel, dtype, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "take", take_little)
        chosen = choose_plan(config, parts, world)
        step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 8, 16)
        return chosen, step(fake_batch(config, world), 0.1, False)[LOSS].item()


def test_a_reduction_that_one_rank_has_no_memory_for_is_left_out_on_all() -> None:
    (first, loss), (second, same_loss) = run_ranks(choose_where_one_rank_lacks_memory, 2)
    assert first == second
    assert loss == same_loss > 0
    trials = {trial.rule: trial for trial in first.profile.trials}
    assert trials["one buffer"].failure == "CUDA out of memory. (rank 1)"
    assert not trials["threshold"].failure
    # The partner keeps half of a long message: those above twice the room were not sent either.
    assert max(timing.num_bytes for timing in first.profile.messages) <= 2 * ROOM


def test_a_forged_plan_is_measured_anew(images: Path, tmp_path: Path) -> None:
    place = tmp_path / "plans"
    config = tiny_config(images, "comm.tune_s=1")
    first, _, _ = run_ranks(choose_twice, 2, config, place)[0]
    (folder,) = place.iterdir()
    text = (folder / PLAN_FILE).read_text()
    (folder / PLAN_FILE).write_text(text.replace("last = ", "last = -"))
    again, _, _ = run_ranks(choose_twice, 2, config, place)[0]
    assert (first.source, again.source) == ("measured", "measured")


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
    assert "images/s a rank" in shown
    (said,) = [line for line in out.splitlines() if line.startswith("The step: ")]
    assert said.partition(" (measured")[0] in shown  # the plan itself, in the words of a run
    assert "links: not given\nlockstep" in shown
    assert ("measured in" in out, "measured in" in shown) == (True, False)
    assert "remembered; measuring it once took" in shown  # nothing was measured now
    assert [line for line in shown.splitlines() if line.startswith("  * ")]
    # How long one looked is not what a plan is true of: a run that would look longer goes by it.
    run, other = tmp_path / "run", [setting.replace("tune_s=2", "tune_s=3") for setting in settings]
    status, out, err = commands.run("train", "quickstart", "--ranks=2", f"--out={run}", *other, **cache)
    assert status == 0, err
    assert [event.source for event in commands.events(run) if isinstance(event, PlanChosen)] == ["remembered"]


def tune_for_a_long_run(world: World, config: RunConfig, cache: Path) -> tuple[Chosen, Chosen]:
    """A recipe that is tuned, then the plan of the run itself; long runs compile, and here the compiler is quick."""

    def compile_quickly(module: nn.Module, **_: object) -> None:
        module._compiled_call_impl = module._call_impl

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(cache))
        patch.setattr(nn.Module, "compile", compile_quickly)
        patch.setattr(planning, "is_worth_compiling", lambda train, num_steps, best_s, on_gpu: num_steps >= 1000)
        patch.setattr(planning, "list_compiled", lambda train: [Execution(compile="block")])
        tuned, _ = tune_recipe(config, world)
        parts = build_parts(config, world, open_sources(config.data))
        return tuned, choose_plan(config, parts, world, [cache / "plans"], num_steps=1000)


def test_a_recipe_is_tuned_for_a_run_as_long_as_its_own(images: Path, tmp_path: Path) -> None:
    config = tiny_config(images, "comm.tune_s=2", "train.duration=1000st", "optim.warmup=0st")
    tuned, chosen = run_ranks(tune_for_a_long_run, 2, config, tmp_path)[0]
    assert "block" in {trial.execution.compile for trial in tuned.profile.trials}
    assert (tuned.source, chosen.source) == ("measured", "remembered")
    assert chosen.plan == tuned.plan


def test_one_rank_on_a_cpu_takes_the_plain_step_and_measures_nothing() -> None:
    with join_world(None) as world:
        config = small_config("fp32")
        parts = build(config, world)
        chosen = choose_plan(config, parts, world)
        assert (chosen.source, chosen.plan.execution, chosen.profile.trials) == ("default", Execution(), ())
        step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 16, 16)
        assert step(fake_batch(config, world), 0.1, True)[LOSS] > 0


@pytest.mark.filterwarnings("ignore")  # of the tracer's own
def test_on_a_cpu_it_is_compiled_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", compile_without_a_compiler)
    config = small_config("fp32", compile="block")
    with join_world(None) as world:
        parts = build(config, world)
        before = copy_changing(parts)
        chosen = choose_plan(config, parts, world)
        assert all(torch.equal(old, new) for old, new in zip(before, copy_changing(parts), strict=True))
        assert chosen.plan.execution == Execution(compile="block")
        step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 16, 16)
        assert any(module._compiled_call_impl is not None for module in parts.model.modules())
        assert step(fake_batch(config, world), 0.1, False)[LOSS] > 0


def raise_at_once(module: nn.Module, **_: Any) -> None:
    raise RuntimeError("not on this platform")


def test_a_compiler_that_cannot_even_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", raise_at_once)
    config = small_config("fp32", compile="whole")
    with join_world(None) as world:
        parts = build(config, world)
        chosen = choose_plan(config, parts, world)
        (trial,) = chosen.profile.trials
        assert trial.failure == "not on this platform"
        assert chosen.plan.execution == Execution()
        step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 16, 16)
        assert step(fake_batch(config, world), 0.1, False)[LOSS] > 0


def compile_on_rank_0_only(module: nn.Module, **options: Any) -> None:
    if torch.distributed.get_rank() > 0:
        raise_for_want_of_a_compiler(module)
    else:
        compile_without_a_compiler(module, **options)


def raise_for_want_of_a_compiler(module: nn.Module, **_: Any) -> None:
    def call(*_: Any) -> None:
        raise RuntimeError("\nno  C++ compiler was found\nset THIS for a stack trace")

    module._compiled_call_impl = call  # type: ignore[assignment]


def choose_where_one_rank_cannot_compile(world: World) -> tuple[Chosen, float]:
    config = small_config("fp32", compile="block")
    parts = build(config, world)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(nn.Module, "compile", compile_on_rank_0_only)
        chosen = choose_plan(config, parts, world)
    step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 8, 16)
    return chosen, step(fake_batch(config, world), 0.1, False)[LOSS].item()


def test_what_fails_on_one_rank_is_left_out_on_all_and_the_run_goes_on() -> None:
    (first, loss), (second, same_loss) = run_ranks(choose_where_one_rank_cannot_compile, 2)
    assert first == second
    assert {trial.failure for trial in first.profile.trials} == {"no C++ compiler was found (rank 1)"}
    assert first.plan.execution == Execution()
    assert loss == same_loss > 0


@pytest.mark.parametrize(("capability", "suits"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_own_kernels_are_for_gpus_that_triton_supports(
    capability: tuple[int, int], suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert suits_own_kernels(build_network(small_config("fp16"), 10)) is suits
    assert not suits_own_kernels(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))


@pytest.mark.gpu
def test_on_a_gpu_the_choice_leaves_no_trace_and_says_what_it_measured() -> None:
    config = small_config("fp16")
    with join_world(None) as world:
        parts = build(config, world)
        before = copy_changing(parts)
        chosen = choose_plan(config, parts, world)
        assert all(torch.equal(old, new) for old, new in zip(before, copy_changing(parts), strict=True))
        assert parts.rule.count == 0
        assert chosen.recording is not None  # which the run goes on with
        batch = fake_batch(config, world)
        losses = [train(parts, chosen, batch, recording) for recording in (chosen.recording, None)]
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
        assert losses[0][0] > losses[0][-1]
    assert [trial.execution.recorded for trial in chosen.profile.trials] == [False, True]
    assert not any(trial.failure for trial in chosen.profile.trials)
    for step in chosen.profile.steps:  # by the device's clock: gradients come one after the other, within the step
        assert 0 < min(slot.ready_s for slot in step.slots) < step.backward_s < step.step_s
        assert 0 < step.forward_s < step.step_s - step.update_s
        assert step.mean_s == step.slowest_s == step.step_s


def train(parts: Parts, chosen: Chosen, batch: Batch, recording: RecordedStep | None) -> list[float]:
    """Losses of a few steps under a plan, by the recording of its trial or by one of its own; the weights stay."""
    with put_back(parts):
        step = apply_plan(chosen.plan.execution, chosen.plan.reduction, parts, 16, 16, recording=recording)
        assert recording is None or step is recording
        return [step(batch, 0.05, False)[LOSS].item() for _ in range(6)]


def choose_among_ranks(world: World, *, tune_s: float) -> tuple[Chosen, float]:
    """The plan, and the loss after some steps under it."""
    config = small_config("fp16", comm={"tune_s": tune_s})
    parts = build(config, world)
    chosen = choose_plan(config, parts, world)
    batch = fake_batch(config, world)
    plan, recording = chosen.plan, chosen.recording
    step = apply_plan(plan.execution, plan.reduction, parts, len(batch.labels), 16, recording=recording)
    assert (step is recording) == plan.execution.recorded
    for _ in range(6):
        side = step(batch, 0.05, False)
    return replace(chosen, recording=None), side[LOSS].item()


def choose_with_and_without_memory(world: World) -> list[tuple[Chosen, float]]:
    """As usual, and where recording fails on rank 1 alone, as it does if another process holds that GPU's memory."""

    class Full(torch.cuda.graph):
        def __enter__(self) -> None:
            if world.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            super().__enter__()

    usual = choose_among_ranks(world, tune_s=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph", Full)
        return [usual, choose_among_ranks(world, tune_s=0.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_nccl_ranks_agree_on_a_plan_and_leave_out_what_fails_on_one(size: int) -> None:
    results = run_ranks(choose_with_and_without_memory, size, backend="nccl", timeout_s=300)
    (chosen, loss), (without, same_loss) = results[0]
    assert all(other == results[0] for other in results)
    assert chosen.profile.setup.backend.startswith("nccl 2.")
    assert chosen.profile.seconds < 120
    assert {trial.execution.recorded for trial in chosen.profile.trials} == {False, True}
    # Four ranks that share a GPU with other tests may have no time for every reduction.
    assert {trial.failure for trial in chosen.profile.trials} <= {"", NO_TIME}
    for recorded in (False, True):
        assert any(not trial.failure for trial in chosen.profile.trials if trial.execution.recorded is recorded)
    assert not without.plan.execution.recorded
    reasons = {trial.failure for trial in without.profile.trials if trial.execution.recorded}
    assert reasons == {"CUDA out of memory. (rank 1)"}
    assert min(loss, same_loss) > 0
