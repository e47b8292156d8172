"""A logarithmic axis that names at least two numbers, however near to each other or far apart its values are."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_TICKS = 7


class Tick(NamedTuple):
    """A round number: 1, 2 or 5 times a power of ten."""

    exponent: int
    digit: int

    @property
    def place(self) -> float:
        """Where it lies on the axis; a sum, because the number itself may be beyond what a float holds."""
        return self.exponent + math.log10(self.digit)

    @property
    def value(self) -> float:
        return float(f"{self.digit}e{self.exponent}")


def build_log_axis(values: Sequence[float]) -> dict[str, Any]:
    """From a round number below the values to one above, with round numbers between; what has no logarithm is left out.

    Plotly's own ticks are powers of ten, of which a curve within one power shows a single one or none.
    """
    places = [math.log10(value) for value in values if value > 0]
    if not places:
        return {"type": "log"}
    low, high = min(places), max(places)
    exponents = range(math.floor(low), math.ceil(high) + 2)
    ticks = [Tick(exponent, digit) for exponent in exponents for digit in (1, 2, 5)]
    first = max(tick.place for tick in ticks if tick.place <= low)
    last = min(tick.place for tick in ticks if tick.place >= high and tick.place > first)
    shown = _thin([tick for tick in ticks if first <= tick.place <= last])
    room = 0.03 * (last - first)
    return {
        "type": "log",
        "range": [first - room, last + room],
        "tickvals": [tick.value for tick in shown],
        "ticktext": [_show(tick.value) for tick in shown],
    }


def _thin(ticks: list[Tick]) -> list[Tick]:
    """As many as there is room for: beyond that powers of ten alone, and beyond that some of them."""
    if len(ticks) <= MOST_TICKS:
        return ticks
    powers = [tick for tick in ticks if tick.digit == 1]
    return powers[:: -(-len(powers) // MOST_TICKS)]


def _show(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e9 else f"{value:.0e}" if value >= 1e9 else f"{value:g}"
