"""`docs/recipes.md` against the recipes and the points that it describes."""

from collections.abc import Iterator
from pathlib import Path

from lockstep.recipes.points import find_family
from lockstep.recipes.read import list_recipes, load_recipe

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
ORIGINS = ("measured", "published", "expected", "not measured")


def read_rows(heading: str) -> Iterator[dict[str, str]]:
    """The rows of the table whose first heading this is."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    names = split(lines[start])
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield dict(zip(names, split(line), strict=True))


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_recipe_has_its_row_with_its_own_numbers() -> None:
    rows = {row["recipe"].strip("`"): row for row in read_rows("recipe")}
    assert sorted(rows) == [recipe.name for recipe in list_recipes()]
    for name, row in rows.items():
        config = load_recipe(name)[1]
        assert row["network"] == config.model.name
        assert int(row["batch"].replace(",", "")) == config.train.global_batch
        assert f"{row['epochs']}ep" == str(config.train.duration)
        for column in ("top-1", "time", "memory of a GPU"):
            assert any(origin in row[column] for origin in ORIGINS), f"{name}, {column}"


def test_the_points_are_those_that_recipes_are_scaled_by() -> None:
    family = find_family("lars")
    assert family is not None
    rows = list(read_rows("batch"))
    assert len(rows) == len(family.points)
    for row, point in zip(rows, family.points, strict=True):
        numbers = [
            float(row[name].replace(",", "")) for name in ("batch", "lr", "warm-up", "momentum", "decay", "epochs")
        ]
        wanted = [point.batch, point.lr, point.warmup, point.momentum, point.weight_decay, point.epochs]
        assert numbers == wanted
        assert row["from"] == point.source
