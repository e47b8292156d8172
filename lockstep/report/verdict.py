"""What is slow, in one sentence with advice: shares of the time and the input's measured rate -> words. Torch-free."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from lockstep.events import Event, InputChosen, RunEnded, RunStarted, StepDone, TimelineTaken
from lockstep.plan.measured_steps import waits_for_ranks

# Below this share of the time, a wait is not worth advice.
NOTEWORTHY_SHARE = 0.05
# Weight of the newest record in the running shares: follows a change within a few records.
NEWEST = 0.3
# More threads than this many times those at work: then it is not the threads that are slow.
MOST_TIMES = 4
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

# How a run's sentence on who held the others up begins (`comm/straggler.py`).
NAMED = re.compile(r"(Rank|Node) \d+")

Slow = Literal["", "communication", "input"]


class Verdict:
    """Follows a run's records and says what its time is spent on."""

    def __init__(self) -> None:
        self._start: RunStarted | None = None
        self._input: InputChosen | None = None
        self._shares: tuple[float, float, float] | None = None  # compute, communication, input
        self._images_per_second = 0.0
        self._num_records = 0
        self._straggler = ""  # the run's own sentence on who held the others up
        self._timelines: list[TimelineTaken] = []

    def emit(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start, self._shares, self._num_records, self._straggler = event, None, 0, ""
                self._timelines = []
            case TimelineTaken():
                self._timelines.append(event)
            case InputChosen():
                self._input = event
            case StepDone():
                self._num_records += 1
                if self._num_records > 1:  # the first step pays for what no later one pays for
                    self._add(event)
            case RunEnded() if event.share_compute + event.share_comm + event.share_input > 0:
                self._shares = event.share_compute, event.share_comm, event.share_input
                self._images_per_second = event.images_per_second
                self._straggler = event.straggler

    def _add(self, step: StepDone) -> None:
        parts = step.compute_s, step.comm_s, step.input_s
        total = sum(parts)
        if not total > 0:  # nor what is no number
            return
        old = self._shares or tuple(part / total for part in parts)
        compute, comm, wait = (was + NEWEST * (part / total - was) for was, part in zip(old, parts, strict=True))
        self._shares = compute, comm, wait
        self._images_per_second = step.images_per_second

    @property
    def slow(self) -> Slow:
        """What advice is about; nothing where the devices are kept busy."""
        _, comm, wait = self._shares or (1.0, 0.0, 0.0)
        if max(comm, wait) < NOTEWORTHY_SHARE:
            return ""
        return "communication" if comm >= wait else "input"

    def sentence(self) -> str:
        """The shares of the time and what follows; empty before there is anything to say."""
        if not self._shares:
            return ""
        compute, comm, wait = round_together(self._shares)
        spent = f"{compute} % compute, {comm} % communication and waiting for other ranks, {wait} % waiting for input"
        return f"{spent}: {self._advise(self._shares[2])}"

    def _advise(self, share_input: float) -> str:
        if not self.slow:
            return "the devices are kept busy"
        if self.slow == "communication" and (named := NAMED.match(self._straggler)):
            return f"{named[0].lower()} held the others up, so look there first"
        start, chosen = self._start, self._input
        if self.slow == "communication":
            more = "more samples per rank (a larger train.global_batch, or fewer ranks) would"
            if start is not None and waits_for_ranks(self._timelines, start.world_size):
                return f"ranks wait for each other more than for messages; {more} even that out"
            return f"{more} lower communication"
        elsewhere = "smaller images (`lockstep data pack --short-side`) or faster storage would shorten the wait"
        if chosen is not None and chosen.decoder == "cpu" and chosen.read_processes:
            return f"more processes that decode (data.read_processes), {elsewhere}"
        if start is None or chosen is None or not chosen.images_per_second or chosen.decoder != "cpu":
            return f"more decode threads (data.decode_threads), {elsewhere}"
        wanted = self._images_per_second / start.world_size / max(1e-9, 1 - share_input)
        missing = count_missing(chosen.threads, chosen.images_per_second, wanted)
        if missing == 0:
            return (
                "the threads are quick enough on average; batches further ahead (data.prefetch_batches) would hide it"
            )
        if missing > (MOST_TIMES - 1) * chosen.threads:
            return elsewhere
        if start.device.endswith("CPU"):  # where threads that decode take the cores that compute
            return f"{elsewhere}, as would {_threads(missing)} on cores of their own"
        return f"{_threads(missing)} would remove it"


def judge(events: Iterable[Event]) -> Verdict:
    """The verdict on records that are there already."""
    verdict = Verdict()
    for event in events:
        verdict.emit(event)
    return verdict


def count_missing(threads: int, images_per_second: float, wanted: float) -> int:
    """Decode threads to add until all of them make `wanted` images a second; what they make now was measured."""
    return max(0, math.ceil(threads * wanted / images_per_second - 1e-9) - threads)


def round_together(shares: Sequence[float]) -> list[int]:
    """Shares in percent, as whole numbers whose sum is that of the shares: shares of 1 are 100 together, never 101."""
    if not all(map(math.isfinite, shares)):
        return [0] * len(shares)
    exact = [100 * share for share in shares]
    rounded = [math.floor(value) for value in exact]
    missing = round(sum(exact)) - sum(rounded)
    # Those that rounding down cost most are rounded up.
    dearest = sorted(range(len(exact)), key=lambda place: rounded[place] - exact[place])
    for place in dearest[: max(0, missing)]:
        rounded[place] += 1
    return rounded


def _threads(count: int) -> str:
    number = NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"
    return f"{number} more decode thread{'' if count == 1 else 's'}"
