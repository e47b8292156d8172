"""A run's state to disk and back, on the same and on other rank counts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor, Ledger, plan_step
from lockstep.data.pipeline import Batch
from lockstep.engine import checkpoint, state_files
from lockstep.engine import state as state_module
from lockstep.engine.build import Parts, assemble, build_network
from lockstep.engine.state import Changing, State, list_changing, load_state, put_back, sum_ledger
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.optim.loss_scale import SKIPPED
from lockstep.optim.schedule import Schedule
from lockstep.optim.storage import copy_to_host
from tests.engine.saving import save_state
from tests.engine.small import small_config
from tests.ranks import run_ranks, world_of_one

NUM_SAMPLES, GLOBAL_BATCH, EPOCH, NUM_STEPS = 103, 28, 4, 2
FIRST_SCALE = 2.0**24  # under which gradients overflow for a few steps
Arrays = dict[str, Tensor]

ORDER = {"seed": 5, "num_samples": 130}


def build_parts(
    world: World, *, optim: str = "lamb", width: int = 4, norm: bool = True, average: float = 0.0, compute: str = "fp32"
) -> Parts:
    config = RunConfig.model_validate(
        {
            "optim": {"name": optim, "lr": 0.1, "average": average},
            "precision": {"compute": compute} | ({"initial_scale": FIRST_SCALE} if compute == "fp16" else {}),
            "train": {"global_batch": GLOBAL_BATCH, "duration": "9ep"},
        }
    )
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width) if norm else nn.Identity(), nn.Flatten(), nn.Linear(width, 2)
    )
    return assemble(config, world, model, Schedule("constant", 0.1, total_steps=9))


def collect(parts: Parts) -> Arrays:
    """Copies of everything that must survive; parameters under the model's own names."""
    arrays = {name: value.detach().clone() for name, value in parts.model.state_dict().items()}
    return arrays | {f"rule {name}": array.clone() for name, array in parts.rule.state().items()}


def scramble(world: World, parts: Parts) -> None:
    """Numbers no fresh run has: the same on every rank, but for the statistics, which ranks average on saving."""
    generator = torch.Generator().manual_seed(5)
    for parameter in parts.model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for array in parts.rule.state().values():
        for slot in parts.layout.slots:
            array[slot.offset : slot.end] = torch.randn(slot.numel, generator=generator)
    for buffer in parts.model.buffers():
        buffer.fill_(world.rank + 1 if buffer.is_floating_point() else 17)
    parts.rule.count.fill_(12)


def run_half_an_epoch(world: World) -> State:
    """Where a run stands after two of an epoch's four steps, each rank with its own part of the ledger."""
    state = State(step=18, cursor=Cursor(EPOCH, 0))
    for _ in range(NUM_STEPS):
        plan = plan_step(state.cursor, NUM_SAMPLES, GLOBAL_BATCH, world.rank, world.size, seed=3)
        state.ledger.add(plan.epoch, plan.samples)
        state.cursor = plan.next
    return state


def samples_taken() -> np.ndarray:
    """What the whole world has taken of the epoch, as one rank alone would."""
    plans = [
        plan_step(Cursor(EPOCH, step * GLOBAL_BATCH), NUM_SAMPLES, GLOBAL_BATCH, 0, 1, seed=3)
        for step in range(NUM_STEPS)
    ]
    return np.concatenate([plan.samples for plan in plans])


def save(world: World, folder: Path) -> tuple[Arrays, bool]:
    parts = build_parts(world)
    scramble(world, parts)
    saved = save_state(folder, run_half_an_epoch(world), parts, world, ORDER, keep=1)
    return collect(parts), saved is not None


def save_and_count_copies(world: World, folder: Path) -> int:
    """How many arrays this rank has copied for a checkpoint."""
    copied: list[str] = []

    def copy(arrays: Arrays) -> Arrays:
        copied.extend(arrays)
        return copy_to_host(arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "copy_to_host", copy)
        save_state(folder, State(step=1), build_parts(world), world, ORDER, keep=1)
    return len(copied)


def test_only_the_rank_that_writes_copies_arrays(tmp_path: Path) -> None:
    first, second = run_ranks(save_and_count_copies, 2, tmp_path)
    assert first > second == 0


