"""The kernels' bench: its table, its sum, what it says where it cannot run, and one small run on a GPU."""

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lockstep.bench import norm_passes
from lockstep.bench.norm_launches import build_copy
from lockstep.bench.norm_passes import Row, draw_table, measure_passes, measure_wholes, run_bench, sum_up
from lockstep.bench.norm_shapes import ADD, ADD_NORM, Use
from lockstep.errors import LockstepError

ROW = Row("statistics", 64, 56, count=3, seconds=30e-6, floor_s=20e-6, bytes=100)


def draw(rows: list[Row]) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=200).print(draw_table("", rows))
    return [line.split() for line in text.getvalue().splitlines() if line.strip()]


def test_a_row_has_its_floor_and_how_far_it_is_from_it() -> None:
    assert draw([ROW])[-1] == ["statistics", "64", "×", "56", "×", "56", "3", "30.0", "20.0", "1.50"]


def test_the_compilers_time_stands_beside_ours_where_there_is_one() -> None:
    rows = draw([replace(ROW, compiled_s=45e-6), ROW])
    assert rows[1][-5:] == ["30.0", "20.0", "1.50", "45.0", "1.50"]
    assert rows[2][-3:] == ["30.0", "20.0", "1.50"]
    assert "compiled" in rows[0]
    assert "compiled" not in draw([ROW])[0]


def test_the_sum_counts_every_occurrence() -> None:
    rows = [replace(ROW, seconds=1e-3, floor_s=0.5e-3, compiled_s=2e-3, count=3), replace(ROW, count=1, compiled_s=0.0)]
    assert "ours 3.03 ms, the bytes alone 1.52 ms, compiled 6.00 ms (1.98x ours)." in sum_up(rows)
    assert "compiled" not in sum_up([*rows, ROW])  # one is missing


def test_json_has_the_promised_fields() -> None:
    assert list(ROW.to_json()) == ["pass", "channels", "side", "count", "seconds", "floor_s", "bytes", "compiled_s"]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LockstepError, match="needs a GPU with Triton"):
        run_bench("resnet50", batch=2)


def test_a_model_it_does_not_know_is_one_sentence() -> None:
    with pytest.raises(LockstepError, match="--model vgg is unknown; choose alexnet or resnet18"):
        run_bench("vgg", batch=2)


class FakeGraph:
    """A recording that was made and does nothing more."""

    def pool(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls on the CPU, each of them once; every recording of three copies takes three seconds."""
    pytest.importorskip("triton")
    cpu = torch.device("cpu")
    monkeypatch.setattr(norm_passes, "_build_copies", lambda use: [build_copy(use, cpu, torch.float32)] * 3)
    monkeypatch.setattr(norm_passes, "measure_cold", lambda launches: 2.0 * len([launch() for launch in launches]) / 3)
    monkeypatch.setattr(norm_passes, "warm_up", lambda call: call())
    monkeypatch.setattr(norm_passes, "record", lambda call, pool=None: (FakeGraph(), call()))
    monkeypatch.setattr(norm_passes, "measure_replay", lambda replay: 3.0)


USES = Counter(
    {
        Use(ADD, 1, 4, 3, num_gradients=2): 5,
        Use(ADD, 1, 4, 3): 1,
        Use(ADD_NORM, 1, 4, 3, num_gradients=2): 2,
    }
)


@pytest.mark.usefixtures("without_gpu")
def test_a_pass_that_several_norms_have_is_measured_once_and_counted_for_all() -> None:
    rows = list(measure_passes(USES, 1000.0, Console(quiet=True)))
    assert {row.name: row.count for row in rows} == {
        "statistics": 5 + 1 + 2 * 2,
        "normalise, add, ReLU": 6,
        "normalise both, add, ReLU": 2,
        "gradient sums, masked gradient written, two gradients": 5,
        "gradient sums, masked gradient written": 1,
        "both gradient sums, masked gradient written, two gradients": 2,
        "input gradient": 5 + 1,
        "both input gradients": 2,
    }
    assert len(rows) == 8
    assert all(row.seconds == 2.0 and row.floor_s == row.bytes / 1000 for row in rows)


@pytest.mark.usefixtures("without_gpu")
def test_whole_norms_have_a_forward_and_a_backward_of_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    rows = list(measure_wholes(USES, 1000.0, True, Console(quiet=True)))
    assert [(row.name, row.count) for row in rows] == [
        (f"{kind}, {way}", count) for kind, count in ((ADD, 6), (ADD_NORM, 2)) for way in ("forward", "backward")
    ]
    size = 2 * 4 * 3 * 3
    assert [row.bytes // size for row in rows] == [4, 7, 5, 10]
    assert all(row.seconds == row.compiled_s == 1.0 for row in rows)


@pytest.mark.usefixtures("without_gpu")
def test_a_compiler_that_fails_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler [here]")

    monkeypatch.setattr(torch, "compile", fail)
    console = Console(record=True, width=200, file=io.StringIO())
    rows = list(measure_wholes(Counter({Use(ADD, 1, 4, 3): 1}), 1000.0, True, console))
    assert [row.compiled_s for row in rows] == [None, None]
    assert "left out: compiled norm + shortcut + ReLU, 4 × 3 × 3: no compiler [here]" in console.export_text()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns of what could be quicker
def test_a_small_run_gives_every_pass_and_every_norm(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    rows = run_bench("alexnet", batch=2, json_file=file)
    assert json.loads(file.read_text()) == [row.to_json() for row in rows]
    wholes = [row for row in rows if row.name.endswith((", forward", ", backward"))]
    assert len(wholes) == 2 * 4
    assert len(rows) - len(wholes) == 3 * 3 + 4
    assert all(row.seconds > 0 and row.floor_s > 0 for row in rows)
    assert all(row.compiled_s and row.compiled_s > 0 for row in wholes)
