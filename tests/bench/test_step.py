"""The step's benchmark: all sides do the same work, rows say what was measured, and memory decides who is in it."""

import inspect
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lockstep.bench import cases, ddp
from lockstep.bench import step as bench
from lockstep.bench.cases import (
    Case,
    Lockstep,
    Opener,
    Step,
    build_network,
    count_gradient_bytes,
    fake_batch,
    model_case,
    open_bare,
    open_ddp,
    size_case,
)
from lockstep.bench.step import Row, fit_together, measure_case, read_available_bytes, run_parent, take_turns
from lockstep.bench.step_report import build_tables, write_chart
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from tests.engine import commands
from tests.ranks import run_ranks, world_of_one

TINY = Case("tiny", width=4, image_size=32, batch=8)


def measure(world: World, free_bytes: float) -> tuple[list[Row], list[str]]:
    torch.set_num_threads(1)  # two busy cores and two threads wait for each other
    bench.TUNE_S = cases.TUNE_S = 0.5  # type: ignore[misc]
    ddp.CAPS_MB = (1, 25)
    bench.read_available_bytes = lambda: free_bytes  # type: ignore[assignment,misc]
    lines: list[str] = []
    return measure_case(TINY, world, rounds=3, round_s=0.005, say=lines.append), lines


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
    assert f"{len(sides)} sides take 3 turns each, {'all' if free_bytes > 1e9 else 'one'} in memory" in "\n".join(lines)
    for row in rows:
        assert (row.case, row.ranks, row.rounds) == ("tiny", size, 3)
        assert 0 < row.median_s < 60
        assert 0.01 < row.ratio < 100  # a busy machine may stop any side for a while
        assert min(row.spread_s, row.ratio_spread) >= 0
    assert rows[-1].ratio == 1
    assert {tuple(row.setting for row in other) for other, _ in answers} == {tuple(row.setting for row in rows)}


def train_every_side(world: World) -> dict[str, dict[str, Tensor]]:
    """The weights each side reaches in three steps; the closures hold the networks."""
    torch.set_num_threads(1)
    cases.TUNE_S = 0.5
    batch = fake_batch(TINY, world)
    openers: dict[str, Opener] = {"lockstep": Lockstep(TINY, world, batch).open}
    if world.size == 1:
        openers["bare"] = partial(open_bare, TINY, world, batch)
    else:
        for setting in [ddp.DEFAULT, *ddp.list_settings()]:
            openers[str(setting)] = partial(open_ddp, TINY, world, batch, setting)
    weights = {}
    for name, opener in openers.items():
        with opener() as step:
            for _ in range(3):
                step()
            held = inspect.getclosurevars(step).nonlocals
            model: nn.Module = held["parts"].model if "parts" in held else held["model"]
            model = getattr(model, "module", model)
            weights[name] = {key: value.detach().clone() for key, value in model.named_parameters()}
    return weights


@pytest.mark.parametrize("size", [1, 2])
def test_every_side_trains_the_same_network_to_the_same_weights(size: int) -> None:
    weights = run_ranks(train_every_side, size)[0]
    assert len(weights) == (2 if size == 1 else 2 + len(ddp.list_settings()))
    expected = weights["lockstep"]
    for name, found in weights.items():
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


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


def test_the_first_bucket_is_as_before_once_ddp_is_built() -> None:
    before = getattr(torch.distributed, ddp.FIRST_BUCKET)
    with ddp._first_bucket(7):
        assert getattr(torch.distributed, ddp.FIRST_BUCKET) == 7 << 20
    assert getattr(torch.distributed, ddp.FIRST_BUCKET) == before


def test_sides_take_turns_and_only_one_is_open_where_memory_is_short() -> None:
    log: list[str] = []

    @contextmanager
    def open_side(name: str) -> Iterator[Step]:
        log.append(f"open {name}")
        yield lambda: log.append(name)
        log.append(f"close {name}")

    openers: dict[str, Opener] = {name: partial(open_side, name) for name in "ab"}
    times = take_turns(openers, world_of_one(), rounds=2, round_s=0, together=False)
    turns = [entry for entry, before in zip(log, ["", *log], strict=False) if entry != before]
    assert turns == 2 * ["open a", "a", "close a", "open b", "b", "close b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    log.clear()
    take_turns(openers, world_of_one(), rounds=2, round_s=0, together=True)
    turns = [entry for entry, before in zip(log, ["", *log], strict=False) if entry != before]
    assert turns == ["open a", "open b", *2 * ["a", "b"], "close b", "close a"]


def test_a_budget_ends_the_turns_but_not_before_the_least() -> None:
    @contextmanager
    def open_side() -> Iterator[Step]:
        yield lambda: None

    times = take_turns({"a": open_side}, world_of_one(), rounds=9, round_s=0, together=True, budget_s=0, min_rounds=4)
    assert len(times["a"]) == 4


def test_sides_fit_together_up_to_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_available_bytes", lambda: 600.0)
    assert fit_together(world_of_one(), 10, 10)  # 10 sides × 3 arrays × 10 bytes
    assert not fit_together(world_of_one(), 11, 10)


def test_a_side_that_does_not_fit_alone_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_available_bytes", lambda: 1e9)
    with pytest.raises(LockstepError, match=r"1 ranks need more than 3.0 GB .* of which 1.0 GB are free"):
        fit_together(world_of_one(), 1, int(1e9))


def test_free_memory_is_read_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24000 kB\nMemFree:        100 kB\nMemAvailable:   20000 kB\n")
    assert read_available_bytes(file) == 20000 * 1024
    assert read_available_bytes(tmp_path / "nowhere") == float("inf")


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


def test_the_chart_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "page.html"
    write_chart(file, make_rows())
    page = file.read_text()
    assert "<script src=" not in page
    for name in ("ddp default", "ddp tuned", "lockstep"):
        assert f'"{name}"' in page


def test_too_few_rounds_or_ranks_are_refused_before_measuring() -> None:
    for option in ("--rounds=1", "--nodes=0", "--against=horovod"):
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