@pytest.mark.gpu
def test_a_gpu_needs_no_room_for_a_second_copy_of_its_arrays(tmp_path: Path) -> None:
    world, config = world_of_one(), small_config("fp16", optim={"average": 0.9})
    parts = assemble(config, world, build_network(config, 10), Schedule("constant", 0.1, total_steps=1))
    save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    save_state(tmp_path, State(step=2), parts, world, ORDER, keep=1)
    assert torch.cuda.max_memory_allocated() - before < parts.weights.nbytes / 2


def load(world: World, folder: Path) -> tuple[Arrays, State, int, int, Ledger]:
    parts = build_parts(world)
    state, wrote = load_state(folder, parts, world, ORDER, pytest.fail)
    return collect(parts), state, wrote.world_size, int(parts.rule.count), sum_ledger(state.ledger, world)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Arrays, bool]]]:
    """A checkpoint of two ranks, and what each rank held when it was written."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(save, 2, folder)


def test_only_the_first_rank_writes_and_each_keeps_its_own_statistics(
    saved: tuple[Path, list[tuple[Arrays, bool]]],
) -> None:
    (first, first_wrote), (second, second_wrote) = saved[1]
    assert (first_wrote, second_wrote) == (True, False)
    assert torch.equal(first["1.running_mean"], torch.full((4,), 1.0))
    assert torch.equal(second["1.running_mean"], torch.full((4,), 2.0))


def test_the_network_on_disk_has_the_average_of_the_statistics(saved: tuple[Path, list[tuple[Arrays, bool]]]) -> None:
    network = load_file(saved[0] / "step-00000018" / "model.safetensors")
    assert torch.equal(network["1.running_mean"], torch.full((4,), 1.5))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_of_any_count_gets_what_was_saved(saved: tuple[Path, list[tuple[Arrays, bool]]], size: int) -> None:
    """As many ranks get their own statistics back, others their average."""
    folder, [(expected, _), _] = saved
    for rank, (arrays, state, wrote, rule_steps, _) in enumerate(run_ranks(load, size, folder)):
        assert arrays.keys() == expected.keys()
        for name, value in expected.items():
            own = torch.full((4,), rank + 1.0 if size == 2 else 1.5) if "running" in name else value
            assert torch.equal(arrays[name], own), name
        assert (state.step, state.cursor) == (18, Cursor(EPOCH, NUM_STEPS * GLOBAL_BATCH))
        assert (wrote, rule_steps) == (2, 12)


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's manifest and seal it again."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest | {"seal": checkpoint._seal(manifest)}))


def forget_ranks(path: Path) -> None:
    """Make the checkpoint one of the version before, that held no rank's own statistics."""
    (path / "statistics.safetensors").unlink()
    rewrite_manifest(path, lambda manifest: manifest["sha256"].pop("statistics.safetensors"))


def test_a_checkpoint_without_the_ranks_own_statistics_still_loads(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    forget_ranks(tmp_path / "step-00000018")
    for arrays, *_ in run_ranks(load, 2, tmp_path):
        assert torch.equal(arrays["1.running_mean"], torch.full((4,), 1.5))


@pytest.mark.parametrize("size", [1, 3])
def test_the_ledger_of_a_half_done_epoch_is_restored_once_over_all_ranks(
    saved: tuple[Path, list[tuple[Arrays, bool]]], size: int
) -> None:
    samples = samples_taken()
    assert len(set(samples.tolist())) == NUM_STEPS * GLOBAL_BATCH
    expected = Ledger()
    for sample in samples:
        expected.add(EPOCH, np.array([sample]))
    results = run_ranks(load, size, saved[0])
    assert [total for *_, total in results] == [expected] * size
    assert [state.ledger for _, state, *_ in results] == [expected] + [Ledger()] * (size - 1)


def load_and_complain(world: World, folder: Path, settings: dict[str, object]) -> str:
    heard: list[str] = []
    try:
        load_state(folder, build_parts(world, **settings), world, ORDER, heard.append)  # type: ignore[arg-type]
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("optim", ["sgd", "lars"])
def test_the_state_of_another_rule_is_a_sentence(saved: tuple[Path, list[tuple[Arrays, bool]]], optim: str) -> None:
    sentence = load_and_complain(world_of_one(), saved[0], {"optim": optim})
    assert "optimiser state of lamb" in sentence
    assert f"uses {optim}" in sentence
    assert "optim.name=lamb" in sentence


def test_moments_of_lamb_are_not_taken_for_those_of_adamw(tmp_path: Path) -> None:
    """Both keep the same two arrays, but at a rate that differs by the trust ratio."""
    world = world_of_one()
    save_state(tmp_path, State(step=1), build_parts(world, optim="adamw"), world, ORDER, keep=1)
    assert load_and_complain(world, tmp_path, {"optim": "adamw"}) == ""
    assert "optim.name=adamw" in load_and_complain(world, tmp_path, {"optim": "lamb"})


def test_momentum_of_sgd_is_not_taken_for_that_of_lars(tmp_path: Path) -> None:
    """Both keep one array of the same name, but LARS multiplies by the learning rate first."""
    world = world_of_one()
    save_state(tmp_path, State(step=1), build_parts(world, optim="sgd"), world, ORDER, keep=1)
    assert "optim.name=sgd" in load_and_complain(world, tmp_path, {"optim": "lars"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"width": 6}, "has shape"), ({"norm": False}, "The model has no parameter '1.bias'")],
)
def test_the_weights_of_another_model_are_a_sentence(
    saved: tuple[Path, list[tuple[Arrays, bool]]], settings: dict[str, object], words: str
) -> None:
    assert words in load_and_complain(world_of_one(), saved[0], settings)


