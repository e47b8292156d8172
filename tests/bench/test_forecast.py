"""Predicted beside measured: the arithmetic on made-up measurements, and a real cluster of two ranks."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.bench import forecast_check
from lockstep.bench.forecast_check import (
    Row,
    build_case_layout,
    describe_errors,
    list_settings,
    parse_shapes,
    predict,
    run,
)
from lockstep.bench.forecast_ranks import Case, Message, Setting, Taking, Turn, read_busy, take_turns
from lockstep.comm.world import join_world
from lockstep.errors import LockstepError
from lockstep.plan.device import BatchTime, SlotReady
from lockstep.plan.plan import Execution
from lockstep.plan.shared_cores import Cores

SMALL = Case("resnet18", width=8, image_size=32, batch=2)


def test_shapes_are_read_and_mistakes_are_sentences() -> None:
    assert parse_shapes("1x2,4x4") == [(1, 2), (4, 4)]
    for text in ("", "2", "0x4", "1x1", "8x9", "axb", "1x2x3"):
        with pytest.raises(LockstepError, match="--shapes"):
            parse_shapes(text)


def test_sent_afterwards_a_step_is_its_computing_and_its_messages() -> None:
    layout = build_case_layout(SMALL)
    slots = tuple(SlotReady(slot.name, slot.numel, 4 * slot.numel, 0.02) for slot in layout.slots)
    alone = BatchTime(2, Execution(), 0.04, 0.01, 0.02, 0.01, 0.0, 0, (), slots)
    whole = 4 * layout.numel
    messages = [Message("flat", 1024, 0.001, 0.001), Message("flat", whole, 0.1, 0.05)]
    parts, messages_s = predict(Setting(1024.0, "flat", False), alone, messages, layout, Cores(8, 2))
    assert messages_s == pytest.approx(0.1)
    assert parts.step_s == pytest.approx(4 * 0.04 + 0.1)
    # All gradients come at the end, so that there is nothing to hide a message under.
    parts, _ = predict(Setting(1024.0, "flat", True), alone, messages, layout, Cores(8, 2))
    assert parts.step_s == pytest.approx(4 * 0.04 + 0.1)


def test_there_are_at_least_twelve_settings_of_ranks_fusion_and_algorithm() -> None:
    settings = {shape: list_settings(*shape) for shape in parse_shapes("1x2,2x2,2x4,4x4")}
    assert sum(map(len, settings.values())) >= 12
    assert {setting.choice for setting in settings[2, 4]} == {"flat", "doubling", "hierarchical/4"}
    assert len(set(settings[4, 4])) == 12


def test_disturbed_turns_are_taken_again_and_the_quietest_count() -> None:
    shares = iter([0.5, 0.9, 0.0, 0.0, 0.4])
    taken: list[str] = []

    def take(side: str) -> Turn:
        taken.append(side)
        others = next(shares) if side == "a" else 0.0
        return Turn(others, 0.0, others)

    with join_world(None) as world:
        turns = take_turns(Taking(world, 2, 5.0), ["a", "b"], take)
    assert taken == ["a", "b", "a", "b", "a", "a"]
    assert [turn.others for turn in turns["a"]] == [0.0, 0.0]
    assert len(turns["b"]) == 2


def test_the_machine_counts_its_work() -> None:
    before = read_busy()
    assert 0 < before <= read_busy()


def test_a_real_cluster_of_two_ranks_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_check, "PROFILES", 1)
    monkeypatch.setattr(forecast_check, "WATCHED_S", 0.1)
    monkeypatch.setattr(forecast_check, "count_cores", lambda: 1)  # for less company
    settings = [Setting(1024.0, "hierarchical/2", False), Setting(0.125, "hierarchical/2", True)]
    monkeypatch.setattr(forecast_check, "list_settings", lambda nodes, ranks: settings)
    file, stream = tmp_path / "rows.json", io.StringIO()
    console = Console(file=stream, width=140)
    rows = run([(1, 2)], case=SMALL, gbit_per_s=1.0, rounds=1, patience_s=0.0, json_file=file, console=console)
    assert len(rows) == 2
    assert [row["setting"] for row in json.loads(file.read_text())] == [row.setting for row in rows]
    for row in rows:
        # How well is for a quiet machine to say; here only that both are times of the same step.
        assert 0.05 < row.predicted_s / row.measured_s < 20
        assert row.predicted_s >= row.compute_s
    assert all(line in stream.getvalue() for line in describe_errors(rows))


def test_errors_are_told_of_all_settings_and_of_quiet_ones() -> None:
    rows = [
        Row(1, 2, "a", 1.0, 0.1, 0.0, 1.1, 0.1, 1.0, 0.1, 0.1),
        Row(1, 2, "b", 1.0, 0.1, 0.5, 0.6, -0.4, 1.0, 0.1, 0.1),
    ]
    whole, quiet = describe_errors(rows)
    assert "2 settings" in whole
    assert "25.0 % on average" in whole
    assert "40.0 % at worst (1x2, b)" in whole
    assert "the 1 of them" in quiet
    assert "10.0 % on average" in quiet
    assert len(describe_errors(rows[:1])) == 1
