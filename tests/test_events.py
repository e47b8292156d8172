"""Records through their file and back, and what a torn line or a full disk does."""

import json
import math
import os
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.events import (
    KINDS,
    MAX_LOG_BYTES,
    AnchorTaken,
    CheckpointSaved,
    EpochDone,
    Evaluated,
    Event,
    EventLog,
    InputChosen,
    LayersMeasured,
    MistakesFound,
    Notice,
    PlanChosen,
    RunEnded,
    RunPredicted,
    RunStarted,
    StartedUp,
    StepDone,
    TimelineTaken,
    encode,
    read_events,
)

EVENTS: list[Event] = [
    RunStarted(
        time_s=1.0,
        run="quickstart-1",
        recipe="quickstart",
        config={"optim": {"lr": 0.1}},
        world_size=2,
        device="cpu",
        num_train=64,
        num_val=32,
        num_classes=10,
        num_parameters=1234,
        steps_total=20,
        steps_per_epoch=10,
        start_step=0,
        versions={"torch": "2"},
        machine={"processor": "a CPU", "cores": "2 of 64"},
    ),
    PlanChosen(
        time_s=1.5,
        source="measured",
        seconds=2.0,
        topology="1x2",
        backend="gloo",
        batch=64,
        execution="own kernels, recorded",
        reduction="1 buffer after the backward pass (by flat)",
        plan={"execution": {"kernels": "own"}},
        trials=[{"execution": "own kernels, recorded", "seconds": None, "failure": "no memory", "chosen": False}],
    ),
    InputChosen(
        time_s=1.7,
        decoder="both",
        threads=4,
        read_processes=2,
        prefetch_batches=3,
        threads_help=False,
        is_resident=False,
        images_per_second=None,
        text="Input: nvJPEG.",
    ),
    StepDone(
        time_s=2.0,
        step=10,
        epoch=1.0,
        loss=2.5,
        top1=0.25,
        lr=0.1,
        images_per_second=100.0,
        input_s=0.01,
        compute_s=0.08,
        comm_s=0.01,
        step_s=0.1,
        loss_scale=1024.0,
        skipped=1,
        noise_scale=300.0,
    ),
    LayersMeasured(time_s=2.2, step=10, weight_norms=[1.0, 2.0], gradient_norms=[0.1, 0.2], trust_ratios=[0.01, 0.02]),
    TimelineTaken(
        time_s=2.4,
        rank=1,
        first_step=8,
        num_steps=1,
        seconds=0.1,
        spans=[{"lane": "step", "name": "forward", "step": 8, "start_s": 0.0, "end_s": 0.1}],
    ),
    StartedUp(seconds={"ranks meet": 0.5, "first step": 1.5}),
    AnchorTaken(step=4, samples=130, seconds=0.5, loss=2.3, gradient_norm=0.4, scale=1e-3, ledger="00ff00ff00ff00ff"),
    AnchorTaken(
        step=8,
        samples=130,
        seconds=0.5,
        loss=2.3,
        gradient_norm=0.4,
        scale=1e-3,
        ledger="00ff00ff00ff00ff",
        share_at_end=0.25,
        share_at_zero=0.125,
    ),
    EpochDone(time_s=3.0, epoch=0, ledger="00ff", ledger_ok=True, bad_samples=1),
    Evaluated(
        time_s=4.0, step=10, epoch=1.0, top1=0.5, top5=0.75, correct1=16, correct5=24, total=32, loss=1.5, seconds=0.5
    ),
    MistakesFound(
        time_s=4.5,
        step=10,
        confusion=[[0, 1, 5]],
        worst=[{"name": "a.jpg", "label": 0, "predicted": 1, "confidence": 0.9, "jpeg": "/9j/"}],
    ),
    CheckpointSaved(time_s=5.0, step=10, path="checkpoints/step-10", bytes=4096, seconds=0.1),
    Notice(time_s=6.0, level="warning", text="résumé – a bad sample", rank=1),
    RunPredicted(
        time_s=6.5,
        steps=20,
        images=64.0,
        world_size=2,
        input_s=0.0,
        forward_s=0.03,
        backward_s=0.05,
        update_s=None,
        compute_s=0.08,
        slowest_s=0.005,
        communicate_s=0.015,
        step_s=0.1,
        messages_s=0.04,
        images_per_second=640.0,
        speed_one_rank=400.0,
        efficiency=0.8,
        train_s=2.0,
        trial_s=0.11,
        input_rate=900.0,
        memory_bytes=10**9,
        sources={"computing": "measured before step 0"},
        assumptions=["messages under the backward pass take nothing from it"],
    ),
    RunEnded(
        time_s=7.0,
        status="finished",
        step=20,
        epoch=2.0,
        wall_s=6.0,
        train_s=2.0,
        images=128,
        images_per_second=64.0,
        speed_one_rank=40.0,
        world_size=2,
        efficiency=0.8,
        share_compute=0.8,
        share_comm=0.15,
        share_input=0.05,
    ),
]
NOTICE = next(event for event in EVENTS if isinstance(event, Notice))


