"""Values out of a file that somebody else may have written, each of its type and within measure. Torch-free."""

from typing import Any, get_args

from lockstep.plan.plan import Compile, Execution, Kernels

MOST = 1 << 62  # of any number in a profile: what is larger, nobody measured, and a float may not hold it


def read_time(value: object) -> float:
    """A time: finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def read_count(value: object, least: int = 0) -> int:
    """A whole number of things."""
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError(f"{value!r} is no count of at least {least}")
    return value


def check_types(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, each of the type it is declared with, as far as JSON has it."""
    plain = {"str": str, "int": int, "bool": bool, "float": (int, float)}
    for name, annotation in kind.__annotations__.items():
        wanted: Any = plain.get(getattr(annotation, "__name__", str(annotation)), str)
        if not isinstance(table[name], wanted) or (wanted is int and isinstance(table[name], bool)):
            raise ValueError(f"{name} is {table[name]!r}")
        if isinstance(table[name], int | float) and not abs(table[name]) <= MOST:  # which a NaN is not
            raise ValueError(f"{name} is out of all measure")
        if isinstance(table[name], str) and "[/" in table[name]:  # where a style ends, in the words of who prints it
            raise ValueError(f"{name} is no plain text")
    return {name: table[name] for name in kind.__annotations__}


def read_execution(table: dict[str, Any]) -> Execution:
    """A way to execute the step that there is."""
    execution = Execution(**check_types(Execution, table))
    if execution.kernels not in get_args(Kernels) or execution.compile not in get_args(Compile):
        raise ValueError("there is no such way to execute a step")
    return execution
