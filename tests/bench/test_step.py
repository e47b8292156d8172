"""The step's benchmark: all sides do the same work, rows say what was measured, and memory decides who is in it."""

import contextlib
import inspect
import io
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from typer.testing import CliRunner

from lockstep.bench import cases, ddp, step_memory
from lockstep.bench import step as bench
from lockstep.bench.cases import (
    Case,
    Lockstep,
    Opener,
    Precision,
    Step,
    build_config,
    build_network,
    count_gradient_bytes,
    fake_batch,
    model_case,
    open_bare,
    open_ddp,
    size_case,
)
from lockstep.bench.commands import bench as bench_commands
from lockstep.bench.step import (
    Row,
    Wanted,
    choose_device,
    measure_case,
    run_parent,
    take_turns,
)
from lockstep.bench.step_report import build_tables, write_chart
from lockstep.comm.world import World
from lockstep.config import PrecisionConfig
from lockstep.engine.build import set_number_formats
from lockstep.errors import LockstepError
from lockstep.optim.storage import named_arrays
from tests.engine import commands
from tests.ranks import Backend, over_nccl, run_ranks, world_of_one

TINY = Case("tiny", width=4, image_size=32, batch=8)
TINY_HALF = replace(TINY, precision="fp16")


def run_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that is done at once."""
    return graph.forward


def measure(world: World, free_bytes: float, case: Case = TINY) -> tuple[list[Row], list[str]]:
    torch.set_num_threads(1)  # two busy cores and two threads wait for each other
    ddp.build_backend = lambda setting: run_graph  # type: ignore[assignment]
    bench.TUNE_S = cases.TUNE_S = 0.5  # type: ignore[misc]
    ddp.CAPS_MB = (1, 25)
    step_memory.read_available_bytes = lambda: free_bytes  # type: ignore[assignment,misc]
    lines: list[str] = []
    noted: list[list[Row]] = []
    rows = measure_case(case, world, rounds=3, round_s=0.005, say=lines.append, note=noted.append)
    assert [[row.rounds for row in so_far] for so_far in noted] == [[2] * len(rows), [3] * len(rows)]
    assert noted[-1] == rows
    return rows, lines


@pytest.mark.parametrize(
    ("size", "free_bytes", "sides"),
    [
        (1, 1e12, ["bare loop", "lockstep"]),
        (2, 1e12, ["ddp default", "ddp tuned", "lockstep"]),
        (2, 4e6, ["ddp default", "ddp tuned", "lockstep"]),
    ],
)
def test_every_side_gets_a_row_that_all_ranks_agree_on(size: int, free_bytes: float, sides: list[str]) -> None:
    answers = run_ranks(measure, size, free_bytes)
    rows, lines = answers[0]
    assert [row.side for row in rows] == sides
    num_kept = f"{len(sides)} of them" if free_bytes > 1e9 else "none"
    assert f"{len(sides)} sides take 3 turns each, {num_kept} kept in memory" in lines
    for row in rows:
        assert (row.case, row.ranks, row.rounds) == ("tiny", size, 3)
        assert 0 < row.median_s < 60
        assert 0.01 < row.ratio < 100  # a busy machine may stop any side for a while
        assert min(row.spread_s, row.ratio_spread) >= 0
        assert row.images_per_second == pytest.approx(8 * size / row.median_s)
        assert (row.precision, row.batch) == ("fp32", 8)
    assert rows[-1].ratio == 1
    assert {tuple(row.setting for row in other) for other, _ in answers} == {tuple(row.setting for row in rows)}


def measure_where_recordings_are_too_large(world: World) -> tuple[list[Row], list[str]]:
    def keep(sides: Sequence[str], recorded: Container[str], *_: Any) -> tuple[str, ...]:
        return tuple(side for side in sides if side not in recorded)

    bench.choose_kept = keep  # type: ignore[assignment]
    return measure(world, 1e12, TINY_HALF)


@pytest.mark.gpu
@pytest.mark.parametrize("is_short", [False, True])
def test_on_gpus_ddp_takes_part_compiled_as_well(is_short: bool) -> None:
    how: Any = (measure_where_recordings_are_too_large, 2) if is_short else (measure, 2, 1e12, TINY_HALF)
    answers = run_ranks(*how, backend="nccl", timeout_s=240)
    rows, lines = answers[0]
    # The recording that overlaps, and what it has to beat: either half of it alone.
    own = ["lockstep", "lockstep, launched", "lockstep, sent after"]
    sides = ["ddp default", "ddp tuned", "ddp tuned compiled", *own]
    assert [row.side for row in rows] == sides, lines
    assert {row.precision for row in rows} == {"fp16"}
    assert {f"{side} was ready after" for side in sides} <= {line.rsplit(" ", 2)[0] for line in lines}
    assert {tuple(row.setting for row in other) for other, _ in answers} == {tuple(row.setting for row in rows)}


def train_every_side(world: World, case: Case) -> dict[str, dict[str, Tensor]]:
    """The weights each side reaches in three steps; the closures hold the networks."""
    torch.set_num_threads(1)
    set_number_formats(PrecisionConfig(compute=case.precision))
    cases.TUNE_S = 0.5
    ddp.build_backend = lambda setting: run_graph  # type: ignore[assignment]
    batch = fake_batch(case, world)
    openers: dict[str, Opener] = {"lockstep": Lockstep(case, world, batch).open}
    if world.size == 1:
        openers["bare"] = partial(open_bare, case, world, batch)
    else:
        halved = [ddp.Setting(1, 1, is_half=True)] if case.precision == "fp16" else []
        for setting in [ddp.DEFAULT, *ddp.list_settings(), *halved]:
            openers[str(setting)] = partial(open_ddp, case, world, batch, setting)
        openers["compiled"] = partial(open_ddp, case, world, batch, ddp.DEFAULT, compiled=True)
    weights = {}
    for name, opener in openers.items():
        with opener() as step:
            for _ in range(3):
                step()
            held = inspect.getclosurevars(step).nonlocals
            if "parts" in held:  # in half precision the model holds rounded weights
                weights[name] = named_arrays(held["parts"].weights.clone(), held["parts"].layout)
                continue
            model: nn.Module = getattr(held["model"], "module", held["model"])
            weights[name] = {key: value.detach().clone() for key, value in model.named_parameters()}
    return weights


@pytest.mark.parametrize(("backend", "size"), [("gloo", 1), ("gloo", 2), over_nccl(2)])
def test_every_side_trains_the_same_network_to_the_same_weights(backend: Backend, size: int) -> None:
    weights = run_ranks(train_every_side, size, TINY, backend=backend)[0]
    assert len(weights) == (2 if size == 1 else 3 + len(ddp.list_settings()))
    expected = weights["lockstep"]
    rtol, atol = (1e-4, 1e-6) if backend == "gloo" else (1e-3, 1e-5)
    for name, found in weights.items():
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("backend", "precision"), [("gloo", "bf16"), over_nccl("bf16"), over_nccl("fp16")])
def test_every_side_trains_in_half_precision_as_far_as_it_reaches(backend: Backend, precision: Precision) -> None:
    """All sides move the same way, and each farther than half precision can lead it astray."""
    start = dict(build_network(TINY, torch.device("cpu")).named_parameters())
    weights = run_ranks(train_every_side, 2, replace(TINY, precision=precision), backend=backend)[0]
    moves = {
        name: torch.cat([(found[key].float() - value).flatten() for key, value in start.items()]).detach()
        for name, found in weights.items()
    }
    for name, move in moves.items():
        assert move.norm() > 0
        assert torch.cosine_similarity(move, moves["lockstep"], dim=0) > 0.98, name


def read_bucket_sizes(world: World) -> dict[ddp.Setting, list[int]]:
    """DDP's buckets under each setting, in bytes, as they are after a few steps."""
    case = size_case(4)
    batch = fake_batch(case, world)
    sizes = {}
    for setting in [ddp.DEFAULT, *ddp.list_settings()]:
        model = ddp.wrap(build_network(case, world.device), setting)
        for _ in range(3):
            model(batch.images).sum().backward()
        sizes[setting] = [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]
    return sizes


