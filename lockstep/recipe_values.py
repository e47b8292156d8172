"""What values a recipe holds: durations, lists, how large a number may be, and how a value is shown. Torch-free."""

import json
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Duration:
    """A length of training in epochs ("90ep", "0.5ep") or steps ("1500st")."""

    LONGEST: ClassVar[float] = 1e12

    value: float
    unit: Literal["ep", "st"]

    @classmethod
    def parse(cls, given: object) -> "Duration":
        """Read a duration from its text; the error completes the sentence "KEY = VALUE must be …"."""
        if isinstance(given, Duration):
            return given
        text = given.strip() if isinstance(given, str) else ""
        try:
            value = float(text[:-2])
        except ValueError:
            value = math.nan
        unit = text[-2:]
        if (unit == "ep" and 0 <= value < math.inf) or (unit == "st" and value >= 0 and value.is_integer()):
            if value > cls.LONGEST:
                raise ValueError(f"at most {cls.LONGEST:g}{unit}")
            return cls(value, "ep" if unit == "ep" else "st")
        raise ValueError('a duration, in epochs such as "90ep" or whole steps such as "1500st"')

    def steps(self, steps_per_epoch: int) -> int:
        """The nearest whole number of steps."""
        return round(self.value * (steps_per_epoch if self.unit == "ep" else 1))

    def __str__(self) -> str:
        whole = int(self.value)
        return f"{whole if whole == self.value else self.value}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=core_schema.to_string_ser_schema())


# TOML has lists and no tuples, so these alone are not strict.
Pair = Annotated[tuple[float, float], Field(strict=False)]
Triple = Annotated[tuple[float, float, float], Field(strict=False)]
Durations = Annotated[tuple[Duration, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False, max_length=1000)]

# No run asks for more, and every number below them is exact, or finite, wherever it is used.
MOST = 10**9
LONGEST_S = 1e7
LARGEST = 1e38  # in FP32
LONGEST_SHOWN = 200  # characters of a value in a sentence


def show(value: object) -> str:
    """A value as a recipe writes it; of one without end, its beginning."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (ValueError, RecursionError):  # integers of thousands of digits, tables without end
        return "what was given"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
