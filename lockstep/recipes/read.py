"""A recipe's name, file or run folder → the configuration tree (step 0 on the walk). Torch-free."""

import difflib
import json
import os
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from lockstep.config import KEYS, SECTIONS, RunConfig, Section
from lockstep.errors import LockstepError
from lockstep.files import read_small
from lockstep.named import describe
from lockstep.recipe_values import LONGEST_SHOWN
from lockstep.recipes.complaints import describe_invalid, describe_no_table, describe_unknown

MAX_BYTES = 1 << 20  # of a recipe; what is larger is none
WEIGHTS = (".pth", ".pt", ".safetensors", ".ckpt", ".onnx")
DATA, SPLITS = (".jpg", ".jpeg", ".png", ".tar", ".parquet"), ("train", "val", "validation", "test")
SETTINGS = "model.settings"  # the one key that holds a table
# How large a learning rate is with each update rule; what serves with one may be a thousand times too much for another.
AS_SGD, AS_ADAM = "0.1 at a batch of 256", "0.001"
USUAL_RATES = {
    "sgd": AS_SGD, "svrg": AS_SGD, "halp": AS_SGD, "lars": "1 to 10", "adamw": AS_ADAM, "lamb": AS_ADAM, "muon": "0.02",
}  # fmt: skip


class RecipeInfo(NamedTuple):
    """One line of the list of packaged recipes."""

    name: str
    summary: str


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> tuple[str, RunConfig]:
    """Read a packaged recipe, a TOML file or a run folder, with `section.key=value` overrides: (run name, tree)."""
    name, where, text = _find(name_or_path)
    raw = read_toml(text, where)
    if overrides:
        raw, where = apply_overrides(raw, overrides), f"{where} with --set"
    try:
        # Empty tables for the required sections: a missing key is then named itself, not only its section.
        return name, RunConfig.model_validate({"optim": {}, "train": {}, **raw})
    except ValidationError as error:
        raise LockstepError(describe_invalid(error, where)) from None


def read_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text; what is none is a sentence."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise LockstepError(f"{where} is nested too deeply; give plain tables.") from None
    except ValueError as error:  # no TOML, or an integer of thousands of digits
        raise LockstepError(f"{where} is not valid TOML: {str(error).rstrip('.')}.") from None


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The recipe with `section.key=value` texts put in; values are TOML, and what is not TOML is a bare string.

    Another update rule takes the old one's own settings out of the recipe, and so does any choice of that kind; those
    that are given here too stay, for validation to refuse.
    """
    result = dict(raw)
    given: set[str] = set()
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            key = key[:LONGEST_SHOWN]
            raise LockstepError(f"--set {key} has no value; write --set {key}=VALUE.")
        value = toml_value(text)
        table_of, _, setting = key.rpartition(".")
        if table_of == SETTINGS and setting:  # of a network that is not known here: any name may be one
            key, value = SETTINGS, {**_read_table(result), setting: value}
        if key not in (*SECTIONS, *KEYS):
            raise LockstepError(f"{describe_unknown(key, value, is_override=True)} (--set {override[:LONGEST_SHOWN]}).")
        if key in SECTIONS and (meant := describe_no_table(key, value, is_override=True)):
            raise LockstepError(f"{meant} (--set {override[:LONGEST_SHOWN]}).")
        section, _, name = key.rpartition(".")
        if not section:
            result[name] = value
        elif isinstance(table := result.get(section, {}), dict):  # anything else is for validation to refuse
            result[section] = {**table, name: value}
        given.add(key)
    return {
        name: _drop_idle(SECTIONS[name], table, given) if name in SECTIONS and isinstance(table, dict) else table
        for name, table in result.items()
    }


def _read_table(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the network so far; what is no table is for validation to refuse."""
    model = raw.get("model", {})
    settings = model.get("settings", {}) if isinstance(model, dict) else {}
    return settings if isinstance(settings, dict) else {}


