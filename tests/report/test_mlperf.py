"""MLPerf's lines against its checker's rules.

The checker itself is not on PyPI. The rules here are written down from its files for training 3.1.0 (common,
closed_common, closed_resnet), and those of LARS from 0.7.0, the last one at hand.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.errors import LockstepError
from lockstep.events import Event
from lockstep.report.mlperf import build_lines
from tests.report.records import ended, epoch_done, evaluated, started, stepped

Line = dict[str, Any]
EXACTLY_ONE = [
    "submission_org",
    "submission_platform",
    "submission_division",
    "submission_status",
    "submission_benchmark",
    "init_stop",
    "run_start",
    "run_stop",
    "train_samples",
    "eval_samples",
    "gradient_accumulation_steps",
    "global_batch_size",
    "opt_name",
    "lars_opt_base_learning_rate",
    "lars_opt_end_learning_rate",
    "lars_opt_learning_rate_decay_poly_power",
    "lars_opt_learning_rate_decay_steps",
    "lars_epsilon",
    "lars_opt_learning_rate_warmup_epochs",
    "lars_opt_momentum",
    "lars_opt_weight_decay",
]
AT_LEAST_ONE = [
    "cache_clear",
    "init_start",
    "block_start",
    "block_stop",
    "epoch_start",
    "epoch_stop",
    "eval_start",
    "eval_stop",
]
CHECKS: dict[str, Callable[[Line], bool]] = {
    "submission_org": lambda line: line["value"] != "",
    "submission_platform": lambda line: line["value"] != "",
    "submission_division": lambda line: line["value"] in ("closed", "open"),
    "submission_status": lambda line: line["value"] in ("cloud", "onprem", "preview", "research"),
    "submission_benchmark": lambda line: line["value"] == "resnet",
    "gradient_accumulation_steps": lambda line: line["value"] > 0,
    "global_batch_size": lambda line: line["value"] > 0,
    "opt_name": lambda line: line["value"] in ("sgd", "lars"),
    "run_stop": lambda line: "status" in line["metadata"],
    "block_start": lambda line: line["metadata"]["epoch_count"] > 0 and "first_epoch_num" in line["metadata"],
    "block_stop": lambda line: "first_epoch_num" in line["metadata"],
    **{
        key: lambda line: "epoch_num" in line["metadata"]
        for key in ("epoch_start", "epoch_stop", "eval_start", "eval_stop", "eval_accuracy")
    },
    **{
        f"lars_opt_{key}": lambda line: line["value"] > 0
        for key in [
            "base_learning_rate",
            "learning_rate_decay_poly_power",
            "learning_rate_decay_steps",
            "learning_rate_warmup_epochs",
            "momentum",
            "weight_decay",
        ]
    },
    "lars_opt_end_learning_rate": lambda line: line["value"] >= 0,
    "lars_epsilon": lambda line: line["value"] >= 0,
}


def find_faults(lines: list[str]) -> list[str]:
    """What the checker would say."""
    rows: list[Line] = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    keys = [row["key"] for row in rows]
    faults = [key for key in EXACTLY_ONE if keys.count(key) != 1]
    faults += [key for key in [*AT_LEAST_ONE, "eval_accuracy"] if key not in keys]
    faults += [row["key"] for row in rows if not CHECKS.get(row["key"], lambda line: True)(row)]
    order = [keys.index(key) for key in ("init_start", "init_stop", "run_start", "block_start", "run_stop")]
    faults += ["order"] if order != sorted(order) else []
    times = {row["key"]: row["time_ms"] for row in reversed(rows)}
    faults += ["init takes longer than 30 minutes"] if times["init_stop"] - times["init_start"] >= 30 * 60e3 else []
    accuracies = [row["value"] for row in rows if row["key"] == "eval_accuracy"]
    faults += ["accuracy"] if not any(0.759 <= value < 1 for value in accuracies) else []
    return faults


def story(top1: float = 0.76, **changes: Any) -> list[Event]:
    optim = {"name": "lars", "lr": 10.0, "schedule": "poly", "warmup": "1ep"} | changes.pop("optim", {})
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


def test_the_checkers_rules_accept_a_run_that_reached_the_accuracy() -> None:
    lines = build_lines(story(), {"MLPERF_SUBMISSION_ORG": "Somebody", "MLPERF_SUBMISSION_DIVISION": "closed"})
    assert find_faults(lines) == []
    assert read(lines, "submission_org")[0]["value"] == "Somebody"
    (stop,) = read(lines, "run_stop")
    assert stop["metadata"]["status"] == "success"
    assert (read(lines, "run_start")[0]["time_ms"], stop["time_ms"]) == (1003500, 1033000)
    assert [row["value"] for row in read(lines, "eval_accuracy")] == [0.5, 0.76]
    assert [row["metadata"]["epoch_num"] for row in read(lines, "epoch_stop")] == [1, 2, 3, 4]
    blocks = [row["metadata"] for row in read(lines, "block_start")]
    assert [(block["first_epoch_num"], block["epoch_count"]) for block in blocks] == [(1, 2.0), (3, 2.0)]
    times = [json.loads(line.removeprefix(":::MLLOG "))["time_ms"] for line in lines]
    assert times == sorted(times)


def test_nothing_is_claimed_that_the_run_has_not_got() -> None:
    missed = build_lines(story(top1=0.7), {})
    assert read(missed, "run_stop")[0]["metadata"]["status"] == "aborted"
    assert find_faults(missed) == ["accuracy"]
    assert read(missed, "cache_clear")[0]["value"] is False  # nobody has said that they were
    assert read(build_lines(story(), {"MLPERF_CACHE_CLEARED": "1"}), "cache_clear")[0]["value"] is True
    for other in (story(model="alexnet"), story(num_classes=10)):
        lines = build_lines(other, {})
        assert read(lines, "run_stop")[0]["metadata"]["status"] == "aborted"
        assert "submission_benchmark" in find_faults(lines)
    cosine = build_lines(story(optim={"schedule": "cosine"}), {})
    assert not read(cosine, "lars_opt_learning_rate_decay_poly_power")


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
    with pytest.raises(LockstepError, match="holds no run"):
        build_lines([], {})
