"""Published points of large-batch training, and what lies between them: what `transfer.py` derives from. Torch-free.

`published/large-batch.toml` has the points. Between two of them the learning rate, 1 - momentum, warm-up and epochs are
straight lines over the batch where both axes are logarithmic: Goyal's linear rule is one of slope 1, You's square root
one of slope 1/2, and MLPerf's LARS points have the slopes they have. Weight decay has no trend and is the nearest's.
"""

import math
import tomllib
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

# Of the learning rate beyond the points, as an exponent of the batch.
SLOPES = {"held": 0.0, "root": 0.5, "linear": 1.0}
ALIKE = 0.02  # two sets whose sizes differ by no more are the same one, but for a few samples left out


@dataclass(frozen=True)
class Point:
    """Values that were published for one batch."""

    batch: int
    lr: float
    warmup: float  # in epochs, as `epochs`
    epochs: float
    source: str
    momentum: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True)
class Spot:
    """Values for any batch, read off the points."""

    lr: float
    warmup: float
    epochs: float
    momentum: float | None
    weight_decay: float | None
    source: str  # in words
    decay_source: str  # likewise, of the weight decay
    untested: str = ""  # why nobody has tried it; empty within the points


@dataclass(frozen=True)
class Family:
    """One update rule's points on one network and data set, by rising batch."""

    rule: str
    model: str
    data: str
    samples: int
    name: str  # of the rule that the points follow
    points: tuple[Point, ...]
    below: str
    beyond: str
    label_smoothing: float | None = None

    def has(self, model: str, samples: int | None) -> bool:
        """Whether the points are of this network and data."""
        return model == self.model and samples is not None and abs(samples / self.samples - 1) <= ALIKE

    def read(self, batch: float) -> Spot:
        """The values for a batch: a point's own, between two, or beyond all."""
        points = self.points
        place = bisect_left([point.batch for point in points], batch)
        if place == 0 and batch < points[0].batch:
            text = f"below the smallest published batch, {points[0].batch:,}: untested"
            return _leave(points[0], batch, self.below, text)
        if place == len(points):
            text = f"beyond the largest published batch, {points[-1].batch:,}: untested"
            return _leave(points[-1], batch, self.beyond, text)
        high = points[place]
        if high.batch == batch:
            where = _name("from", high)
            return Spot(high.lr, high.warmup, high.epochs, high.momentum, high.weight_decay, where, where)
        return self._interpolate(points[place - 1], high, batch)

    def _interpolate(self, low: Point, high: Point, batch: float) -> Spot:
        share = math.log(batch / low.batch) / math.log(high.batch / low.batch)

        def between(a: float, b: float) -> float:
            return math.exp((1 - share) * math.log(a) + share * math.log(b))

        momentum = None
        if low.momentum is not None and high.momentum is not None:
            momentum = 1 - between(1 - low.momentum, 1 - high.momentum)
        nearest = low if share < 0.5 else high
        return Spot(
            lr=between(low.lr, high.lr),
            # A first warm-up is needed as soon as the batch grows, and not in proportion.
            warmup=between(low.warmup, high.warmup) if low.warmup else high.warmup,
            epochs=between(low.epochs, high.epochs),
            momentum=momentum,
            weight_decay=nearest.weight_decay,
            source=f"{_name('between', low)} and {high.source} at {high.batch:,}",
            decay_source=_name("the nearest, from", nearest),
        )


def _leave(last: Point, batch: float, slope: str, text: str) -> Spot:
    """The last point's values, its learning rate by a slope."""
    lr = last.lr * (batch / last.batch) ** SLOPES[slope]
    where = _name("as", last)
    return Spot(lr, last.warmup, last.epochs, last.momentum, last.weight_decay, where, where, text)


def _name(preposition: str, point: Point) -> str:
    return f"{preposition} {point.source} point at {point.batch:,}"


@cache
def _read_file() -> dict[str, Any]:
    file = resources.files("lockstep.recipes") / "published" / "large-batch.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def find_family(rule: str) -> Family | None:
    """The points of an update rule; None for one that nobody has published any of."""
    for table in _read_file()["family"]:
        if table["rule"] == rule:
            points = tuple(Point(**point) for point in table["point"])
            return Family(points=points, **{key: value for key, value in table.items() if key != "point"})
    return None


def find_samples(path: str) -> int | None:
    """The training samples of a data set that its folder's name tells; None of any other."""
    name = Path(path).name.lower()
    known = [key for key in _read_file()["samples"] if name.startswith(key)]
    return int(_read_file()["samples"][max(known, key=len)]) if known else None