def test_settings_reach_ddp() -> None:
    most = (1 << 20) + 2**18  # DDP closes a bucket after the gradient that fills it
    for setting, buckets in run_ranks(read_bucket_sizes, 2)[0].items():
        if setting.cap_mb == 1:
            assert len(buckets) > 3
            assert max(buckets) < most
        elif setting.first_mb == 1:
            assert len(buckets) == 2
            assert min(buckets) < most < max(buckets)
        else:
            assert len(buckets) == 1


def count_graphs(world: World) -> dict[ddp.Setting, int]:
    """How many pieces the compiler gets of a network under each setting, all of them alive."""
    case = size_case(4)
    batch = fake_batch(case, world)
    counts = {}
    with contextlib.ExitStack() as stack:
        for setting in (ddp.Setting(1, 1), ddp.Setting(100, 100), ddp.Setting(1, 1, is_view=True)):
            compiler = stack.enter_context(patch("torch._inductor.compile_fx.compile_fx", side_effect=run_graph))
            step = stack.enter_context(open_ddp(case, world, batch, setting, compiled=True))
            for _ in range(2):
                step()
            counts[setting] = compiler.call_count
    return counts


def test_each_setting_is_compiled_for_itself() -> None:
    small, large, view = run_ranks(count_graphs, 2)[0].values()
    assert 0 < large < small == view


