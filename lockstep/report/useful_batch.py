"""The largest useful batch, from the noise scales that a run has measured: for its end, its summary and its page."""

import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from lockstep.events import Event, StepDone


class UsefulBatch(NamedTuple):
    """The gradient noise scale over a run, in samples."""

    middle: float  # the median: a batch of this size takes twice the fewest steps, and twice the fewest samples
    last: float  # it grows as the loss falls, so this is most of what a larger batch could have been good for


def find_useful_batch(events: Iterable[Event]) -> UsefulBatch | None:
    """From all step records; None where none of them knows a noise scale."""
    scales = [
        event.noise_scale
        for event in events
        if isinstance(event, StepDone) and event.noise_scale is not None and 0 < event.noise_scale < math.inf
    ]
    return UsefulBatch(median(scales), scales[-1]) if scales else None


def describe_useful_batch(found: UsefulBatch) -> str:
    """The value of a row "useful batch"; two digits are all that a noise scale is worth."""
    return f"about {_round(found.middle)}, at the end {_round(found.last)}  (gradient noise scale)"


def _round(samples: float) -> str:
    return f"{float(f'{samples:.2g}'):,.0f}"
