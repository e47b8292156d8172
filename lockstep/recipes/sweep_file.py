"""What a sweep is asked to do: a recipe, what varies, how it is measured (docs/sweeps.md). Torch-free.

A sweep file is TOML. Settings stand in its tables under their whole names, such as optim.lr; each value is checked by
the recipe's own rules when `trials.py` makes the trials.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lockstep.errors import LockstepError
from lockstep.files import read_small
from lockstep.recipe_values import LONGEST_SHOWN, show
from lockstep.recipes.complaints import RULES
from lockstep.recipes.read import MAX_BYTES, is_packaged, read_toml

Measure = Literal["top1", "average_top1", "best_top1", "steps_to", "epochs_to", "images_to", "seconds_to"]
TO_TARGET = ("steps_to", "epochs_to", "images_to", "seconds_to")  # where less is better
RANKS = "ranks"  # no setting of a recipe: how many ranks a trial has, as in `lockstep train --ranks`
MOST_VALUES = 1000  # of one list
MOST_SEED = 2**63 - 1
DEPTH = 4  # of tables in tables: `model.settings.name` has three


def _flatten(given: object, is_value: Callable[[dict[str, Any]], bool]) -> object:
    """Tables in tables as one, by whole names: TOML reads optim.lr = 1 as {optim = {lr = 1}}."""

    def walk(table: dict[str, Any], before: str, depth: int) -> Iterable[tuple[str, Any]]:
        for key, value in table.items():
            name = f"{before}{key}"
            if isinstance(value, dict) and not is_value(value):
                if depth == DEPTH:
                    raise ValueError("settings by their names, such as optim.lr")
                yield from walk(value, f"{name}.", depth + 1)
            else:
                yield name, value

    return dict(walk(given, "", 1)) if isinstance(given, dict) else given


class Part(BaseModel):
    """One table of a sweep file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Range(Part):
    """Where a random value comes from: one of the three."""

    uniform: Annotated[tuple[float, float], Field(strict=False)] | None = Field(default=None, examples=[[0.5, 1.5]])
    log: Annotated[tuple[float, float], Field(strict=False)] | None = Field(default=None, examples=[[0.01, 1.0]])
    choice: Annotated[list[Any], Field(min_length=1, max_length=MOST_VALUES)] | None = Field(
        default=None, examples=[[0.9, 0.95]]
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        given = [value for value in (self.uniform, self.log, self.choice) if value is not None]
        if len(given) != 1:
            raise ValueError("one of uniform = [low, high], log = [low, high] and choice = [values]")
        for name, pair in (("uniform", self.uniform), ("log", self.log)):
            if pair is not None and not pair[0] < pair[1]:
                raise ValueError(f"{name} = [low, high] with the lower first")
        if self.log is not None and self.log[0] <= 0:
            raise ValueError("log = [low, high] with both above 0")
        return self

    def at(self, share: float) -> Any:
        """The value at a share in [0, 1) of the range, to four digits."""
        if self.choice is not None:
            return self.choice[int(share * len(self.choice))]
        if self.log is not None:
            low, high = map(math.log, self.log)
            value = math.exp(low + share * (high - low))
        else:
            assert self.uniform is not None
            value = self.uniform[0] + share * (self.uniform[1] - self.uniform[0])
        return float(f"{value:.4g}")


class Scale(Part):
    """A value is meant for one batch, and is multiplied by (batch / at) ** power for others."""

    at: int = Field(ge=1, le=10**9, examples=[256])
    power: float = Field(default=1.0, ge=-2, le=2)


def _is_range(table: dict[str, Any]) -> bool:
    return bool(table) and table.keys() <= Range.model_fields.keys()


def _is_scale(table: dict[str, Any]) -> bool:
    return bool(table) and table.keys() <= Scale.model_fields.keys()


def _read_seeds(seeds: list[int]) -> list[int]:
    if any(not 0 <= seed <= MOST_SEED for seed in seeds) or len(set(seeds)) != len(seeds):
        raise ValueError("whole numbers from 0 on, each once")
    return seeds


Fixed = Annotated[dict[str, Any], BeforeValidator(lambda given: _flatten(given, lambda table: False))]
Grid = Annotated[
    dict[str, Annotated[list[Any], Field(min_length=1, max_length=MOST_VALUES)]],
    BeforeValidator(lambda given: _flatten(given, lambda table: False)),
]
Ranges = Annotated[dict[str, Range], BeforeValidator(lambda given: _flatten(given, _is_range))]
Scales = Annotated[dict[str, Scale], BeforeValidator(lambda given: _flatten(given, _is_scale))]
Seeds = Annotated[list[int], Field(max_length=MOST_VALUES), AfterValidator(_read_seeds)]


class Cell(Part):
    """A row of the table: settings under a name."""

    name: str = Field(min_length=1, max_length=60, examples=["LARS"])
    set: Fixed = Field(default_factory=dict)
    random: Ranges = Field(default_factory=dict)  # beside those of the sweep, or in their place
    scale: Scales = Field(default_factory=dict)  # likewise


class SweepFile(Part):
    """All of a sweep file."""

    recipe: str = Field(examples=["quickstart"])
    description: str = ""
    measure: Measure = "top1"
    target: float | None = Field(default=None, gt=0, lt=1, examples=[0.9])
    seeds: Seeds = Field(default=[0], min_length=1)
    trials: int = Field(default=1, ge=1, le=MOST_VALUES)  # of a cell at each point of the grid
    draw_seed: int = Field(default=0, ge=0, le=MOST_SEED)
    confirm: Seeds = Field(default=[], examples=[[1, 2, 3]])  # seeds of the second stage
    checkpoints: Literal["best", "all", "none"] = "best"  # of finished trials, that stay
    set: Fixed = Field(default_factory=dict)
    grid: Grid = Field(default_factory=dict)
    random: Ranges = Field(default_factory=dict)
    scale: Scales = Field(default_factory=dict)
    cells: list[Cell] = Field(default_factory=list, max_length=100)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.measure in TO_TARGET and self.target is None:
            raise ValueError(f"measure = {show(self.measure)} needs target, an accuracy such as 0.9")
        names = [cell.name for cell in self.cells]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"Two cells have the name {show(twice)}; give each its own")
        if both := sorted(set(self.seeds) & set(self.confirm)):
            raise ValueError(f"confirm = {show(self.confirm)} holds seed {both[0]}, which chose the best; take others")
        for cell in self.rows():
            varied = [*self.grid, *self.random, *cell.random]
            if clash := sorted({key for key in self.grid if key in {**self.random, **cell.random}}):
                raise ValueError(f"{clash[0]} stands in [grid] and in a range; keep one of them")
            if "train.seed" in {*varied, *self.set, *cell.set}:
                raise ValueError("train.seed is what seeds = [0] and confirm = [1, 2] are for; leave it out")
            if clash := sorted({*self.grid, *self.random, *cell.random} & cell.set.keys()):
                raise ValueError(f"cell {show(cell.name)} sets {clash[0]}, which the sweep varies; keep one of them")
        return self

    def rows(self) -> list[Cell]:
        """The cells; one without a name where none is given."""
        return self.cells or [Cell(name="all")]


