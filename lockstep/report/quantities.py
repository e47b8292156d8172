"""What benchmarks and sweeps measure, in words with a unit: their files have keys such as `median_s`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARES = {
    "top1": "top-1",
    "average_top1": "top-1 of the averaged weights",
    "best_top1": "best top-1",
}
WORDS = {
    "images_per_second": "images/s",
    "median_s": "median time",
    "step_s": "time of a step",
    "seconds": "time",
    "wall_s": "time of a run",
    "memory_bytes": "memory",
    "peak_bytes": "most memory",
    "tflops": "TFLOP/s",
    "bad": "runs that diverged or failed",
}
BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
MANY = 1e12  # beyond this a number is written with a power of ten
MOST_DECIMALS = 6


@dataclass(frozen=True)
class Quantity:
    """How one quantity is shown."""

    words: str  # with its unit
    factor: float = 1.0  # from the file's unit to the one shown
    is_share: bool = False  # differs by points, not by a factor

    @property
    def title(self) -> str:
        return self.words[:1].upper() + self.words[1:]

    def show(self, value: float, deviation: float | None = None) -> str:
        """Five digits; with a deviation, as many as it leaves: 16.60 ± 2.26, 2,651 ± 128."""
        shown, spread = self.factor * value, self.factor * (deviation or 0.0)
        if abs(shown) >= MANY or spread >= MANY:
            return f"{shown:.4g}" if deviation is None else f"{shown:.4g} ± {spread:.2g}"
        if self.is_share:
            decimals = 2
        elif spread > 0:
            decimals = min(MOST_DECIMALS, max(0, 1 - math.floor(math.log10(spread))))
        else:
            return f"{shown:,.0f}" if abs(shown) >= 1e4 else f"{shown:,.5g}"
        text = f"{shown:,.{decimals}f}"
        return text if deviation is None else f"{text} ± {spread:,.{decimals}f}"


def describe_quantity(key: str, values: Sequence[float]) -> Quantity:
    """A quantity in words, in the unit that suits the greatest of its values."""
    greatest = max(map(abs, values), default=0.0)
    if key in SHARES:
        return Quantity(f"{SHARES[key]}, %", 100.0, is_share=True)
    if key == "seconds" or (key.endswith("_s") and not key.endswith("_per_s")):
        unit, factor = ("s", 1.0) if greatest >= 1 else ("ms", 1e3)
        return Quantity(f"{_find_words(key, '_s')}, {unit}", factor)
    if key.endswith("_bytes"):
        unit, size = next(((unit, size) for unit, size in BYTES if greatest >= size), ("bytes", 1))
        return Quantity(f"{_find_words(key, '_bytes')}, {unit}", 1 / size)
    for suffix, unit in (("_gbit_per_s", "Gbit/s"), ("_per_second", "a second"), ("_mb", "MB"), ("_ms", "ms")):
        if key.endswith(suffix) and key not in WORDS:
            return Quantity(f"{_find_words(key, suffix)}, {unit}")
    return Quantity(_find_words(key, ""))


def _find_words(key: str, suffix: str) -> str:
    return WORDS.get(key) or key.removesuffix(suffix).replace("_", " ").strip() or key
