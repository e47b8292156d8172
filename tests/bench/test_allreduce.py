"""The all-reduce benchmark: complete rows that all ranks agree on, chosen on one half and judged on the other."""

import io
import itertools
import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.bench import allreduce as bench
from lockstep.bench.allreduce import Row, measure_allreduce, parse_sizes, run_parent
from lockstep.bench.allreduce_report import build_table, describe_bytes, write_chart
from lockstep.bench.allreduce_rounds import MIN_ROUNDS, Plan, keep_best, list_turns, plan_rounds
from lockstep.bench.virtual import VirtualCluster
from lockstep.comm.allreduce import ALGORITHMS
from lockstep.comm.cost import Choice
from lockstep.comm.topology import Topology
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from tests.ranks import run_ranks

TWO_BY_TWO = Topology(((0, 1), (2, 3)))
SIZES = (1024, 16384, 262144)
NAMES = {"torch", "flat", "hierarchical", "torus", "doubling", "hybrid"}


def measure(world: World) -> tuple[list[Row], list[str]]:
    lines: list[str] = []
    rows = measure_allreduce(world, TWO_BY_TWO, SIZES, rounds=6, budget_s=1, say=lines.append)
    return rows, lines


def measure_a_wrong_sum(world: World) -> str:
    ALGORITHMS["doubling"] = lambda tensor, groups: tensor.add_(1) if tensor.numel() > 1 else None  # type: ignore[assignment,return-value]
    with pytest.raises(LockstepError) as caught:
        measure_allreduce(world, TWO_BY_TWO, SIZES, rounds=6, budget_s=1)
    return str(caught.value)


def make_rows() -> list[dict[str, object]]:
    """Times grow with the size and along the algorithms by name: doubling, flat, hierarchical, hybrid, torch, torus."""
    rows = []
    for size in SIZES:
        for index, name in enumerate(sorted(NAMES)):
            seconds = 1e-6 * (index + 1) * size
            group_size = 16 if name in ("hierarchical", "torus") else 1
            choice = "hierarchical/16" if name == "hybrid" else name
            rows.append(asdict(Row(name, size, seconds, seconds / 10, 1.1 * seconds, group_size, choice, 3, "2x2")))
    return rows


def test_there_is_a_row_for_every_algorithm_and_size_and_all_ranks_agree() -> None:
    answers = run_ranks(measure, 4)
    rows, lines = answers[0]
    assert [answer[0] for answer in answers] == [rows] * 4
    assert sorted((row.algorithm, row.bytes) for row in rows) == sorted(
        (name, size) for name in NAMES for size in SIZES
    )
    for row in rows:
        assert 0 < row.median_s < 5
        assert row.spread_s >= 0
        assert row.predicted_s is not None
        assert row.predicted_s > 0
        assert row.rounds == 3
        assert row.topology == "2x2"
    for size, line in zip(SIZES, [line for line in lines if "ratio" in line], strict=True):
        here = {row.choice: row for row in rows if row.bytes == size and row.algorithm != "hybrid"}
        (hybrid,) = (row for row in rows if row.bytes == size and row.algorithm == "hybrid")
        # Hybrid is one of the others at each size, and never the peer itself.
        assert asdict(hybrid) == asdict(here[hybrid.choice]) | {"algorithm": "hybrid"}
        assert hybrid.choice != "torch"
        assert f"({hybrid.choice})" in line


def test_a_wrong_sum_is_refused_before_it_is_timed() -> None:
    assert set(run_ranks(measure_a_wrong_sum, 4)) == {"doubling summed 256 elements wrongly; please report it."}


def test_the_choice_is_the_quickest_unless_the_backends_own_is_as_quick_within_noise() -> None:
    torch_s, flat, ring = Choice("torch"), Choice("flat"), Choice("torus", 8)
    assert bench._choose({torch_s: [1.0] * 3, flat: [1.0, 9.0, 1.1], ring: [0.5, 4.0, 0.6]}) == ring
    assert bench._choose({torch_s: [0.1] * 3, flat: [1.0] * 3, ring: [0.97] * 3}) == flat
    assert bench._choose({torch_s: [0.1] * 3, flat: [1.0] * 3, ring: [2.0] * 3}) == flat
    # Quicker in the median, but not in every round.
    assert bench._choose({torch_s: [1.0] * 3, flat: [1.0] * 3, ring: [0.5, 0.6, 3.0]}) == flat


def test_each_algorithm_keeps_its_best_group_sizes() -> None:
    seconds = {
        Choice("torch"): 9.0,
        Choice("torus", 2): 3.0,
        Choice("torus", 4): 1.0,
        Choice("torus", 8): 2.0,
        Choice("hierarchical", 2): 5.0,
    }
    assert set(keep_best(seconds, 2)) == seconds.keys() - {Choice("torus", 2)}
    assert set(keep_best(seconds, 1)) == {Choice("torch"), Choice("torus", 4), Choice("hierarchical", 2)}


def test_rounds_of_every_size_are_spread_over_the_whole_time() -> None:
    often, seldom = (Plan(size, {}, [], repeats=1, rounds=rounds) for size, rounds in ((4, 20), (1 << 20, 6)))
    turns = list_turns([often, seldom])
    assert sorted(number for plan, number in turns if plan is often) == list(range(20))
    assert [number for plan, number in turns if plan is seldom] == list(range(6))
    places = [place for place, (plan, _) in enumerate(turns) if plan is seldom]
    gaps = [after - before for before, after in itertools.pairwise([-1, *places, len(turns)])]
    assert max(gaps) <= 6


