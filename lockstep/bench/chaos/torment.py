"""A run meets its faults: each at its moment, followed until it is noticed and the run goes on, or is gone on with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.bench.chaos import hook
from lockstep.bench.chaos.faults import LAUNCHER, RESTARTING, TWO_NODES, Fault
from lockstep.bench.chaos.find import POLL_S, find_rank, find_ranks, is_alive
from lockstep.bench.chaos.report import Row
from lockstep.bench.chaos.runs import GRACE_S, READ_TIMEOUT_S, TIMEOUT_S, Part, Run
from lockstep.bench.chaos.strike import Striker
from lockstep.events import Event, Notice, RunStarted, StepDone

AFTERMATH_S = 0.3  # for a fault that ends nothing to end something after all
FULL_S = 3.0
START_UP_S = 15.0  # until a rank that was started has joined the others
START_S = 60.0  # until a run that was started takes a step
FINISH_S = 120.0


@dataclass
class Outcome:
    """What came of a fault."""

    is_over: bool = False  # the run's part
    status: int | None = None
    detection_s: float | None = None
    recovery_s: float | None = None
    is_healed: bool = False  # by the launcher
    hung: bool = False


def torment(run: Run, faults: Sequence[Fault]) -> list[Row]:
    """Let a run meet its faults, and finish."""
    rows: list[Row] = []
    striker = Striker(run)
    part = run.start()
    for fault in faults:
        is_due = wait_for_moment(run, part, fault)
        step, num_events, ranks = run.last_step, len(run.events()), list(find_ranks(run.marker).values())
        struck = time.monotonic()
        came = is_due and striker.strike(fault, part)
        _await_no_more(run, fault)
        if not came:
            outcome = _see_whether_over(run, part)
            if outcome.is_over and not run.is_finished and not run.is_unsaved:
                run.problems.append(f"ended of itself before {fault.kind} in {fault.phase}: {run.last_words}")
        elif fault.kind == "blocked read":
            outcome = _wait_for_name(run, part, striker.blocked, num_events)
        elif fault.is_survived:
            outcome = _see_whether_over(run, part)
            if outcome.is_over and not run.is_finished and not run.is_unsaved:
                run.problems.append(f"{fault.kind} to {fault.victim} in {fault.phase} ended the run: {run.last_words}")
        elif fault.is_healed and run.way in RESTARTING:
            outcome = _wait_for_healing(run, part, fault, ranks, num_events, struck)
        elif fault.kind == "full disk" and run.way == "restarts":
            part.wait(FULL_S)
            striker.mend(fault)
            outcome = _see_whether_over(run, part)
        else:
            outcome = _wait_for_end(run, part, struck, _limit(fault))
        striker.mend(fault)
        if outcome.is_over and not run.is_finished:
            part = run.start()
            outcome.recovery_s = _time_first_step(run, part)
        rows.append(_make_row(run, fault, step, came, outcome))
        if run.is_finished:
            break
    _finish(run, part)
    return rows


def wait_for_moment(run: Run, part: Part, fault: Fault) -> bool:
    """Return when a fault is due; False if the part has ended before."""
    begun = run.hold / f"{fault.moment}{hook.BEGUN}"
    begun.unlink(missing_ok=True)
    (run.hold / f"{fault.moment}{hook.AWAITED}").touch()
    while not part.is_over:
        if fault.moment == "start" and _can_be_met(run, fault):
            break
        if begun.exists() or run.has_said(fault.moment, part.num_events):
            break
        time.sleep(POLL_S)
    time.sleep(fault.delay_s)
    return not part.is_over


def _await_no_more(run: Run, fault: Fault) -> None:
    """Nothing lingers any longer for a fault that has come, or will not."""
    (run.hold / f"{fault.moment}{hook.AWAITED}").unlink(missing_ok=True)


def _can_be_met(run: Run, fault: Fault) -> bool:
    """Whether the victim of a fault in start-up is there."""
    if fault.target != LAUNCHER:
        return find_rank(run.marker, fault.target) is not None
    # Python answers an interrupt of its own start with a traceback, which says nothing of Lockstep.
    return not fault.kind.startswith("SIGINT") or run.way in TWO_NODES or run.has_taken_over()


def _see_whether_over(run: Run, part: Part) -> Outcome:
    """For a fault that should end nothing, or met nobody."""
    return Outcome(True, run.finish(part, 0)) if part.wait(AFTERMATH_S) else Outcome()


def _limit(fault: Fault) -> float:
    """Seconds after which nothing may still wait; ranks that are starting do not wait for anybody yet."""
    return TIMEOUT_S + GRACE_S + (START_UP_S if fault.phase == "start-up" else 0.0)


def _wait_for_end(run: Run, part: Part, struck: float, limit_s: float) -> Outcome:
    """For a fault that ends the run's part."""
    status = run.finish(part, limit_s)
    return Outcome(True, status, time.monotonic() - struck, hung=status is None)


