"""Every setting of a recipe: default, range, meaning, and which packaged recipes set it. Torch-free.

Read from the configuration's own models, so that nothing is said twice: `lockstep recipes settings` prints it, and
`docs/settings.md` is made of it.
"""

import fnmatch
import tomllib
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from lockstep.config import SECTIONS, RunConfig, Section
from lockstep.errors import LockstepError
from lockstep.recipe_values import LARGEST, Duration, show
from lockstep.recipes.complaints import describe_unknown, find_elsewhere
from lockstep.recipes.read import SETTINGS, list_recipes, recipe_text

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Duration: 'a duration, such as "90ep" or "1500st"',
}
PAGE = """\
# Settings

Every key of a recipe, made by `make settings` from the configuration's own models; `lockstep recipes settings
[PATTERN]` prints the same in a terminal, `--json` for programs. A recipe gives a key in its section's table, a command
by `--set section.key=VALUE`. A duration counts epochs (`"90ep"`) or steps (`"1500st"`).
"""


class Setting(NamedTuple):
    """One key of a recipe."""

    key: str
    default: str  # as a recipe writes it; empty where it must be given
    allowed: str
    meaning: str
    recipes: dict[str, str]  # those that set it, and to what


def find_settings(pattern: str = "") -> list[Setting]:
    """The settings whose key or meaning holds the pattern, or that other trainers call so; wildcards mean a key."""
    word = pattern.lower()
    if any(sign in word for sign in "*?["):
        found = [setting for setting in list_settings() if fnmatch.fnmatchcase(setting.key, word)]
    else:
        key = find_elsewhere(pattern).partition(" ")[0]
        key = SETTINGS if key.startswith(f"{SETTINGS}.") else key  # what a network takes is no setting by itself
        found = [setting for setting in list_settings() if word in setting.key or setting.key == key]
        found = found or [setting for setting in list_settings() if word in setting.meaning.lower()]
    if not found:
        raise LockstepError(f"{describe_unknown(pattern)} (lockstep recipes settings lists all of them).")
    return found


def list_settings() -> list[Setting]:
    """All settings, in the order of the configuration."""
    models: list[type[Section]] = [RunConfig, *SECTIONS.values()]
    return [
        _describe(model, name, field)
        for model in models
        for name, field in model.model_fields.items()
        if not (model is RunConfig and name in SECTIONS)
    ]


def _describe(model: type[Section], name: str, field: FieldInfo) -> Setting:
    key = f"{model.section}.{name}".removeprefix(".")
    if field.is_required():
        default = ""
    elif field.default_factory is not None:
        default = "follows the others"
    else:
        default = show(field.default)
    meaning = field.description or ""
    if name in model.only_with:
        switch, values = model.only_with[name]
        meaning += f"; only with {model.section}.{switch} = {' or '.join(values)}"
    return Setting(key, default, describe_allowed(field), meaning, _find_recipes(model.section, name))


def describe_allowed(field: FieldInfo) -> str:
    """What a value may be, in words."""
    kind = _name_kind(field.annotation)
    low = _describe_end(field, (("ge", "at least"), ("gt", "above")))
    high = _describe_end(field, (("le", "at most"), ("lt", "below")))
    limits = " and ".join(filter(None, (low, high)))
    return f"{kind}, {limits}" if limits else kind


def _describe_end(field: FieldInfo, signs: tuple[tuple[str, str], ...]) -> str:
    for limit in field.metadata:
        for attribute, word in signs:
            value = getattr(limit, attribute, LARGEST)
            if value != LARGEST:  # FP32's own, which is no news
                return f"{word} {value if isinstance(value, int) else format(value, '.10g')}"
    return ""


def _name_kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(map(show, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_name_kind(kind) for kind in get_args(annotation) if kind is not NoneType)
    if get_origin(annotation) is tuple:
        kinds = [kind for kind in get_args(annotation) if kind is not Ellipsis]
        if isinstance(kinds[0], type) and issubclass(kinds[0], Section):
            return f"a list of tables with {' and '.join(kinds[0].model_fields)}"
        many = "a list" if Ellipsis in get_args(annotation) else f"a list of {len(kinds)}"
        return f"{many}, each {_name_kind(kinds[0])}"
    return KINDS.get(annotation, "text")


def _find_recipes(section: str, name: str) -> dict[str, str]:
    """The packaged recipes that set a key, and to what."""
    found = {}
    for recipe, tables in _read_recipes().items():
        table = tables.get(section, {}) if section else tables
        if name in table:
            found[recipe] = show(table[name])
    return found


@cache
def _read_recipes() -> dict[str, dict[str, Any]]:
    return {recipe.name: tomllib.loads(recipe_text(recipe.name)) for recipe in list_recipes()}


def draw_page(settings: list[Setting]) -> str:
    """The page of the docs: a table for each section."""
    lines = [PAGE]
    for section in dict.fromkeys(setting.key.rpartition(".")[0] for setting in settings):
        model = SECTIONS.get(section, RunConfig)
        lines += [f"## {section or 'Top level'}\n", f"{model.__doc__}\n"]
        lines += ["| key | default | may be | meaning | set by |", "| --- | --- | --- | --- | --- |"]
        for setting in settings:
            if setting.key.rpartition(".")[0] == section:
                by = ", ".join(f"{name} ({value})" for name, value in setting.recipes.items())
                default = f"`{setting.default}`" if setting.default else "must be given"
                cells = (f"`{setting.key}`", default, setting.allowed, setting.meaning, by)
                lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)