def test_long_messages_get_the_time_that_short_ones_leave() -> None:
    ours, theirs = Choice("flat"), Choice("torch")
    screened = {1024: {ours: 0.0001, theirs: 0.0002}, 1 << 20: {ours: 0.1, theirs: 0.1}}
    short, long = plan_rounds(screened, rounds=40, budget_s=8.0)
    # 40 rounds of 50 calls each take 0.6 s of the short one's 4 s; 7.4 s are 36 rounds of the long one.
    assert (short.rounds, short.repeats) == (40, 50)
    assert (long.rounds, long.repeats) == (36, 1)
    assert plan_rounds({1 << 20: screened[1 << 20]}, rounds=40, budget_s=0.1)[0].rounds == 2 * MIN_ROUNDS


def test_what_is_judged_is_not_what_was_chosen_by() -> None:
    torch_s, flat, ring = Choice("torch"), Choice("flat"), Choice("torus", 2)

    # The ring is quick in every other round only.
    times = {torch_s: [1.0] * 6, flat: [1.0] * 6, ring: [0.1, 0.9] * 3}
    trial = bench._judge(Plan(16, {}, [torch_s, flat, ring], repeats=1, rounds=6), times)
    assert trial.best == ring
    assert trial.learned[ring] == [0.1] * 3
    (hybrid,) = (row for row in bench._build_rows([trial], TWO_BY_TWO) if row.algorithm == "hybrid")
    assert hybrid.median_s == 0.9
    assert hybrid.predicted_s is None


def test_the_parent_starts_the_ranks_and_they_write_the_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    run_parent(
        nodes=2,
        ranks_per_node=2,
        sizes=[1024, 65536],
        gbit_per_s=1.0,
        rounds=6,
        budget_s=1,
        json_file=file,
    )
    rows = json.loads(file.read_text())
    assert {(row["algorithm"], row["bytes"]) for row in rows} == {(n, s) for n in NAMES for s in (1024, 65536)}
    assert {row["topology"] for row in rows} == {"2x2"}
    said = capfd.readouterr().out
    is_pretended = VirtualCluster.open(1, 1).is_pretended
    assert said.startswith("2 nodes of 2 ranks, " + ("pretended" if is_pretended else "with links of 1 Gbit/s"))
    assert "64 KiB: torch" in said
    assert "All-reduce on 2x2 ranks" in said


def test_requests_that_cannot_be_met_are_a_sentence_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LockstepError, match="at least 2 ranks"):
        run_parent(nodes=1, ranks_per_node=1)
    with pytest.raises(LockstepError, match="rounds are too few"):
        run_parent(nodes=2, ranks_per_node=1, rounds=2)
    with pytest.raises(LockstepError, match="multiples of 4 bytes"):
        run_parent(nodes=2, ranks_per_node=1, sizes=[1022])
    with pytest.raises(LockstepError, match="choose another --json"):
        run_parent(nodes=2, ranks_per_node=1, json_file=tmp_path / "nowhere" / "rows.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LockstepError, match="pip install plotly"):
        run_parent(nodes=2, ranks_per_node=1, html_file=tmp_path / "page.html")


def test_sizes_are_read_with_and_without_units() -> None:
    assert parse_sizes("1KiB, 64kib,4MiB,512") == [1024, 65536, 4 << 20, 512]
    for text in ("", "4 MB", "1.5MiB", "-4", "KiB"):
        with pytest.raises(LockstepError, match="is not a size"):
            parse_sizes(text)


def test_bytes_are_written_in_the_largest_whole_unit() -> None:
    assert [describe_bytes(size) for size in (4, 1024, 1536, 1 << 20)] == ["4 B", "1 KiB", "1536 B", "1 MiB"]


def test_the_table_fits_a_plain_terminal_and_shows_ratios_to_torch() -> None:
    page = io.StringIO()
    Console(width=80, file=page).print(build_table(make_rows()))
    text = page.getvalue()
    assert "…" not in text
    # At every size torch takes 5 units and flat 2.
    assert "2.50×" in text
    assert "hierarchical/16" in text


def test_the_page_needs_nothing_else_and_has_every_number(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_chart(file, make_rows())
    page = file.read_text()
    assert "<script src=" not in page
    for name in NAMES:
        assert f'"{name}"' in page


def test_a_spread_wider_than_its_median_leaves_the_charts_axis_alone(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    rows = make_rows()
    ranges = []
    for file in (tmp_path / "plain.html", tmp_path / "spread.html"):
        write_chart(file, rows)
        found = re.search(r'"range":\[(-?[0-9.]+),(-?[0-9.]+)\]', file.read_text().replace(" ", ""))
        assert found
        ranges.append([float(end) for end in found.groups()])
        rows = [{**row, "spread_s": 3 * row["median_s"]} for row in rows]
    assert ranges[0] == ranges[1]
    medians = [math.log10(1e3 * row["median_s"]) for row in rows]
    assert ranges[0][0] < min(medians) < max(medians) < ranges[0][1]
