"""The convex benchmark: its formulas against autograd, its optimum, and that a few bits stop where they should."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn import functional

from lockstep.bench.low_precision import Case, Problem, find_optimum, run_bench, run_centred, run_fixed
from lockstep.bench.low_precision_report import build_table, describe_goal, find_factor
from lockstep.data.generated import build_generated

DECAY = 0.2


@pytest.fixture(scope="module")
def problem() -> Problem:
    images = torch.randn(60, 3, 2, 2, generator=torch.Generator().manual_seed(0)) / 12**0.5
    return Problem(images, torch.arange(60) % 3, 3, DECAY, 10)


def test_gradient_and_optimum_are_those_of_autograd(problem: Problem) -> None:
    optimum = find_optimum(problem)
    for weights in (torch.linspace(-1, 1, 39, dtype=torch.float64).view(13, 3), optimum):
        w = weights.clone().requires_grad_()
        (functional.cross_entropy(problem.features @ w, problem.labels) + DECAY / 2 * w.square().sum()).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(problem.gradient(weights), w.grad)
    assert problem.gradient(optimum).norm() < 1e-12
    assert problem.loss(optimum) < problem.loss(problem.start())


def test_a_fixed_grid_is_a_floor_and_a_shrinking_one_is_none(problem: Problem) -> None:
    grid = 1.25 * find_optimum(problem).abs().max().item() / 127
    fixed = run_fixed(problem, "LP-SVRG", 2.0, 8, grid, 10, True)
    centred = run_centred(problem, 2.0, 8, DECAY, 10)
    assert min(fixed.norms) > 1e-5
    assert centred.norms[-1] < 1e-9
    assert find_factor(vars(fixed)) > 0.5 > find_factor(vars(centred))
    assert describe_goal(vars(fixed)) == "never"
    assert 0 < float(describe_goal(vars(centred))) < 30


def test_the_command_leaves_a_row_for_each_side_and_a_chart(tmp_path: Path) -> None:
    data = build_generated(tmp_path, 40, 10)
    out = io.StringIO()
    rows = run_bench(
        Case(data, image_size=4, samples=30, weight_decay=0.1, batch=10, lr=0.5, anchors=3, mu=0.0),
        tmp_path / "rows.json",
        tmp_path / "chart.html",
        Console(file=out, width=200),
    )
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    assert len(rows) == 11
    assert all(row["norms"][-1] < row["norms"][0] for row in rows)
    by_name = {(row["name"], row["arithmetic"]): row["norms"] for row in rows}
    # The engine's steps are the paper's, on the same samples.
    for name in ("SVRG", "HALP, 8 bits", "HALP, 16 bits"):
        ours = by_name[name, "FP32, Lockstep"]
        assert ours == pytest.approx(by_name[name, "FP64"], rel=0.5)
    assert by_name["SVRG", "FP32, Lockstep"] == pytest.approx(by_name["SVRG", "FP64"], rel=1e-3)
    # A grid that is fine beside the gradients' noise leaves SGD's own floor.
    assert by_name["LP-SGD, 16 bits", "FP64"] == pytest.approx(by_name["SGD", "FP64"], rel=0.02)
    assert "LP-SVRG, 16 bits" in out.getvalue()
    page = (tmp_path / "chart.html").read_text()
    assert len(page) < 2_200_000
    assert page.count('"type":"scatter"') == len(rows)
    table = page[page.index('id="measured-table"') :]
    assert table[: table.index("</table>")].count("<tr>") == 1 + len(rows)
    assert "never SGD (FP64), LP-SGD with 8 bits (FP64)" in page


def test_no_number_of_the_table_is_cut_off_in_80_columns() -> None:
    row = {"name": "LP-SVRG, 16 bits", "arithmetic": "FP32, Lockstep", "lr": 0.03, "seconds": 1234.0}
    out = io.StringIO()
    rows = [{**row, "passes": [0.0, 15.0, 30.0], "norms": [9.3e-2, 1e-5, 4.5e-17]}]
    Console(file=out, width=80).print(build_table(rows))
    told = out.getvalue()
    assert "…" not in told
    assert all(number in told for number in ("9.3e-02", "4.5e-17", "0.03", "1234"))