def test_a_model_with_more_statistics_than_the_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    world = world_of_one()
    parts = build_parts(world)
    save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)
    parts.model.register_buffer("extra", torch.zeros(3))
    with pytest.raises(LockstepError, match="does not fit this model: extra is missing"):
        load_state(tmp_path, parts, world, ORDER, pytest.fail)


def test_every_rank_hears_why_nothing_could_be_loaded(tmp_path: Path) -> None:
    first, second = run_ranks(load_and_complain, 2, tmp_path, {})
    assert "There is no checkpoint under" in first
    assert first == second


@pytest.mark.parametrize("change", [{"seed": 6}, {"num_samples": 131}])
def test_another_data_order_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    world = world_of_one()
    parts = build_parts(world)
    save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)
    (name,) = change
    with pytest.raises(LockstepError, match=f"written with {name} = {ORDER[name]}, this run has {change[name]}"):
        load_state(tmp_path, parts, world, ORDER | change, pytest.fail)


def spoil(world: World, where: str, rank: int, folder: Path) -> str:
    parts = build_parts(world)
    save_state(folder, State(step=1), parts, world, ORDER, keep=1)
    arrays = {"weights": parts.weights, **parts.rule.state(), "statistics": parts.model.get_buffer("1.running_var")}
    if world.rank == rank:
        arrays[where][1] = float("nan")
    try:
        save_state(folder, State(step=2), parts, world, ORDER, keep=1)
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("where", "name"), [("weights", "weights"), ("statistics", "batch-norm statistics")])
def test_arrays_that_are_not_finite_replace_no_checkpoint(tmp_path: Path, where: str, name: str) -> None:
    sentence = spoil(world_of_one(), where, 0, tmp_path)
    assert f"After step 2 the {name} are no longer finite" in sentence
    assert f"the last good checkpoint, {tmp_path / 'step-00000001'}, with --resume" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_optimiser_array_that_is_not_finite_is_named(tmp_path: Path) -> None:
    kind = next(iter(build_parts(world_of_one()).rule.state()))
    assert f"the {kind} are no longer finite" in spoil(world_of_one(), kind, 0, tmp_path)


