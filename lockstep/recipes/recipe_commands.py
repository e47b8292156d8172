"""The commands on recipes: list, show, copy, and every setting that a recipe may hold."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lockstep.recipes import read

recipes = typer.Typer(
    help="List, show and copy the packaged recipes; explain every setting.", invoke_without_command=True
)


@recipes.callback()
def list_recipes(context: typer.Context) -> None:
    """List the packaged recipes."""
    if context.invoked_subcommand is not None:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("recipe", style="cyan", no_wrap=True)
    table.add_column("what it reproduces")
    for recipe in read.list_recipes():
        table.add_row(recipe.name, recipe.summary)
    Console().print(table)


@recipes.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="A recipe's name, a TOML file, or a run's folder.", metavar="RECIPE")],
) -> None:
    """Print a recipe."""
    print(read.recipe_text(name), end="")


@recipes.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="A recipe's name, a TOML file, or a run's folder.", metavar="RECIPE")],
    file: Path,
) -> None:
    """Copy a recipe to FILE, to change it and train with it."""
    read.copy_recipe(name, file)
    print(f"Copied {name} to {file}; train it with: lockstep train {file}")


@recipes.command("settings")
def show_settings(
    pattern: Annotated[
        str,
        typer.Argument(help="Part of a key, such as lr or optim.; with * or ? the whole of one.", metavar="PATTERN"),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the docs.")] = False,
) -> None:
    """Explain every setting: its default, what it may be, what it does, and which recipes set it."""
    from lockstep.recipes.settings import draw_page, find_settings

    found = find_settings(pattern)
    if as_markdown:
        print(draw_page(found), end="")
    elif as_json:
        print(json.dumps([setting._asdict() for setting in found], indent=2, ensure_ascii=False))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("setting", style="cyan", no_wrap=True)
        for heading in ("default", "may be", "meaning", "set by"):
            table.add_column(heading, overflow="fold")
        for setting in found:
            table.add_row(setting.key, setting.default, setting.allowed, setting.meaning, ", ".join(setting.recipes))
        Console().print(table)
