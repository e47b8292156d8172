"""The step's benchmark: both sides do the same work, and a row says what was measured."""

import inspect
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.bench import step as bench
from lockstep.bench.step import Case, Row, append_row, describe_row, measure_case
from lockstep.comm.world import World
from tests.engine import commands
from tests.ranks import run_ranks

TINY = Case("tiny", width=4, image_size=32, batch=8)


def measure(world: World) -> Row:
    torch.set_num_threads(1)  # two busy cores and two threads wait for each other
    return measure_case(TINY, world, rounds=3, round_s=0.005)


@pytest.mark.parametrize(("size", "peer"), [(1, "bare loop"), (2, "DDP")])
def test_a_measured_row_makes_sense_and_survives_its_file(tmp_path: Path, size: int, peer: str) -> None:
    rows = run_ranks(measure, size)
    row = rows[0]
    assert (row.case, row.ranks, row.peer, row.rounds) == ("tiny", size, peer, 3)
    assert 0 < row.peer_s < 60
    assert 0 < row.lockstep_s < 60
    assert 0.01 < row.ratio < 100  # a busy machine may stop either side for a while
    assert row.spread >= 0
    assert {(other.peer_setting, other.lockstep_setting) for other in rows} == {
        (row.peer_setting, row.lockstep_setting)
    }
    assert f"ratio {row.ratio:.3f}" in describe_row(row)
    file = tmp_path / "rows.json"
    append_row(file, row)
    append_row(file, rows[-1])
    assert [Row(**values) for values in json.loads(file.read_text())] == [row, rows[-1]]
    assert json.loads(file.read_text())[0] == asdict(row)


def train_every_candidate(world: World) -> dict[str, dict[str, Tensor]]:
    """The weights each candidate reaches in three steps; the closures hold the networks."""
    torch.set_num_threads(1)
    batch = bench._fake_batch(TINY, world)
    peers = (
        bench._build_ddp_steps(TINY, world, batch) if world.size > 1 else bench._build_bare_steps(TINY, world, batch)
    )
    weights = {}
    for name, step in (peers | bench._build_lockstep_steps(TINY, world, batch)).items():
        for _ in range(3):
            step()
        held = inspect.getclosurevars(step).nonlocals
        model: nn.Module = held["parts"].model if "parts" in held else getattr(held["model"], "module", held["model"])
        weights[name] = {key: value.detach().clone() for key, value in model.named_parameters()}
    return weights


@pytest.mark.parametrize(("size", "num_candidates"), [(1, 2), (2, 5)])
def test_every_candidate_trains_the_same_network_to_the_same_weights(size: int, num_candidates: int) -> None:
    weights = run_ranks(train_every_candidate, size)[0]
    assert len(weights) == num_candidates
    expected = next(iter(weights.values()))
    for name, found in weights.items():
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_too_few_rounds_or_ranks_are_refused_before_measuring() -> None:
    for option in ("--rounds=1", "--nodes=0"):
        status, out, err = commands.run("bench", "step", option)
        assert status == 2
        assert "Traceback" not in out + err
        assert option.split("=")[0] in err


def test_a_json_file_that_cannot_be_written_is_a_sentence_before_measuring(tmp_path: Path) -> None:
    status, out, err = commands.run("bench", "step", f"--json={tmp_path / 'nowhere' / 'rows.json'}")
    assert status == 1
    assert "Traceback" not in out + err
    assert "choose another --json" in err
