"""What the loss scale has to say to people: which layer overflowed, how often, and whether training still moves.

Read when the trainer logs (step 10 of the walk), because asking waits for the device.
"""

from collections import Counter
from dataclasses import dataclass

from lockstep.layout import Layout
from lockstep.optim.loss_scale import ROW, SCALE, SKIPPED, LossScale

# A scale at its floor that overflows this many times in a row will not recover by itself.
STALLED_STEPS = 20
NAMED_LAYERS = 3


@dataclass(frozen=True)
class Diagnosis:
    """What happened since the last look."""

    num_skipped: int
    scale: float  # as it is now
    text: str  # empty when nothing was skipped
    is_at_floor: bool
    is_stalled: bool


class Doctor:
    """Watches one loss scale."""

    def __init__(self, layout: Layout, scale: LossScale) -> None:
        self._names = [slot.name for slot in layout.slots]
        self._scale = scale
        self._skipped = int(scale.state[SKIPPED])
        self._firsts = self._count_firsts()

    def examine(self) -> Diagnosis:
        """Look at the device's counters and put them in words."""
        state = self._scale.state.tolist()
        firsts = self._count_firsts()
        skipped, new = int(state[SKIPPED]) - self._skipped, firsts - self._firsts
        self._skipped, self._firsts = int(state[SKIPPED]), firsts
        is_at_floor = state[SCALE] <= self._scale.floor
        is_stalled = is_at_floor and state[ROW] >= STALLED_STEPS
        text = ""
        if is_stalled:
            text = self._describe_stall(int(state[ROW]), firsts)
        elif skipped:
            text = f"Skipped {_times(skipped, 'step')} whose gradients overflowed, first in {_rank(new)}; " + (
                "the loss scale cannot fall any further."
                if is_at_floor
                else f"the loss scale is now {_number(state[SCALE])}."
            )
        return Diagnosis(skipped, state[SCALE], text, is_at_floor, is_stalled)

    def _count_firsts(self) -> "Counter[str]":
        """How often each parameter's gradient was, of those that overflowed together, the one nearest to the loss.

        Backward passes what is not finite on to everything behind, so that one is where it began.
        """
        return Counter(dict(zip(self._names, self._scale.firsts.tolist(), strict=True)))

    def _describe_stall(self, row: int, firsts: "Counter[str]") -> str:
        scale = self._scale
        if scale.floor == scale.ceiling:
            advice = "lower precision.initial_scale, set precision.loss_scale=dynamic, or"
        else:
            advice = "lower optim.lr, lengthen optim.warmup, or"
        return (
            f"Training stands still: the gradients of the last {row} steps overflowed even at the lowest loss scale, "
            f"{_number(scale.floor)}, first in {_rank(firsts)}; {advice} set precision.compute=bf16."
        )


def _rank(firsts: "Counter[str]") -> str:
    """The parameters that overflowed first most often."""
    ranked = [f"{name} ({_times(count, 'time')})" for name, count in firsts.most_common(NAMED_LAYERS) if count > 0]
    others = sum(count > 0 for count in firsts.values()) - len(ranked)
    return ", ".join(ranked) + (f" and {others} more" if others > 0 else "")


def _number(scale: float) -> str:
    return f"{scale:,.0f}" if scale >= 1 else f"{scale:g}"


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
