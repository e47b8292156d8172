"""Damaged files by the hundred: each follows from its number, all are read or refused, and what is not is found out."""

import io
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from lockstep.bench import fuzz
from lockstep.bench.damage import damage_bytes, damage_text, damage_tree
from lockstep.bench.fuzz import SHARES, Outcome, build_kind, parse_case, plan_cases, seed_case, try_case, try_cases
from lockstep.bench.fuzz_kinds import Files
from lockstep.errors import LockstepError

# The program that tries files, with kinds that misbehave.
MISBEHAVING = """
import os, sys, time
from pathlib import Path
from lockstep.bench import fuzz
class Bad:
    def __init__(self, name): self.name = name
    def forge(self, chance): return {"file": b"x"}
    def use(self, folder, out):
        if self.name == "index": os.abort()
        if self.name == "plan": time.sleep(60)
        if self.name == "PNG": bytearray(2 << 30)
        if self.name == "JPEG": len(bytearray(b"x" * (200 << 20)))
        return True
fuzz.build_kind = Bad
fuzz._main(int(sys.argv[1]), Path(sys.argv[2]))
"""


def test_files_are_dealt_out_by_their_shares_and_numbered_by_kind() -> None:
    cases = plan_cases(200)
    assert Counter(kind for kind, _ in cases) == {kind: 2 * share for kind, share in SHARES.items()}
    assert sum(SHARES.values()) == 100
    assert len(set(cases)) == 200
    assert cases == plan_cases(400)[:200]


@pytest.mark.parametrize("name", ["recipe", "index", "PNG"])
def test_a_file_follows_from_seed_kind_and_number(name: str) -> None:
    kind, again = build_kind(name), build_kind(name)
    for number in range(5):
        forged = kind.forge(seed_case(3, (name, number)))
        assert forged == again.forge(seed_case(3, (name, number)))
        assert forged != kind.forge(seed_case(4, (name, number)))


def test_damage_is_done_to_bytes_text_and_trees() -> None:
    data, text = bytes(range(256)) * 4, "a = 1\nb = 22\n[c]\nd = 3.5\n"
    tree = {"a": [1, 2, {"b": "x"}], "c": 3.5}
    num_same = 0
    for number in range(300):
        chance = random.Random(number)
        num_same += damage_bytes(data, chance) == data
        num_same += damage_text(text, chance) == text
        spoilt = {"a": [1, 2, {"b": "x"}], "c": 3.5}
        damage_tree(spoilt, chance)
        num_same += spoilt == tree
    assert num_same < 90


def test_a_few_hundred_files_are_read_or_refused() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=120)
    assert fuzz.run(files=200, seed=20, case=None, workers=1, json_file=None, console=console), stream.getvalue()
    assert "200 files, seed 20: 0 problems." in stream.getvalue()
    assert all(kind in stream.getvalue() for kind in SHARES)


class Fake:
    """A kind that does as it is told."""

    name = "recipe"

    def __init__(self, word: str | Exception) -> None:
        self.word = word

    def forge(self, chance: random.Random) -> Files:
        return {"file": b"x"}

    def use(self, folder: Path, out: TextIO) -> bool:
        assert (folder / "file").read_bytes() == b"x"
        if isinstance(self.word, Exception):
            raise self.word
        return bool(self.word)


@pytest.mark.parametrize(
    ("word", "result"),
    [
        ("yes", "accepted"),
        ("", "refused"),
        (LockstepError("It is no good; take another."), "refused"),
        (LockstepError("Two\nlines."), "traceback"),
        (LockstepError("long " * 1000), "traceback"),
        (LockstepError("MemoryError"), "traceback"),
        (KeyError("x"), "traceback"),
    ],
)
def test_a_sentence_is_good_and_all_else_is_a_problem(word: str | Exception, result: str, tmp_path: Path) -> None:
    outcome = try_case(Fake(word), ("recipe", 0), 0, tmp_path)
    assert outcome.result == result
    assert bool(outcome.detail) == (result == "traceback")


def test_crashes_hangs_and_memory_are_seen_and_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "PROGRAM", (sys.executable, "-c", MISBEHAVING))
    monkeypatch.setattr(fuzz, "LIMIT_S", 4.0)
    kinds = ("recipe", "index", "plan", "PNG", "JPEG", "cluster")
    found = list(try_cases([(kind, 7) for kind in kinds], 0, tmp_path))
    results = ["accepted", "crash", "hang", "traceback", "accepted", "accepted"]
    assert [(outcome.kind, outcome.number, outcome.result) for outcome in found] == [
        (kind, 7, result) for kind, result in zip(kinds, results, strict=True)
    ]
    assert "Current thread" in found[2].detail  # where it hung
    assert "MemoryError" in found[3].detail
    assert found[4].num_bytes > 190e6


def test_a_problem_is_told_with_the_command_that_makes_it_again() -> None:
    stream = io.StringIO()
    outcome = Outcome("tar member", 12, "traceback", 0.1, 0, "KeyError: 'x'")
    fuzz._say(outcome, 5, Console(file=stream, width=200))
    assert "lockstep bench fuzz --seed 5 --case 'tar member:12'" in stream.getvalue()
    assert "KeyError" in stream.getvalue()
    assert parse_case("tar member:12") == ("tar member", 12)
    for wrong in ("tar member", "zebra:1", "index:x", "index:"):
        with pytest.raises(LockstepError, match="KIND:NUMBER"):
            parse_case(wrong)