def never(notice: Notice) -> None:
    raise AssertionError(notice)


def write(path: Path, events: list[Event]) -> None:
    log = EventLog(path, never)
    for event in events:
        log.emit(event)
    log.close()


def test_every_kind_survives_its_file(tmp_path: Path) -> None:
    assert {event.kind for event in EVENTS} == set(KINDS)
    write(tmp_path / "events.jsonl", EVENTS)
    assert read_events(tmp_path / "events.jsonl") == EVENTS


def test_each_record_is_one_json_line_that_opens_with_its_kind(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", EVENTS)
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [next(iter(json.loads(line).items())) for line in lines] == [("kind", event.kind) for event in EVENTS]


def test_a_record_is_on_disk_when_emit_returns(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", never)
    log.emit(EVENTS[3])
    assert read_events(tmp_path / "events.jsonl") == [EVENTS[3]]
    log.close()


def test_a_record_is_stamped_with_the_time_it_was_made() -> None:
    early, late = (Notice(level="info", text="") for _ in range(2))
    assert 1.7e9 < early.time_s <= late.time_s


def test_a_loss_that_is_not_finite_is_null_in_json_and_nan_when_read(tmp_path: Path) -> None:
    values = {**vars(EVENTS[3]), "loss": math.inf}
    write(tmp_path / "events.jsonl", [StepDone(**values)])
    assert json.loads((tmp_path / "events.jsonl").read_text())["loss"] is None
    (event,) = read_events(tmp_path / "events.jsonl")
    assert isinstance(event, StepDone)
    assert math.isnan(event.loss)


def test_an_unknown_speed_stays_unknown(tmp_path: Path) -> None:
    ended = RunEnded(**{**vars(EVENTS[-1]), "speed_one_rank": None, "efficiency": None})
    write(tmp_path / "events.jsonl", [ended])
    assert read_events(tmp_path / "events.jsonl") == [ended]


@pytest.mark.parametrize("kept", range(1, 40, 7))
def test_a_torn_last_line_is_left_out(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(encode(EVENTS[3]).encode() + b"\n" + encode(NOTICE).encode()[:kept])
    assert read_events(path) == [EVENTS[3]]


def test_a_line_torn_inside_a_letter_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = encode(NOTICE).encode()
    path.write_bytes(whole[: whole.index("é".encode()) + 1])
    assert read_events(path) == []


def test_a_resumed_run_does_not_lose_its_first_record_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind":"StepDo')
    write(path, EVENTS[:2])
    assert read_events(path) == EVENTS[:2]


def test_kinds_and_fields_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    newer = {**json.loads(encode(EVENTS[4])), "colour": "green"}
    path.write_text(f'{{"kind":"Teleported"}}\n3\n{json.dumps(newer)}\n')
    assert read_events(path) == [EVENTS[4]]


def test_a_record_without_its_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind":"EpochDone","epoch":1}\n')
    with pytest.raises(LockstepError, match=r"was not written by this version of Lockstep"):
        read_events(path)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 1.5},
        {"step_s": "soon"},
        {"forward_s": []},
        {"sources": []},
        {"assumptions": "none"},
        {"images": 10**4000},
    ],
)
def test_a_damaged_prediction_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "events.jsonl"
    predicted = next(event for event in EVENTS if isinstance(event, RunPredicted))
    path.write_text(json.dumps(json.loads(encode(predicted)) | change, default=str) + "\n")
    with pytest.raises(
        LockstepError, match=rf"was not written by this version of Lockstep: a record's {next(iter(change))}"
    ):
        read_events(path)


def test_a_full_disk_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    heard: list[Notice] = []
    log = EventLog(tmp_path / "events.jsonl", heard.append)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, log._file)
    os.close(full)
    for event in EVENTS:
        log.emit(event)
    log.close()
    (notice,) = heard
    assert notice.level == "warning"
    assert notice.text == (
        f"Cannot write to {log.path}: No space left on device; training goes on, and some of its records are lost."
    )


