"""What README and docs tell people to type: every command, option and setting in their blocks exists."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from lockstep.cli import app
from lockstep.recipes.read import is_packaged, load_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ |torchrun .* -m )?(lockstep [a-z].*)$", re.MULTILINE)


def list_commands(page: Path) -> list[str]:
    """The command lines in a page's blocks, those that go on in the next line joined."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [found for block in blocks for found in COMMAND.findall(block.replace("\\\n", " "))]


def parse(words: list[str]) -> None:
    """As the program would, up to the point where it would begin."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    while words and hasattr(command, "resolve_command"):  # a group; some do something by themselves
        name, command, words = command.resolve_command(context, words)
        context = typer.Context(command, parent=context, info_name=name)
    command.make_context(command.name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_the_page_exists_with_its_options_and_settings(page: Path) -> None:
    for line in list_commands(page):
        words = shlex.split(line, comments=True)[1:]
        if any("RECIPE" in word or "[--" in word or word in ("…", "...") for word in words):
            continue  # how a command is written in general
        try:
            parse(list(words))
            settings = [value for word, value in pairwise(words) if word == "--set"]
            if words[0] == "train" and is_packaged(words[1]):
                load_recipe(words[1], settings)
        except Exception as error:  # of whichever parser the command line has
            pytest.fail(f"{line}: {error}")


def test_the_readme_is_full_of_commands() -> None:
    assert len(list_commands(ROOT / "README.md")) > 25
