"""Whether decode threads help nvJPEG (step 3 on the walk): tried when the device runs dry, kept where it is quicker.

Where nvJPEG has engines of its own it may be quicker alone, because Python runs one thread at a time and threads that
decode hold up those that keep it busy; elsewhere a host's cores may be worth as much as the GPU. Neither can be told
from the outside, so both are measured, over windows of batches, once the step has had to wait for input.
"""

import time
from collections.abc import Callable

WINDOW = 32  # batches of one measurement
SETTLE = 16  # batches after a change before the next: those ahead were made in the old way
STARVING = 1 / 8  # of a window's batches the device ran dry for
LONGEST = 2  # intervals left out of a window: validation and checkpoints are no input
MARGIN = 1.03  # what the other way must be quicker by
FIRST_PATIENCE, MAX_PATIENCE = 8, 256  # windows until the slower way is tried again, twice as many each time


class Balance:
    """Takes note of every batch and says who decodes."""

    _times: list[float]  # when each batch of this window came
    _num_dry: int
    _to_settle: int

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.helps = False
        self._clock = clock
        self._rates: dict[bool, float] = {}  # batches a second, by whether threads helped
        self._patience, self._windows = FIRST_PATIENCE, 0
        self._begin(settle=True)

    def note(self, ran_dry: bool) -> None:
        """A batch was handed over; whether the device had nothing left to do."""
        self._times.append(self._clock())
        self._num_dry += ran_dry
        if len(self._times) > WINDOW:
            self._judge()
        elif self._to_settle:
            self._to_settle -= 1
            self._times, self._num_dry = self._times[-1:], 0

    def _judge(self) -> None:
        """Stay, or change to the other way."""
        intervals = sorted(after - before for before, after in zip(self._times, self._times[1:], strict=False))
        is_starving = self._num_dry >= STARVING * WINDOW
        changes = False
        # Help that is enough may still hold up the step itself, and may be needed no longer.
        if is_starving or self.helps:
            counted = intervals[:-LONGEST]
            self._rates[self.helps] = len(counted) / max(sum(counted), 1e-9)
            self._windows += 1
            changes = self._is_other_better()
        if changes:
            self.helps = not self.helps
            self._windows = 0
        self._begin(settle=changes)

    def _is_other_better(self) -> bool:
        """Whether the other way was quicker, or ought to be tried: for the first time, or again."""
        other = self._rates.get(not self.helps)
        if other is not None and self._windows > self._patience:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            return True
        return other is None or other > MARGIN * self._rates[self.helps]

    def _begin(self, *, settle: bool) -> None:
        self._to_settle = SETTLE if settle else 0
        self._times = [self._clock()]
        self._num_dry = 0