def read_sweep(path: Path) -> tuple[SweepFile, str]:
    """A sweep file, and its recipe as a command takes it: a name, or a file beside the sweep's."""
    where = f"Sweep {path}"
    try:
        text = read_small(path, MAX_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise LockstepError(f"There is no file {path}; give a sweep file (docs/sweeps.md).") from None
    except OSError as error:
        raise LockstepError(f"Cannot read {path}: {error.strerror}; give a sweep file (docs/sweeps.md).") from None
    except UnicodeDecodeError:
        raise LockstepError(f"{path} is not a text file in UTF-8; give a sweep in TOML.") from None
    try:
        sweep = SweepFile.model_validate(read_toml(text, where))
    except ValidationError as error:
        raise LockstepError(f"{_describe(error)} ({path}).") from None
    beside = path.parent / sweep.recipe
    return sweep, sweep.recipe if is_packaged(sweep.recipe) or not beside.exists() else str(beside)


def _describe(invalid: ValidationError) -> str:
    """One sentence on the first error; a misspelt key comes before whatever else it caused."""
    first = min(invalid.errors(), key=lambda error: error["type"] != "extra_forbidden")
    kind, location, context = first["type"], first["loc"], first.get("ctx", {})
    if kind == "value_error" and not location:  # a combination: its validator wrote the whole sentence
        return str(context["error"])
    model = _find_model(location[:-1])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    key = key[:LONGEST_SHOWN]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1, cutoff=0.0)
        return f"A sweep has no key {key}; the nearest is {near[0]}"
    field = model.model_fields.get(str(location[-1]))
    example = show(field.examples[0] if field and field.examples else field.get_default() if field else [0.1])
    if kind == "missing":
        return f"{key} is missing; give a value such as {example}"
    more = {"too_short": "a list of values", "list_type": "a list of values", "dict_type": "a table of settings"}
    lengths = {"string_too_long": "shorter", "string_too_short": "longer"}
    rule = {**RULES, **more, **lengths}.get(kind, "something else, such as {example}")
    return f"{key} = {show(first['input'])} must be {rule.format(example=example, **context)}"


def _find_model(location: tuple[int | str, ...]) -> type[Part]:
    """Which table an error lies in."""
    inner: Mapping[str, type[Part]] = {"cells": Cell, "random": Range, "scale": Scale}
    return next((inner[part] for part in reversed(location) if isinstance(part, str) and part in inner), SweepFile)