@pytest.mark.parametrize("where", ["weights", "statistics"])
def test_all_ranks_end_alike_whoever_holds_what_is_not_finite(tmp_path: Path, where: str) -> None:
    sentences = run_ranks(spoil, 2, where, 1, tmp_path)
    assert all("are no longer finite" in sentence for sentence in sentences)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def draw_batch(world: World, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(GLOBAL_BATCH, 3, 3, 3, generator=generator)[world.rank :: world.size]
    labels = torch.arange(len(images)) % 2
    return Batch(images, labels, GLOBAL_BATCH, 0, np.arange(len(images)), Cursor())


def train_on(world: World, parts: Parts, first: int, last: int) -> dict[str, Tensor]:
    """Take steps; everything that lasts beyond them, by group and name."""
    for seed in range(first, last):
        train_step(parts, draw_batch(world, seed), 0.1)
    groups = vars(list_changing(parts))
    return {f"{group} {name}": array.clone() for group, arrays in groups.items() for name, array in arrays.items()}


def write_of_old(folder: Path, parts: Parts) -> None:
    """Give the checkpoint the very state that a manifest of the version before had."""
    loss_scale = parts.loss_scale.state.tolist() if parts.loss_scale else None
    old = {
        "step": 18,
        "cursor": {"epoch": 1, "position": 0},
        "ledger": {"value": f"{0:016x}", "count": 0},
        "rule": "lamb",
        "rule_steps": int(parts.rule.count),
        "loss_scale": loss_scale,
        "world_size": 2,
        "order": ORDER,
    }
    rewrite_manifest(folder / "step-00000018", lambda manifest: manifest.update(state=old))


def save_and_train(world: World, folder: Path, compute: str, is_old: bool) -> tuple[Arrays, Arrays]:
    """What was saved, by a manifest of the version before if asked, and what seven steps more make of it."""
    parts = build_parts(world, average=0.7, compute=compute)
    before = train_on(world, parts, 0, 11)
    save_state(folder, State(step=18, cursor=Cursor(1, 0)), parts, world, ORDER, keep=1)
    if is_old and world.is_first:
        write_of_old(folder, parts)
    return before, train_on(world, parts, 11, 18)


def load_and_train(world: World, folder: Path, compute: str) -> tuple[Arrays, Arrays]:
    parts = build_parts(world, average=0.7, compute=compute)
    load_state(folder, parts, world, ORDER, pytest.fail)
    return train_on(world, parts, 0, 0), train_on(world, parts, 11, 18)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_all_that_lasts_beyond_a_step_goes_on_to_the_last_bit(tmp_path: Path, compute: str, is_old: bool) -> None:
    """On as many ranks; a manifest of the version before said nothing of where gradients overflowed."""
    whole = run_ranks(save_and_train, 2, tmp_path, compute, is_old)
    resumed = run_ranks(load_and_train, 2, tmp_path, compute)
    unknown = {"counters overflows", "counters firsts"} if is_old else set()
    for expected, found in zip(whole, resumed, strict=True):
        for before, after in zip(expected, found, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before.keys() - unknown)
        assert {"over_layout average", "averaged 1.running_mean", "counters rule_steps"} <= found[0].keys()
        assert not torch.equal(expected[0]["over_layout weights"], expected[1]["over_layout weights"])
        if compute == "fp16":
            assert expected[0]["counters loss_scale"][SKIPPED] > 0
            assert 0 < expected[0]["counters rule_steps"] < 11
            assert expected[0]["counters overflows"].sum() > 0


def test_the_manifest_names_counters_as_it_always_did(tmp_path: Path) -> None:
    """Versions before this one read these two, and nothing else that is counted."""
    world = world_of_one()
    parts = build_parts(world, compute="fp16")
    parts.rule.count.fill_(12)
    saved = save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)
    assert saved
    state = json.loads((saved.path / "manifest.json").read_text())["state"]
    assert (state["rule_steps"], type(state["rule_steps"])) == (12, int)
    assert state["loss_scale"] == [FIRST_SCALE, 0.0, 0.0, 0.0]


def count_more(parts: Parts, counters: Arrays) -> Callable[[Parts], Changing]:
    """`list_changing` with counters added, which a step of these parts might change."""

    def list_more(asked: Parts) -> Changing:
        changing = list_changing(asked)
        return replace(changing, counters=changing.counters | counters) if asked is parts else changing

    return list_more


def build_counters(value: float) -> Arrays:
    return {
        "laps": torch.tensor(value),
        "share": torch.tensor(value / 3, dtype=torch.float64),
        "large": torch.tensor(value * 2.0**99),
        "table": torch.arange(6).view(2, 3) * int(value) - 2**40,
        "flags": torch.tensor([int(value), 255], dtype=torch.uint8),
    }


def save_counters(world: World, folder: Path) -> None:
    parts = build_parts(world)
    state_module.list_changing = count_more(parts, build_counters(7))
    save_state(folder, State(step=1), parts, world, ORDER, keep=1)