def _drop_idle(model: type[Section], table: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The table without the recipe's keys that a key among `given`, by its new value, leaves without effect."""

    def is_idle(key: str) -> bool:
        if key not in model.only_with or f"{model.section}.{key}" in given:
            return False
        switch, values = model.only_with[key]
        return f"{model.section}.{switch}" in given and table[switch] not in values

    return {key: value for key, value in table.items() if not is_idle(key)}


def describe_kept_rate(name_or_path: str, overrides: Sequence[str]) -> str:
    """A sentence where another update rule than the recipe's is to take the recipe's learning rate; else empty."""
    if "optim.lr" in (override.partition("=")[0].strip() for override in overrides):
        return ""
    _, before = load_recipe(name_or_path)
    _, now = load_recipe(name_or_path, overrides)
    old, new, kept = before.optim.name, now.optim.name, now.optim.lr
    if kept != before.optim.lr or USUAL_RATES[old] == USUAL_RATES[new]:
        return ""
    return (
        f"optim.name = {new} keeps the recipe's optim.lr = {kept:g}, which was chosen for {old}; with {new} it is "
        f"usually about {USUAL_RATES[new]}: set optim.lr too."
    )


def write_setting(key: str, value: Any) -> str:
    """A setting as an override, `section.key=value`."""
    return f"{key}={_write_value(key, value)}"


def _write_value(key: str, value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_write_value(key, item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_write_value(key, item) for item in value) + "]"
    if value is None or callable(value):
        raise LockstepError(f"{key} = {describe(value)} is no setting; give text, a number, true or false, or a list.")
    return json.dumps(value, default=str, ensure_ascii=False)


def list_recipes() -> list[RecipeInfo]:
    """The packaged recipes by name, each with the first sentence of its opening comment."""
    return [RecipeInfo(name, _first_sentence(recipe_text(name))) for name in _recipe_names()]


def recipe_text(name_or_path: str) -> str:
    """A packaged recipe, a file or a run folder's configuration, as written."""
    return _find(name_or_path)[2]


def is_packaged(name: str) -> bool:
    """Whether a packaged recipe has this name."""
    return name in _recipe_names()


def copy_recipe(name: str, path: str | Path) -> None:
    """Write a recipe to a new file, to be edited there."""
    write_recipe(recipe_text(name), path)


def write_recipe(text: str, path: str | Path) -> None:
    """Write a recipe's text to a new file; one that is there stays."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise LockstepError(f"{path} exists already; give another file name, or remove it first.") from None
    except OSError as error:
        raise LockstepError(f"Cannot write {path}: {error.strerror}.") from None


def _recipe_names() -> list[str]:
    files = resources.files("lockstep.recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def _find(name_or_path: str) -> tuple[str, str, str]:
    """(run name, what to call it in a sentence, text) of a recipe, a file or a run folder."""
    if is_packaged(name_or_path):
        packaged = resources.files("lockstep.recipes") / f"{name_or_path}.toml"
        return name_or_path, f"recipe {name_or_path}", packaged.read_text(encoding="utf-8")
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.toml"
        if not path.exists():
            raise LockstepError(
                f"{name_or_path} is a folder of data and no recipe; train on it with such as: lockstep train "
                f"quickstart --set data.source=folder --set {shlex.quote(f'data.path={name_or_path}')}."
                if _looks_like_data(Path(name_or_path))
                else f"The folder {name_or_path} holds no config.toml; give a recipe or a run's folder."
            )
    if path.suffix.lower() in WEIGHTS:
        raise LockstepError(
            f"{name_or_path} is a file of weights and no recipe; train a recipe that starts from them with --set "
            f"{shlex.quote(f'model.weights={name_or_path}')}."
        )
    try:
        text = read_small(path, MAX_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise LockstepError(_no_recipe(name_or_path)) from None
    except OSError as error:
        raise LockstepError(f"Cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise LockstepError(f"{path} is not a text file in UTF-8; give a recipe in TOML.") from None
    name = path.absolute().parent.name if path.name == "config.toml" else path.stem
    return name, f"recipe {path}", text


def _looks_like_data(folder: Path) -> bool:
    """Whether a folder has what folders of images, packs and tar files have."""
    try:
        with os.scandir(folder) as entries:
            return any(
                entry.name.lower().endswith(DATA) or (entry.name in SPLITS and entry.is_dir()) for entry in entries
            )
    except OSError:
        return False


def _no_recipe(name: str) -> str:
    """The sentence for a recipe that is neither packaged nor a file."""
    if near := difflib.get_close_matches(name, _recipe_names(), n=2):
        return f"There is no recipe and no file {name}; did you mean {' or '.join(near)}?"
    return f"There is no recipe and no file {name}; the recipes are {', '.join(_recipe_names())}."


def _first_sentence(text: str) -> str:
    comment: list[str] = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".") + "."


def toml_value(text: str) -> Any:
    """A value as an override has it: TOML, and what is not TOML is a bare string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
