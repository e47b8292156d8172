"""How much of a run's time goes into steps that count, while ranks are killed again and again."""

import random
import tempfile
import time
from pathlib import Path

from rich.console import Console

from lockstep.bench.chaos.disk import Disk
from lockstep.bench.chaos.find import POLL_S, find_rank, kill, wait_until_gone
from lockstep.bench.chaos.judge import CRIES
from lockstep.bench.chaos.report import Report, UsefulTime, name_source, show
from lockstep.bench.chaos.runs import SETTINGS, Part, Place, Run
from lockstep.bench.chaos.surroundings import seclude
from lockstep.bench.results import check_files
from lockstep.errors import LockstepError
from lockstep.events import Event, RunStarted, StepDone

UNDISTURBED_S = 10.0
START_S = 120.0
STOP_S = 60.0
# Far longer than anybody measures; only steps count, and nothing else is done in between but a checkpoint now and then.
LONG = ("train.duration=1000000st", "train.eval_every=0st", "train.checkpoint_every=100st", "train.log_every=5")


def measure_useful(
    *, every_s: float, for_s: float, seed: int, num_ranks: int, json_file: Path | None, console: Console
) -> bool:
    """Kill a random rank every so many seconds, for a while, and print the share of time that was of use."""
    check_files(json_file, None)
    seclude()
    report = Report(seed, num_ranks, name_source())
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-", ignore_cleanup_errors=True) as name:
        place = Place(Disk(Path(name) / "runs"), Path(name))  # on no small disk: its log would not fit
        with Run(1, place, num_ranks, "restarts", (*SETTINGS, *LONG)) as one:
            report.useful.append(disturb(one, every_s, for_s, random.Random(seed)))
    report.seconds = report.useful[0].wall_s
    report.write(json_file)
    return show([report], console)


def disturb(one: Run, every_s: float, for_s: float, generator: random.Random) -> UsefulTime:
    """One long run, undisturbed for a while, then killed again and again."""
    part = one.start()
    end = time.monotonic() + START_S
    while not one.has_said("StepDone", 0):
        if part.is_over or time.monotonic() > end:
            raise LockstepError(f"The run takes no step: {one.last_words}")
        time.sleep(POLL_S)
    time.sleep(UNDISTURBED_S)
    begun_s, begun = time.time(), time.monotonic()
    num_faults = 0
    while (now := time.monotonic()) < begun + for_s:
        time.sleep(max(0.0, min(begun + (num_faults + 1) * every_s, begun + for_s) - now))
        if time.monotonic() < begun + for_s:
            part = _kill_one(one, part, generator, begun + for_s)
            num_faults += 1
    wall_s = time.time() - begun_s
    one.interrupt(part)
    if one.finish(part, STOP_S) is None:
        one.problems.append(f"the run did not stop when asked to: {one.last_words}")
    one.problems += [f"printed: {cry}" for cry in CRIES if cry in one.output]
    if left := wait_until_gone(one.marker):
        one.problems.append(f"left {len(left)} processes behind")
    events, end_s = one.events(), begun_s + wall_s
    num_steps, lost_s = count_steps(events, begun_s, end_s), measure_lost(events, begun_s, end_s)
    return UsefulTime(every_s, wall_s, num_faults, num_steps, lost_s, 1 - lost_s / wall_s, one.problems)


def _kill_one(one: Run, part: Part, generator: random.Random, end: float) -> Part:
    """SIGKILL to a rank, as soon as it is there; a launcher that did not start it again is resumed, and noted."""
    rank = generator.randrange(one.num_ranks)
    while time.monotonic() < end:
        if part.is_over:
            one.problems.append(f"the launcher ended with restarts left: {one.last_words}")
            part = one.start()
        if (pid := find_rank(one.marker, rank)) is not None:
            kill([pid])
            break
        time.sleep(POLL_S)
    return part


def count_steps(events: list[Event], start_s: float, end_s: float) -> int:
    """Steps that a run came further between two moments; those that were lost and taken again count once."""
    steps = [event for event in events if isinstance(event, StepDone) and event.time_s <= end_s]
    before = max((event.step for event in steps if event.time_s < start_s), default=0)
    return max((event.step for event in steps), default=before) - before


def measure_lost(events: list[Event], start_s: float, end_s: float) -> float:
    """Seconds in which nothing was gained: after each fault, until the run was further than it had been.

    Measured and not worked out from the time of a step, which varies by more than a fault costs on a shared machine.
    """
    lost_s, furthest, at_s, is_behind = 0.0, 0, start_s, False
    for event in events:
        if event.time_s > end_s:
            break
        if isinstance(event, RunStarted):
            is_behind = furthest > 0
        elif isinstance(event, StepDone) and event.step > furthest:
            if is_behind and event.time_s > start_s:
                # The steps that this record brings beyond the furthest are of use, though they come after the gap.
                lost_s += max(0.0, event.time_s - at_s - (event.step - furthest) * event.step_s)
            furthest, at_s, is_behind = event.step, event.time_s, False
    return lost_s + (end_s - at_s if is_behind else 0.0)
