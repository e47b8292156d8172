"""Recipes, manifests and event logs with anything in them: a sentence or a correct read, never a traceback.

Every case follows from its number, so that a failure can be repeated.
"""

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from lockstep.config import KEYS, RunConfig, to_toml
from lockstep.data.order import Cursor
from lockstep.engine import checkpoint
from lockstep.engine.build import Parts
from lockstep.engine.state import State, load_state
from lockstep.errors import LockstepError
from lockstep.events import encode, read_events
from lockstep.recipes.read import load_recipe
from lockstep.report.summary import summarize
from tests.engine.saving import save_state
from tests.engine.test_state import build_parts
from tests.ranks import world_of_one
from tests.test_events import EVENTS

ORDER = {"seed": 5, "num_samples": 130, "global_batch": 28, "data": {"labels": "ab", "names": "cd"}}
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
ABSURD: list[Any] = [
    *(-1, 0, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, -1e308, 1e-320, float("inf"), float("nan")),
    *("", "x", "1e308ep", "-1st", "infep", "nanst", "1e13st", "\0", "\ud800", "../../etc/passwd", "z" * 5000, "٣ep"),
    *(True, False, None, [], {}, [[]], {"": {}}, [1] * 1000, {"a": {"b": {"c": 1}}}, DEEP),
]
RAW = [
    "9" * 5000,
    "0x" + "f" * 5000,
    "-" + "9" * 5000,
    "1e999999",
    "[" * 5000,
    "[" * 5000 + "]" * 5000,
    '{"a":' * 5000,
    "{a=" * 3000 + "1" + "}" * 3000,
    "nan",
    "1979-05-27",
    '"\\ud800"',
    "\0",
    "﻿",
]


def damage_text(text: str, chance: random.Random) -> str:
    """The text with a piece cut out, doubled or replaced."""
    first, last = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    last = min(last, first + 30)
    piece = chance.choice(["", text[first:last] * 2, *RAW, chr(chance.randrange(1, 0xD800))])
    return text[:first] + piece + text[last:]


def spoil_tree(tree: Any, chance: random.Random) -> None:
    """Put something absurd in a place of the tree, or take the place away."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = chance.choice(keys)
        if isinstance(tree[key], dict | list) and tree[key] and chance.random() < 0.8:
            tree = tree[key]
            continue
        if chance.random() < 0.1:
            del tree[key]
        else:
            tree[key] = chance.choice(ABSURD)
        return


def check_sentence(text: object) -> None:
    assert "\n" not in str(text)
    assert len(str(text)) < 2000


def try_recipe(path: Path, text: str, *overrides: str) -> RunConfig | None:
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        _, config = load_recipe(str(path), overrides)
    except LockstepError as error:
        check_sentence(error)
        return None
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config
    config.train.duration.steps(10**6)
    return config


def test_a_recipe_of_damaged_text_is_a_sentence_or_a_recipe(tmp_path: Path) -> None:
    whole = to_toml(load_recipe("quickstart")[1])
    for number in range(300):
        chance = random.Random(f"text {number}")
        text = whole
        for _ in range(chance.randrange(1, 4)):
            text = damage_text(text, chance)
        try_recipe(tmp_path / "recipe.toml", text)


def test_any_value_of_any_key_is_a_sentence_or_a_recipe(tmp_path: Path) -> None:
    whole = to_toml(load_recipe("quickstart")[1])
    num_taken = 0
    for number in range(400):
        chance = random.Random(f"value {number}")
        key = chance.choice(KEYS)
        value = chance.choice([*ABSURD, *RAW])
        text = value if isinstance(value, str) else str(value) if not isinstance(value, dict | list) else ""
        num_taken += try_recipe(tmp_path / "recipe.toml", whole, f"{key}={text}") is not None
    assert 0 < num_taken < 200


def test_a_recipe_with_an_absurd_tree_is_a_sentence_or_a_recipe(tmp_path: Path) -> None:
    whole = tomllib.loads(to_toml(load_recipe("quickstart")[1]))
    for number in range(200):
        chance = random.Random(f"tree {number}")
        tree = json.loads(json.dumps(whole))
        spoil_tree(tree, chance)
        try:
            text = tomli_w.dumps(tree)
        except (TypeError, ValueError, RecursionError):  # what TOML cannot say
            continue
        try_recipe(tmp_path / "recipe.toml", text)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return build_parts(world_of_one())


@pytest.fixture(scope="module")
def manifest(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newer of two checkpoints' manifests."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for epoch in (1, 2):
        state = State(epoch * 5, Cursor(epoch, 0))
        path = save_state(folder, state, parts, world_of_one(), ORDER, keep=2).path  # type: ignore[union-attr]
    return path / "manifest.json"


def seal(manifest: dict[str, Any]) -> str:
    """A forger knows how to seal."""
    try:
        return json.dumps(manifest | {"seal": checkpoint._seal(manifest)})
    except (ValueError, RecursionError):
        return json.dumps({"format": 1, "seal": ""})


def try_manifest(folder: Path, parts: Parts) -> int:
    heard: list[str] = []
    try:
        state, _ = load_state(folder, parts, world_of_one(), ORDER, heard.append)
    except LockstepError as error:
        check_sentence(error)
        return 0
    for text in heard:
        check_sentence(text)
    # What is taken up is what one of the two says.
    assert (state.step, state.cursor.epoch, state.cursor.position) == ((10, 2, 0) if not heard else (5, 1, 0))
    assert 0 <= int(parts.rule.count) <= 10**15
    return state.step


def test_a_forged_manifest_is_passed_over_or_true(manifest: Path, parts: Parts) -> None:
    whole, taken = manifest.read_text(), []
    for number in range(300):
        chance = random.Random(f"manifest {number}")
        tree = json.loads(whole)
        for _ in range(chance.randrange(1, 3)):
            spoil_tree(tree, chance)
        manifest.write_bytes(seal(tree).encode(errors="surrogatepass"))
        taken.append(try_manifest(manifest.parents[1], parts))
    manifest.write_text(whole)
    assert taken.count(5) > 200


def test_a_manifest_of_damaged_text_is_passed_over(manifest: Path, parts: Parts) -> None:
    whole = manifest.read_text()
    for number in range(150):
        text = damage_text(whole, random.Random(f"manifest text {number}"))
        manifest.write_bytes(text.encode(errors="surrogatepass"))
        try_manifest(manifest.parents[1], parts)
    manifest.write_text(whole)


def test_a_log_of_damaged_records_is_a_sentence_or_a_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(600):
        chance = random.Random(f"log {number}")
        records = [json.loads(encode(event)) for event in EVENTS]
        spoil_tree(chance.choice(records), chance)
        lines = [json.dumps(record) if record else "" for record in records if _can_be_json(record)]
        if chance.random() < 0.5:
            place = chance.randrange(len(lines))
            lines[place] = damage_text(lines[place] or "{}", chance)
        path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        try:
            summary = summarize(read_events(path))
            json.dumps(summary).encode()
        except LockstepError as error:
            check_sentence(error)


def _can_be_json(record: Any) -> bool:
    try:
        json.dumps(record)
    except (ValueError, RecursionError):
        return False
    return True