def _wait_for_name(run: Run, part: Part, file: str, num_events: int) -> Outcome:
    """For a read that does not come: the run says which, and goes on."""
    begun = time.monotonic()
    while time.monotonic() < begun + READ_TIMEOUT_S + GRACE_S and not part.is_over:
        if any(isinstance(event, Notice) and file in event.text for event in run.events()[num_events:]):
            return Outcome(detection_s=time.monotonic() - begun)
        time.sleep(POLL_S)
    run.problems.append(f"run {run.number} did not name {file}, which did not come")
    status = run.finish(part, 0.1)
    return Outcome(True, status, hung=status is None)


def _wait_for_healing(
    run: Run, part: Part, fault: Fault, ranks: Sequence[int], num_events: int, struck: float
) -> Outcome:
    """For a fault after which the launcher starts the ranks again: all old ones are gone, then there is a step."""
    outcome = Outcome()
    while any(map(is_alive, ranks)) and not part.is_over:
        if time.monotonic() > struck + _limit(fault):
            return Outcome(True, run.finish(part, 0), hung=True)
        time.sleep(POLL_S)
    outcome.detection_s = time.monotonic() - struck
    while time.monotonic() < struck + START_S and not part.is_over:
        if _has_stepped(run.events()[num_events:]):
            outcome.recovery_s, outcome.is_healed = time.monotonic() - struck, True
            return outcome
        time.sleep(POLL_S)
    outcome.is_over = True
    outcome.status = run.finish(part, 0.1)
    outcome.hung = outcome.status is None
    if not run.is_finished:
        run.problems.append(
            f"{fault.kind} to {fault.victim} in {fault.phase} ended a launcher with restarts left: {run.last_words}"
        )
    return outcome


def _has_stepped(events: Sequence[Event]) -> bool:
    """Whether ranks that were started among these records have taken a step."""
    starts = [number for number, event in enumerate(events) if isinstance(event, RunStarted)]
    return bool(starts) and any(isinstance(event, StepDone) for event in events[starts[0] :])


def _time_first_step(run: Run, part: Part) -> float | None:
    """Seconds from the start of a part to its first step; None if it ends before."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and not part.is_over:
        if run.has_said("StepDone", part.num_events):
            return time.monotonic() - part.begun_s
        time.sleep(POLL_S)
    return None


def _finish(run: Run, part: Part) -> None:
    """Let what is left of a run come to its end, resumed as often as a fault's late effect makes it necessary."""
    for _ in range(3):
        run.finish(part, FINISH_S)
        if run.is_finished:
            return
        part = run.start()
    part.kill(run.marker)


def _make_row(run: Run, fault: Fault, step: int, came: bool, outcome: Outcome) -> Row:
    return Row(
        run=run.number,
        way=run.way,
        kind=fault.kind,
        victim=fault.victim,
        phase=fault.phase,
        step=step,
        came=came,
        ended=outcome.is_over,
        healed=outcome.is_healed,
        status=outcome.status,
        detection_s=outcome.detection_s if came else None,
        recovery_s=outcome.recovery_s,
        hung=outcome.hung,
    )