def load_counters(world: World, folder: Path) -> Arrays:
    parts, counters = build_parts(world), build_counters(0)
    state_module.list_changing = count_more(parts, counters)
    load_state(folder, parts, world, ORDER, pytest.fail)
    return counters


@pytest.mark.parametrize("size", [1, 2])
def test_a_counter_that_is_added_to_the_list_survives_a_checkpoint_on_every_rank(tmp_path: Path, size: int) -> None:
    run_ranks(save_counters, 2, tmp_path)
    for counters in run_ranks(load_counters, size, tmp_path):
        for name, expected in build_counters(7).items():
            assert counters[name].dtype == expected.dtype
            assert torch.equal(counters[name], expected), name


def test_a_counter_that_is_added_to_the_list_is_put_back_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, counters = build_parts(world_of_one()), build_counters(7)
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, counters))
    with put_back(parts):
        for array in counters.values():
            array.zero_()
    assert all(torch.equal(counters[name], value) for name, value in build_counters(7).items())


def test_a_counter_that_a_checkpoint_lacks_stays_as_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of_one()
    parts, counters = build_parts(world), build_counters(7)
    save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, counters))
    load_state(tmp_path, parts, world, ORDER, pytest.fail)
    assert all(torch.equal(counters[name], value) for name, value in build_counters(7).items())


def test_a_counter_by_the_name_of_something_else_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, parts = world_of_one(), build_parts(world_of_one())
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, {"step": torch.tensor(3.0)}))
    with pytest.raises(TypeError, match="step"):
        save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)


def test_a_counter_that_is_not_finite_replaces_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, parts = world_of_one(), build_parts(world_of_one())
    counters = {"laps": torch.tensor(float("inf"), dtype=torch.float64)}
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, counters))
    with pytest.raises(LockstepError, match="the laps are no longer finite"):
        save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("laps", "7"),
        ("laps", float("nan")),
        ("laps", 10**39),
        ("laps", {"a": 1}),
        ("table", [1, 2, 3, 4, 5, 6.5]),
        ("table", [0] * 5 + [2**63]),
        ("flags", [1, 256]),
        ("flags", [True, 0]),
        ("flags", [[1, 2]]),
    ],
)
def test_counters_that_cannot_be_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    world, parts = world_of_one(), build_parts(world_of_one())
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, build_counters(7)))
    save_state(tmp_path, State(step=5, cursor=Cursor(1, 0)), parts, world, ORDER, keep=2)
    save_state(tmp_path, State(step=10, cursor=Cursor(2, 0)), parts, world, ORDER, keep=2)
    rewrite_manifest(tmp_path / "step-00000010", lambda manifest: manifest["state"].update({name: value}))
    heard: list[str] = []
    state, _ = load_state(tmp_path, parts, world, ORDER, heard.append)
    assert state.step == 5
    assert f"its manifest says nothing possible of {name}" in heard[0]


@pytest.mark.parametrize(("rule_steps", "is_taken"), [(10, True), (260, True), (261, False), (10**15, False)])
def test_a_rule_takes_no_more_steps_than_there_were_samples(tmp_path: Path, rule_steps: int, is_taken: bool) -> None:
    """260 samples in two epochs: a run that began with batches of one and went on with larger ones took 260 steps."""
    world, parts = world_of_one(), build_parts(world_of_one())
    order = ORDER | {"global_batch": 26}
    for epoch in (1, 2):
        save_state(tmp_path, State(step=epoch * 5, cursor=Cursor(epoch, 0)), parts, world, order, keep=2)
    path = tmp_path / "step-00000010"
    rewrite_manifest(path, lambda manifest: manifest["state"].update({"rule_steps": rule_steps}))
    heard: list[str] = []
    state, _ = load_state(tmp_path, parts, world, order, heard.append)
    assert state.step == (10 if is_taken else 5)
    assert is_taken or "its rule has taken more steps than there were samples" in heard[0]


def test_another_number_of_counters_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, parts = world_of_one(), build_parts(world_of_one())
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, {"laps": torch.zeros(3)}))
    save_state(tmp_path, State(step=1), parts, world, ORDER, keep=1)
    monkeypatch.setattr(state_module, "list_changing", count_more(parts, {"laps": torch.zeros(2)}))
    with pytest.raises(LockstepError, match="has 3 numbers of laps and this run 2"):
        load_state(tmp_path, parts, world, ORDER, pytest.fail)
