"""What is wrong with a recipe, in one sentence that names the key and says what would be right. Torch-free."""

import difflib

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.config import KEYS, LONGEST_SHOWN, SECTIONS, ImageSize, RunConfig, Section, show

# How each kind of pydantic error completes "KEY = VALUE must be …".
RULES = {
    "float_type": "a number, such as {example}",
    "finite_number": "a finite number, such as {example}",
    "int_type": "a whole number, such as {example}",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "string_unicode": "text in UTF-8",
    "tuple_type": "a list, such as {example}",
    "too_long": "a list of {max_length} values, such as {example}",
    "model_type": "a table of keys",
    "literal_error": "{expected}",
    "greater_than": "above {gt:g}, such as {example}",
    "greater_than_equal": "at least {ge:g}, such as {example}",
    "less_than": "below {lt:g}, such as {example}",
    "less_than_equal": "at most {le:g}, such as {example}",
    "value_error": "{error}",
}


def describe_invalid(invalid: ValidationError, where: str) -> str:
    """One sentence on the first error; a misspelt key comes before whatever else it caused."""
    errors = [error for error in invalid.errors() if error["type"] != "default_factory_not_called"]
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    return f"{_problem(first)} ({where}{more})."


def describe_unknown(key: str) -> str:
    """The opening of a sentence about a key that does not exist, with the nearest one that does."""
    name = key.rpartition(".")[2]

    def likeness(known: str) -> float:
        known_name = known.rpartition(".")[2]
        words, known_words = set(name.split("_")), set(known_name.split("_"))
        shared = len(words & known_words) / len(words | known_words)
        return _ratio(key, known) + _ratio(name, known_name) + shared

    if len(key) > LONGEST_SHOWN:
        return f"There is no key {key[:LONGEST_SHOWN]}…"
    return f"There is no key {key}; the nearest is {max((*SECTIONS, *KEYS), key=likeness)}"


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _problem(error: ErrorDetails) -> str:
    """What one pydantic error means, in terms of the recipe."""
    kind, location, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "value_error" and len(location) < 2:  # a combination: its validator wrote the whole sentence
        return str(context["error"])
    names = [part for part in location if isinstance(part, str)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if kind == "extra_forbidden":
        return describe_unknown(key)
    example = _example(names)
    if kind == "missing":
        return f"{key} is missing; give a value such as {example}"
    rule = RULES.get(kind, "something else, such as {example}").format(example=example, **context)
    return f"{key} = {show(error['input'])} must be {rule}"


def _example(names: list[str]) -> str:
    """A right value for a key: its default, or the example of a key that must be given."""
    tables: dict[str, type[Section]] = {**SECTIONS, ImageSize.section: ImageSize}
    model = tables.get(".".join(names[:-1]), RunConfig)
    field = model.model_fields[names[-1]]
    return show(field.examples[0] if field.examples else field.default)
