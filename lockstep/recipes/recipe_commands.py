"""The commands on recipes: list, show, copy, and every setting that a recipe may hold."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.recipe_values import show
from lockstep.recipes import read

recipes = typer.Typer(
    help="List, show, copy and scale the packaged recipes; explain every setting.", invoke_without_command=True
)
RecipeName = Annotated[str, typer.Argument(help="A recipe's name, a TOML file, or a run's folder.", metavar="RECIPE")]


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
    print("For another batch: lockstep recipes scale RECIPE --batch B (docs/recipes.md)")


@recipes.command("show")
def show_recipe(
    name: RecipeName,
) -> None:
    """Print a recipe."""
    print(read.recipe_text(name), end="")


@recipes.command("copy")
def copy_recipe(
    name: RecipeName,
    file: Annotated[Path, typer.Argument(help="The new recipe.", metavar="FILE")],
) -> None:
    """Copy a recipe to FILE, to change it and train with it."""
    read.copy_recipe(name, file)
    print(f"Copied {name} to {file}; train it with: lockstep train {file}")


@recipes.command("scale")
def scale_recipe(
    name: RecipeName,
    batch: Annotated[int, typer.Option("--batch", help="The global batch to derive it for.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write the recipe to this new file.")] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Training samples of an epoch, where data.path does not tell.")
    ] = None,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the recipe instead of the table.")] = False,
) -> None:
    """Derive a recipe for another batch from published points, and say where each value comes from."""
    from lockstep.recipes.transfer import scale_recipe

    scaled = scale_recipe(name, batch, samples)
    if out is not None:
        read.write_recipe(scaled.toml, out)
    if as_toml:
        print(scaled.toml, end="")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", style="cyan", no_wrap=True)
    for heading in ("now", f"at {batch:,}"):
        table.add_column(heading, justify="right")
    table.add_column("where it comes from", overflow="fold")
    for item in scaled.derived:
        why = Text.assemble(item.why, (f"; {item.untested}", "yellow") if item.untested else "")
        table.add_row(item.key, show(item.before), show(item.after), why)
    console = Console()
    console.print(table)
    for note in scaled.notes:
        console.print(Text(note))
    if out is not None:
        console.print(Text(f"Written to {out}; train it with: lockstep train {out}"))


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
