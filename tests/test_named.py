"""Names of what users bring: found again by another process, or refused by one sentence."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.named import find_name, find_named, is_name, name_being_imported, phrase_error
from tests import own


class Outer:
    class Inner:
        pass

    def method(self) -> None: ...


@pytest.mark.parametrize("value", [own.build_net, own.Pictures, Outer.Inner, Outer.method, Path, LockstepError])
def test_a_name_leads_back_to_what_it_names(value: object) -> None:
    assert find_named(find_name(value), "model.name") is value


def make_local() -> Callable[[], None]:
    def local() -> None: ...

    return local


def from_a_script() -> None: ...


from_a_script.__module__ = "__main__"


@functools.wraps(own.build_net)
def hidden(num_classes: int) -> Any:
    """Under its name lies another function."""


@pytest.mark.parametrize(
    "value",
    [
        lambda: 0,
        make_local(),
        from_a_script,
        hidden,
        own.Pictures(1),
        functools.partial(own.build_net, 2),
        3,
        None,
        own,
    ],
)
def test_what_another_process_would_not_find_has_no_name(value: object) -> None:
    assert find_name(value) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:b", True),
        ("pack.mod:Outer.Inner", True),
        ("données:été", True),
        ("folder", False),
        ("C:/images", False),
        ("/data/x:y", False),
        ("a:", False),
        (":b", False),
        ("a.:b", False),
        ("a:b:c", False),
        ("1a:b", False),
        ("a:b\n", False),
        ("a" * 300 + ":b", False),
    ],
)
def test_what_a_name_looks_like(text: str, expected: bool) -> None:
    assert is_name(text) is expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "no_such_module:x",
            r"optim\.loss = no_such_module:x cannot be imported .*start from the folder that holds no_s",
        ),
        ("tests.own:nothing", r"tests\.own has no nothing; check the name behind the colon"),
        ("tests.own:Pictures.nothing", r"has no Pictures\.nothing"),
        ("leaving:x", "cannot be imported .*SystemExit"),
        ("broken:x", "cannot be imported .*ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(LockstepError, match=words) as caught:
        find_named(name, "optim.loss")
    assert "\n" not in str(caught.value)
    assert name_being_imported() == ""


def test_a_module_in_the_current_folder_is_found_and_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from lockstep.named import name_being_imported\nheard = name_being_imported()\n"
    )
    (tmp_path / "json.py").write_text("dumps = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert find_named("only_here:heard", "model.name") == "only_here"
    assert callable(find_named("json:dumps", "model.name"))


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert phrase_error(ValueError("a\n b.")) == "ValueError: a b"
    assert phrase_error(KeyError()) == "KeyError"
    assert len(phrase_error(ValueError("x" * 10_000))) < 300
