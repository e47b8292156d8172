"""MLPerf's lines, judged by MLPerf's own compliance checker (package mlperf-logging) where it is installed."""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.errors import LockstepError
from lockstep.events import Event
from lockstep.recipes.read import load_recipe
from lockstep.report.mlperf import build_lines
from lockstep.report.sinks import parse_viewers
from tests.report.records import ended, epoch_done, evaluated, started, stepped

Line = dict[str, Any]
CLOSED = {"MLPERF_SUBMISSION_ORG": "Somebody", "MLPERF_SUBMISSION_DIVISION": "closed"}
needs_checker = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_logging") is None, reason="mlperf-logging is not installed"
)
in_both_rounds = pytest.mark.parametrize("round_", ["3.1.0", "4.0.0"])  # the last two that have the benchmark resnet


def find_faults(lines: list[str], round_: str, folder: Path) -> list[str]:
    """What the checker refuses, warnings too: the key of a rule, or the rule's whole text where it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its source, where nobody has compiled it yet
        from mlperf_logging.compliance_checker import mlp_compliance

    file = folder / "lines.log"
    file.write_text("".join(f"{line}\n" for line in lines))
    checker = mlp_compliance.make_checker("training", round_, quiet=False, werror=True)
    is_valid, *_ = mlp_compliance.main(str(file), f"training_{round_}/common.yaml", checker)
    faults = [*checker.overwritable, *checker.not_overwritable]
    assert is_valid == (not faults)
    return faults


def story(top1: float = 0.76, **changes: Any) -> list[Event]:
    optim = {"name": "lars", "lr": 10.0, "schedule": "poly", "end_lr": 1e-4, "warmup": "1ep"} | changes.pop("optim", {})
    config = RunConfig(
        model=ModelConfig(name=changes.pop("model", "resnet50")),
        optim=OptimConfig.model_validate(optim),
        train=TrainConfig(global_batch=32, duration="4ep", **changes.pop("train", {})),  # type: ignore[arg-type]
    )
    return [
        started(config=config.model_dump(mode="json"), **({"num_classes": 1000} | changes)),
        stepped(1, 1004.0),
        epoch_done(0, 1010.0),
        epoch_done(1, 1015.0),
        evaluated(20, 1018.0, 0.5),
        epoch_done(2, 1023.0),
        epoch_done(3, 1028.0),
        evaluated(40, 1031.0, top1),
        ended(40, 1033.0, 33.0),
    ]


def read(lines: list[str], key: str) -> list[Line]:
    return [row for line in lines if (row := json.loads(line.removeprefix(":::MLLOG ")))["key"] == key]


@needs_checker
@in_both_rounds
def test_the_checker_takes_a_run_that_reached_the_accuracy(round_: str, tmp_path: Path) -> None:
    assert find_faults(build_lines(story(), CLOSED), round_, tmp_path) == []
    sgd = {"name": "sgd", "lr": 3.2, "weight_decay": 5e-5}
    assert find_faults(build_lines(story(optim=sgd), CLOSED), round_, tmp_path) == []
    # The recipe that has MLPerf's settings, had it been run to the end.
    _, config = load_recipe("resnet50-64k")
    whole = story()
    whole[0] = started(config=config.model_dump(mode="json"), num_classes=1000)
    assert find_faults(build_lines(whole, CLOSED), round_, tmp_path) == []


@needs_checker
@in_both_rounds
def test_the_checker_refuses_in_the_closed_division_what_the_run_has_not_got(round_: str, tmp_path: Path) -> None:
    (fault,) = find_faults(build_lines(story(top1=0.7589), CLOSED), round_, tmp_path)
    assert "eval_accuracy" in fault
    assert "0.7590" in fault
    others = {"end_lr": 0.0, "power": 1.0, "epsilon": 1e-9, "weight_decay": 3e-5}
    assert set(find_faults(build_lines(story(optim=others), CLOSED), round_, tmp_path)) == {
        "lars_opt_end_learning_rate",
        "lars_opt_learning_rate_decay_poly_power",
        "lars_epsilon",
        "lars_opt_weight_decay",
    }
    cosine = build_lines(story(optim={"schedule": "cosine"}), CLOSED)
    assert set(find_faults(cosine, round_, tmp_path)) == {
        "lars_opt_end_learning_rate",
        "lars_opt_learning_rate_decay_poly_power",
        "lars_opt_learning_rate_decay_steps",
    }
    lines = build_lines(story(), CLOSED)
    assert find_faults([line for line in lines if '"seed"' not in line], round_, tmp_path) == []  # nobody asks for it
    assert find_faults([line for line in lines if '"run_stop"' not in line], round_, tmp_path) == ["run_stop"]


@needs_checker
@in_both_rounds
def test_the_checker_takes_any_network_in_the_open_division(round_: str, tmp_path: Path) -> None:
    lamb = {"name": "lamb", "schedule": "cosine"}
    for events in (story(top1=0.3), story(model="alexnet"), story(optim=lamb)):
        assert find_faults(build_lines(events, {}), round_, tmp_path) == []
    ten_classes = build_lines(story(num_classes=10), {"MLPERF_SUBMISSION_BENCHMARK": "resnet"})
    assert find_faults(ten_classes, round_, tmp_path) == []
    assert read(ten_classes, "run_stop")[0]["metadata"]["status"] == "aborted"
    # Evaluated twice without training in between: no block of no epochs.
    again = story()
    again.insert(-1, evaluated(40, 1032.5, 0.77))
    assert find_faults(build_lines(again, CLOSED), round_, tmp_path) == []


def test_every_line_has_the_time_of_its_event() -> None:
    lines = build_lines(story(), CLOSED)
    assert read(lines, "submission_org")[0]["value"] == "Somebody"
    assert read(lines, "submission_platform")[0]["value"] == "2 x test CPU"
    (stop,) = read(lines, "run_stop")
    assert stop["metadata"]["status"] == "success"
    assert (read(lines, "run_start")[0]["time_ms"], stop["time_ms"]) == (1003500, 1033000)
    assert [row["value"] for row in read(lines, "eval_accuracy")] == [0.5, 0.76]
    blocks = [row["metadata"] for row in read(lines, "block_start")]
    assert [(block["first_epoch_num"], block["epoch_count"]) for block in blocks] == [(1, 2), (3, 2)]
    rows = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert [row["time_ms"] for row in rows] == sorted(row["time_ms"] for row in rows)
    # The second evaluation's two seconds belong to no epoch.
    begun = next(place for place, row in enumerate(rows) if row["key"] == "run_start")
    assert [(row["key"], row["time_ms"] - 1_000_000) for row in rows[begun:]] == [
        ("run_start", 3500),
        ("block_start", 3500),
        ("epoch_start", 3500),
        ("epoch_stop", 10000),
        ("epoch_start", 10000),
        ("epoch_stop", 15000),
        ("block_stop", 16000),
        ("eval_start", 16000),
        ("eval_accuracy", 18000),
        ("eval_stop", 18000),
        ("block_start", 18000),
        ("epoch_start", 18000),
        ("epoch_stop", 23000),
        ("epoch_start", 23000),
        ("epoch_stop", 28000),
        ("block_stop", 29000),
        ("eval_start", 29000),
        ("eval_accuracy", 31000),
        ("eval_stop", 31000),
        ("run_stop", 33000),
    ]


def test_an_evaluation_in_mid_epoch_is_a_part_of_that_epoch() -> None:
    whole = story()
    lines = build_lines([*whole[:2], evaluated(5, 1008.0, 0.1), *whole[2:]], {})
    first = read(lines, "epoch_start")[0], read(lines, "epoch_stop")[0]
    assert [row["time_ms"] for row in first] == [1003500, 1010000]
    blocks = [row["metadata"] for row in read(lines, "block_start")]
    assert [(block["first_epoch_num"], block["epoch_count"]) for block in blocks] == [(1, 0.5), (1, 1.5), (3, 2)]


def test_nothing_is_claimed_that_the_run_has_not_got() -> None:
    def tell(events: list[Event], environment: dict[str, str]) -> tuple[str, str]:
        lines = build_lines(events, environment)
        return read(lines, "submission_benchmark")[0]["value"], read(lines, "run_stop")[0]["metadata"]["status"]

    said = {"MLPERF_SUBMISSION_BENCHMARK": "resnet"}
    assert tell(story(), CLOSED) == ("resnet", "success")
    assert tell(story(top1=0.7), CLOSED) == ("resnet", "aborted")
    assert tell(story(model="alexnet"), {}) == ("resnet", "success")  # the open division leaves the network free
    assert tell(story(model="alexnet"), CLOSED | said) == ("alexnet", "aborted")
    assert tell(story(num_classes=10), {}) == ("resnet50", "aborted")
    assert tell(story(num_classes=10), CLOSED | said) == ("resnet50", "aborted")
    lines = build_lines(story(), {})
    assert read(lines, "cache_clear")[0]["value"] is False  # nobody has said that they were
    assert read(build_lines(story(), {"MLPERF_CACHE_CLEARED": "1"}), "cache_clear")[0]["value"] is True


@pytest.mark.parametrize("name", ["DIVISION", "STATUS"])
def test_what_the_checker_cannot_take_is_a_sentence_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = rf"MLPERF_SUBMISSION_{name} = 'Closed' must be one of (open, closed|cloud, onprem, preview, research)\."
    with pytest.raises(LockstepError, match=sentence):
        build_lines(story(), {f"MLPERF_SUBMISSION_{name}": "Closed"})
    monkeypatch.setenv(f"MLPERF_SUBMISSION_{name}", "Closed")
    with pytest.raises(LockstepError, match=sentence):
        parse_viewers("mlperf")
    assert parse_viewers("") == []


def test_passes_are_told_by_whichever_setting_makes_them() -> None:
    for train, passes in (({}, 1), ({"max_batch_per_rank": 3}, 6), ({"accumulate": 5}, 5)):
        (line,) = read(build_lines(story(world_size=2, train=train), {}), "gradient_accumulation_steps")
        assert line["value"] == passes


def test_a_rule_without_momentum_names_none() -> None:
    for name in ("lamb", "adamw"):
        lines = build_lines(story(optim={"name": name}), {})
        assert read(lines, "opt_name")[0]["value"] == name
        assert not read(lines, f"{name}_opt_momentum")


def test_what_was_lost_and_done_again_is_told_once() -> None:
    whole = story()
    again = started(time_s=1019.0, config=whole[0].config, num_classes=1000, start_step=10)  # type: ignore[attr-defined]
    events = [*whole[:5], again, epoch_done(1, 1022.0), evaluated(20, 1024.0, 0.6), *whole[5:]]
    lines = build_lines(events, {})
    assert [row["value"] for row in read(lines, "eval_accuracy")] == [0.6, 0.76]
    assert [row["metadata"]["epoch_num"] for row in read(lines, "epoch_stop")] == [1, 2, 3, 4]


def test_a_log_without_a_run_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match=r"holds no run, .*; name a run's folder"):
        build_lines([], {})
