"""The list of GPU measurements: its commands exist, and it goes on where it was stopped."""

import importlib.util
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_documented import parse

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_gpu", ROOT / "experiments" / "measure_gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    return module


def test_every_command_exists_with_its_options(script: ModuleType, tmp_path: Path) -> None:
    for one in script.MEASUREMENTS:
        words = shlex.split(script.build_command(one, tmp_path, "a folder"))
        assert not any("{" in word for word in words)
        if words[0] != "make":
            assert words[1:3] == ["-m", "lockstep"]
            parse(words[3:])
        if words[3:4] == ["sweep"]:
            assert (ROOT / words[4]).is_file()


def test_what_is_done_is_not_done_again_and_what_fails_is(script: ModuleType, tmp_path: Path) -> None:
    good = replace(script.MEASUREMENTS[0], name="good", command="make --version")
    bad = replace(good, name="bad", command="make no-such-thing")
    assert script.measure(good, tmp_path, "", 60).startswith("done after")
    assert b"GNU Make" in (tmp_path / "good.log").read_bytes()
    assert script.measure(good, tmp_path, "", 60) == "was done before"
    for _ in range(2):
        assert script.measure(bad, tmp_path, "", 60).startswith("failed after 0 s, with 2")
    for left_s in (0, 0.3):
        assert script.measure(bad, tmp_path, "", left_s) == "no time left"


def test_a_name_that_is_none_is_a_sentence(script: ModuleType) -> None:
    assert [one.name for one in script.choose("ddp-4, tests")] == ["ddp-4", "tests"]
    with pytest.raises(SystemExit, match="There is no measurement ddp-5"):
        script.choose("ddp-5")
