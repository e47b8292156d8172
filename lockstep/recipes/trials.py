"""A sweep file → its trials, each a run's settings: a pure function (step 0 on the walk). Torch-free."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import LockstepError
from lockstep.recipe_values import show
from lockstep.recipes.read import load_recipe, write_setting
from lockstep.recipes.sweep_file import RANKS, Cell, Range, SweepFile

MOST_TRIALS = 5000  # of a sweep: more than a machine takes in a week
# Trials that no sweep file sets: one is short, and hundreds of checkpoints fill a disk.
USUAL = {"train.checkpoint_every": "0st", "train.keep_checkpoints": 1}
SEED = "train.seed"


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    cell: str
    point: tuple[tuple[str, Any], ...]  # of the grid: settings and their values
    number: int  # among the trials of this cell at this point
    seed: int
    drawn: tuple[tuple[str, Any], ...]  # settings that were drawn or scaled, and their values
    settings: tuple[str, ...]  # all of them, as overrides of the recipe
    ranks: str
    folder: str  # below the sweep's
    is_confirming: bool = False

    @property
    def place(self) -> str:
        """Trials of one cell at one point compete with each other."""
        return show([self.cell, *self.point])

    def phrase(self) -> str:
        """Which trial it is, in words."""
        words = [self.cell, *(f"{key.rpartition('.')[2]} {value}" for key, value in self.point)]
        words += [f"{key.rpartition('.')[2]} {value:.4g}" for key, value in self.drawn if isinstance(value, float)]
        return ", ".join([*words, f"seed {self.seed}"])


def plan_trials(sweep: SweepFile, recipe: str, overrides: Sequence[str] = ()) -> list[Trial]:
    """The first stage's trials, cell by cell and point by point; every one of them is a run that can be started.

    `overrides` are for all trials, over whatever the file sets.
    """
    _check_overrides(sweep, overrides)
    total = sum(_count_trials(sweep, cell) for cell in sweep.rows())
    if total > MOST_TRIALS:
        raise LockstepError(
            f"This sweep has {total:,} trials and may have {MOST_TRIALS:,}; give fewer values, trials or seeds."
        )
    trials = [trial for cell in sweep.rows() for trial in _list_trials(sweep, cell, recipe, overrides)]
    if len({trial.folder for trial in trials}) < len(trials):  # names that differ in signs alone
        trials = [replace(trial, folder=f"{place:04}_{trial.folder}") for place, trial in enumerate(trials)]
    return trials


def confirm(trial: Trial, seeds: Sequence[int]) -> list[Trial]:
    """The second stage of a trial that was the best of its place: the same with other seeds."""
    return [
        replace(
            trial,
            seed=seed,
            settings=(*trial.settings, write_setting(SEED, seed)),
            folder=f"{trial.folder.rpartition('_s')[0]}_s{seed}",
            is_confirming=True,
        )
        for seed in seeds
    ]


def _check_overrides(sweep: SweepFile, overrides: Sequence[str]) -> None:
    for text in overrides:
        key = text.partition("=")[0].strip()
        varied = {SEED, *sweep.grid, *(name for cell in sweep.rows() for name in (*cell.random, *cell.set))}
        if key in varied | sweep.random.keys():
            raise LockstepError(f"--set {key} would override what this sweep varies; change its file instead.")


def _count_trials(sweep: SweepFile, cell: Cell) -> int:
    points = 1
    for values in sweep.grid.values():
        points *= len(values)
    return points * _count_draws(sweep, cell) * (len(sweep.seeds) + len(sweep.confirm))


def _count_draws(sweep: SweepFile, cell: Cell) -> int:
    """Trials of a cell at a point; where nothing is drawn they would all be one."""
    return sweep.trials if {**sweep.random, **cell.random} else 1


def _list_trials(sweep: SweepFile, cell: Cell, recipe: str, overrides: Sequence[str]) -> Iterator[Trial]:
    ranges = {**sweep.random, **cell.random}
    for values in itertools.product(*sweep.grid.values()):
        point = dict(zip(sweep.grid, values, strict=True))
        fixed = {**USUAL, **sweep.set, **cell.set, **point}
        for number in range(_count_draws(sweep, cell)):
            yield from _build(
                sweep, cell, recipe, overrides, point, fixed, draw(sweep.draw_seed, number, ranges), number
            )


def _build(
    sweep: SweepFile,
    cell: Cell,
    recipe: str,
    overrides: Sequence[str],
    point: Mapping[str, Any],
    fixed: Mapping[str, Any],
    drawn: Mapping[str, Any],
    number: int,
) -> Iterator[Trial]:
    """The trials of one draw, a seed each; what is wrong with their settings is said of the first."""
    given = {**fixed, **drawn}
    ranks = read_ranks(given.pop(RANKS, 1))
    names = [cell.name, *(f"{key.rpartition('.')[2]}-{value}" for key, value in point.items())]
    slug = "_".join(re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip("-.") for name in names)
    try:
        settings = [*(write_setting(key, value) for key, value in given.items()), *overrides]
        _, config = load_recipe(recipe, settings)
        scaled = _scale({**sweep.scale, **cell.scale}, config)
        settings += [write_setting(key, value) for key, value in scaled.items()]
        load_recipe(recipe, settings)
    except LockstepError as error:
        raise LockstepError(f"{str(error).rstrip('.')}; so in cell {show(cell.name)} of the sweep.") from None
    varied = tuple({**drawn, **scaled}.items())
    for seed in sweep.seeds:
        own = (*settings, write_setting(SEED, seed))
        folder = f"{slug[:150]}_t{number:02}_s{seed}"
        yield Trial(cell.name, tuple(point.items()), number, seed, varied, own, ranks, folder)


def read_ranks(given: object) -> str:
    """How many ranks a trial has."""
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= 4096:
        raise LockstepError(f"ranks = {show(given)} must be a whole number from 1 to 4096, such as 2.")
    return str(given)


def _scale(scales: Mapping[str, Any], config: RunConfig) -> dict[str, float]:
    """Values for the trial's batch, from what they are at another."""
    found: dict[str, float] = {}
    for key, scale in scales.items():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section, None), name, None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LockstepError(f"scale has {key[:100]}, and must name settings that are numbers, such as optim.lr.")
        found[key] = float(f"{value * (config.train.global_batch / scale.at) ** scale.power:.6g}")
    return found


def draw(seed: int, number: int, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """A value out of every range; a single choice has its values in turn."""
    if len(ranges) == 1:
        ((key, only),) = ranges.items()
        if only.choice is not None:
            return {key: only.choice[number % len(only.choice)]}
    return {key: ranges[key].at(share) for key, share in spread(seed, number, list(ranges)).items()}


def spread(seed: int, number: int, keys: Sequence[str]) -> dict[str, float]:
    """A share in [0, 1) for every key: points that fill the space evenly however many are taken, begun by the seed.

    Point k lies k strides from the first. The strides are powers of 1 / x with x ** (d + 1) = x + 1 in d dimensions:
    one has the golden ratio. Numbers drawn one by one would leave gaps where a cell has a few trials.
    """
    ratio = 2.0
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / (len(keys) + 1))
    shares = {}
    for place, key in enumerate(sorted(keys)):
        digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
        start = int.from_bytes(digest[:6]) / 2**48
        shares[key] = (start + number * ratio ** -(place + 1)) % 1.0
    return shares