def fail_on_one_rank(world: World, are_kept: bool) -> tuple[list[str], list[str]]:
    lines: list[str] = []

    @contextmanager
    def open_side(fails: bool) -> Iterator[Step]:
        if fails and world.rank == 1:
            raise RuntimeError("no C++ compiler was found\nmore of it")
        yield world.barrier

    openers: dict[str, Opener] = {"good": partial(open_side, False), "bad": partial(open_side, True)}
    times = take_turns(openers, world, rounds=2, round_s=0, kept=list(openers) if are_kept else [], say=lines.append)
    return list(times), lines


@pytest.mark.parametrize("are_kept", [True, False])
def test_a_side_that_fails_on_one_rank_is_left_out_on_all(are_kept: bool) -> None:
    for names, lines in run_ranks(fail_on_one_rank, 2, are_kept):
        assert names == ["good"]
        left_out = [line for line in lines if "left out" in line]
        assert left_out == ["bad was left out, because it failed on 1 of 2 ranks: no C++ compiler was found"]


def test_the_first_bucket_is_as_before_once_ddp_is_built() -> None:
    before = getattr(torch.distributed, ddp.FIRST_BUCKET)
    with ddp._first_bucket(7):
        assert getattr(torch.distributed, ddp.FIRST_BUCKET) == 7 << 20
    assert getattr(torch.distributed, ddp.FIRST_BUCKET) == before


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ("", 2 * ["open a", "a", "close a", "open b", "b", "close b"]),
        ("a", ["open a", *2 * ["a", "open b", "b", "close b"], "close a"]),
        ("ab", ["open a", "open b", *2 * ["a", "b"], "close b", "close a"]),
    ],
)
def test_sides_take_turns_and_those_that_are_not_kept_are_open_for_theirs_alone(kept: str, expected: list[str]) -> None:
    log: list[str] = []

    @contextmanager
    def open_side(name: str) -> Iterator[Step]:
        log.append(f"open {name}")
        yield lambda: log.append(name)
        log.append(f"close {name}")

    openers: dict[str, Opener] = {name: partial(open_side, name) for name in "ab"}
    times = take_turns(openers, world_of_one(), rounds=2, round_s=0, kept=list(kept))
    turns = [entry for entry, before in zip(log, ["", *log], strict=False) if entry != before]
    assert turns == expected
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_a_budget_ends_the_turns_but_not_before_the_least() -> None:
    @contextmanager
    def open_side() -> Iterator[Step]:
        yield lambda: None

    times = take_turns({"a": open_side}, world_of_one(), rounds=9, round_s=0, kept=["a"], budget_s=0, min_rounds=4)
    assert len(times["a"]) == 4


def test_sized_cases_have_about_the_gradients_asked_for() -> None:
    for mega_bytes in (1, 4, 25):
        assert count_gradient_bytes(size_case(mega_bytes)) == pytest.approx(mega_bytes * 1e6, rel=0.1)
    assert count_gradient_bytes(model_case("resnet50")) == 25_557_032 * 4


def make_rows() -> list[dict[str, object]]:
    sides = {"ddp default": 0.3, "ddp tuned": 0.2, "lockstep": 0.1}
    return [
        asdict(
            Row(
                case, 32, side, f"setting of {side}", seconds, 0.01, seconds / 0.1, 0.05, 8, 4_000_000, "fp32", 2, 640.0
            )
        )
        for case in ("1 MB", "4 MB")
        for side, seconds in sides.items()
    ]


def test_the_tables_fit_a_plain_terminal_and_show_ratios() -> None:
    page = io.StringIO()
    Console(width=80, file=page).print(*build_tables(make_rows()), sep="\n")
    text = page.getvalue()
    assert "…" not in text
    assert text.count("3.00×") == text.count("2.00×") == 2
    assert "4 MB, 32 ranks" in text