def test_records_after_a_half_written_one_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Notice] = []
    log = EventLog(tmp_path / "events.jsonl", heard.append)
    real_write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda file, line: real_write(file, line[:10]))
        log.emit(EVENTS[0])
    log.emit(EVENTS[3])
    log.close()
    assert len(heard) == 1
    assert read_events(tmp_path / "events.jsonl") == [EVENTS[3]]


def test_a_log_that_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=r"^Cannot write the event log .*: No such file or directory\.$"):
        EventLog(tmp_path / "none" / "events.jsonl", never)


def test_a_missing_log_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        LockstepError,
        match=r"^Cannot read the event log .*: No such file or directory; give a run's folder that can be read\.$",
    ):
        read_events(tmp_path / "events.jsonl")


@pytest.mark.parametrize("name", ["events.jsonl", "events-0001.jsonl"])
def test_a_pipe_in_the_place_of_a_log_is_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "events.jsonl").touch()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(
        LockstepError,
        match=rf"^Cannot read the event log .*/{name}: it is not a plain file; give a run's folder that can be read\.$",
    ):
        read_events(tmp_path)
    with pytest.raises(LockstepError, match=r"^Cannot write the event log .*: it is not a plain file\.$"):
        EventLog(tmp_path / name, never)


def test_a_log_larger_than_any_is_a_sentence(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.touch()
    os.truncate(log, MAX_LOG_BYTES + 1)  # without a byte on the disk
    with pytest.raises(LockstepError, match=r"it has more than the 536,870,912 bytes that make sense; give a run"):
        read_events(tmp_path)


def test_a_name_that_is_no_utf_8_is_written_and_read_back(tmp_path: Path) -> None:
    notice = Notice(level="warning", text=os.fsdecode(b"caf\xe9.jpeg cannot be read"))
    write(tmp_path / "events.jsonl", [notice])
    assert read_events(tmp_path / "events.jsonl") == [notice]


def step_record(step: int) -> StepDone:
    return StepDone(**{**vars(EVENTS[3]), "step": step})


def test_a_full_log_is_put_away_thinned_and_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, never, part_bytes=20_000)
    notices = [Notice(level="info", text=f"after {step}") for step in range(0, 1000, 25)]
    for step in range(1000):
        log.emit(step_record(step))
        if step % 25 == 0:
            log.emit(notices[step // 25])
    log.close()
    parts = sorted(tmp_path.glob("events-*.jsonl"))
    assert [part.name for part in parts] == [f"events-{number:04d}.jsonl" for number in range(1, len(parts) + 1)]
    assert len(parts) > 5
    assert all(file.stat().st_size < 20_000 for file in (path, *parts))
    assert sum(part.stat().st_size for part in parts) < 20_000 * len(parts) / 4
    events = read_events(path)
    assert [event for event in events if isinstance(event, Notice)] == notices
    steps = [event.step for event in events if isinstance(event, StepDone)]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (0, 999)
    assert read_events(tmp_path) == events


def test_a_resumed_log_goes_on_with_the_next_number(tmp_path: Path) -> None:
    for start in (0, 100):
        log = EventLog(tmp_path / "events.jsonl", never, part_bytes=10_000)
        for step in range(start, start + 100):
            log.emit(step_record(step))
        log.close()
    numbers = sorted(int(part.stem[-4:]) for part in tmp_path.glob("events-*.jsonl"))
    assert numbers == list(range(1, len(numbers) + 1))
    steps = [event.step for event in read_events(tmp_path) if isinstance(event, StepDone)]
    assert steps == sorted(steps)


def test_a_run_killed_between_two_parts_is_read_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", EVENTS[:2])
    (tmp_path / "events.jsonl").rename(tmp_path / "events-0001.jsonl")
    assert read_events(tmp_path) == EVENTS[:2]
    write(tmp_path / "events.jsonl", EVENTS[2:4])
    assert read_events(tmp_path) == EVENTS[:4]


def test_a_log_that_cannot_be_put_away_goes_on_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    heard: list[Notice] = []
    monkeypatch.setattr(os, "rename", fail)
    log = EventLog(tmp_path / "events.jsonl", heard.append, part_bytes=2_000)
    for step in range(50):
        log.emit(step_record(step))
    log.close()
    assert len(heard) == 1
    assert [event.step for event in read_events(tmp_path) if isinstance(event, StepDone)] == list(range(50))