def test_the_page_needs_nothing_else_and_has_every_number(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_chart(file, make_rows())
    page = file.read_text()
    assert "<script src=" not in page
    for name in ("ddp default", "ddp tuned", "lockstep"):
        assert f'"{name}"' in page
        assert f"<td>setting of {name}</td>" in page
    assert "ddp default 300\N{NO-BREAK SPACE}ms (3.00 ×); ddp tuned 200\N{NO-BREAK SPACE}ms (2.00 ×)" in page
    assert "width=device-width" in page  # or a phone shows a corner of it
    for text in re.findall(r'id="case-\d-says">(.*?)<', page):
        assert text.endswith("lockstep 100\N{NO-BREAK SPACE}ms.")


def test_too_few_rounds_or_ranks_are_refused_before_measuring() -> None:
    for option in ("--rounds=1", "--nodes=0", "--against=horovod", "--ranks=0", "--device=tpu", "--precision=fp8"):
        status, out, err = commands.run("bench", "step", option)
        assert status == 2
        assert "Traceback" not in out + err
        assert option.split("=")[0] in err


def test_what_cannot_be_measured_is_a_sentence_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="choose another --json"):
        run_parent(nodes=1, ranks_per_node=2, json_file=tmp_path / "nowhere" / "rows.json")
    with pytest.raises(LockstepError, match="DDP needs at least 2 ranks"):
        run_parent(nodes=1, ranks_per_node=1)
    with pytest.raises(LockstepError, match="give one of them"):
        run_parent(nodes=1, ranks_per_node=2, model="resnet50", gradient_mb=4)
    with pytest.raises(LockstepError, match="no model 'resnet51'"):
        run_parent(nodes=1, ranks_per_node=2, model="resnet51")
    with pytest.raises(LockstepError, match="--device cuda needs a GPU"):
        run_parent(nodes=1, ranks_per_node=2, device="cuda")
    with pytest.raises(LockstepError, match="--precision fp16 is measured on a GPU"):
        run_parent(nodes=1, ranks_per_node=2, precision="fp16")
    with pytest.raises(LockstepError, match="name it with --model"):
        run_parent(nodes=1, ranks_per_node=2, batch=64)


@pytest.mark.parametrize("option", ["--nodes=2", "--html=x.html", "--round-s=0.3", "--ranks=2", "--no-compile"])
def test_an_option_that_has_no_effect_beside_torchvision_is_a_sentence(option: str) -> None:
    result = CliRunner().invoke(bench_commands, ["step", "--against=torchvision", option])
    assert isinstance(result.exception, LockstepError)
    name = "--compile" if option == "--no-compile" else option.partition("=")[0]
    assert str(result.exception) == f"{name} has no effect with --against torchvision; leave it out."


def test_torchvisions_peers_are_not_asked_for_elsewhere() -> None:
    result = CliRunner().invoke(bench_commands, ["step", "--against=bare", "--peers=fp32"])
    assert isinstance(result.exception, LockstepError)
    assert str(result.exception).startswith("--peers has no effect with --against bare")


def test_ranks_of_this_machine_and_of_several_nodes_are_not_asked_for_together() -> None:
    status, out, err = commands.run("bench", "step", "--ranks=2", "--nodes=2")
    assert status == 1
    assert "Traceback" not in out + err
    assert "--ranks are those of this machine alone" in err


@pytest.mark.parametrize(
    ("asked", "nodes", "num_gpus", "chosen"),
    [
        ("auto", 1, 0, "cpu"),
        ("auto", 1, 2, "cuda"),
        ("auto", 4, 2, "cpu"),
        ("cpu", 1, 2, "cpu"),
        ("cuda", 1, 1, "cuda"),
    ],
)
def test_ranks_stand_on_gpus_where_there_are_some(asked: Any, nodes: int, num_gpus: int, chosen: str) -> None:
    assert choose_device(asked, nodes, num_gpus) == chosen


def test_several_nodes_on_gpus_are_a_sentence() -> None:
    with pytest.raises(LockstepError, match="measured on one node"):
        choose_device("cuda", 2, 1)


def test_a_gpu_trains_a_whole_network_in_half_precision_unless_told_otherwise() -> None:
    (usual,) = Wanted(device="cuda").list_cases()
    assert (usual.model, usual.batch, usual.image_size, usual.precision) == ("resnet50", 256, 224, "fp16")
    (told,) = Wanted(device="cuda", model="resnet18", batch=32, image_size=128, precision="bf16").list_cases()
    assert (told.model, told.batch, told.image_size, told.precision) == ("resnet18", 32, 128, "bf16")
    (sized,) = Wanted(device="cuda", gradient_mb=4).list_cases()
    assert (sized.model, sized.precision) == ("stack", "fp16")


def test_our_side_is_asked_for_the_case_in_one_pass() -> None:
    case = Case("wide", width=32, image_size=288, batch=512, model="resnet34", precision="bf16")
    config = build_config(case, 1024)
    assert (config.model.name, config.model.width, config.data.image_size) == ("resnet34", 32, 288)
    assert (config.precision.compute, config.train.global_batch) == ("bf16", 1024)
    assert config.train.max_batch_per_rank >= 512
