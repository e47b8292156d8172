"""The pictures of README and docs: what they state is stated in docs, and what is kept is what is drawn."""

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.report.made_run import make_run

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_figures", FIGURES / "draw.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in list_numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in list_numbers(one)]
    return [value] if isinstance(value, int | float) else []


def test_every_number_is_stated_in_the_docs() -> None:
    stated = (ROOT / "docs" / "results.md").read_text()
    for figure in json.loads((FIGURES / "results.json").read_text()).values():
        for number in list_numbers(figure["rows"]):
            shown = f"{number:,}" if isinstance(number, int) else f"{number:.2f}"
            assert re.search(rf"(?<![\d.,]){re.escape(shown)}(?![\d,])", stated), shown
        for commit in re.findall(r"[0-9a-f]{7}", figure["commit"]):
            assert f"`{commit}`" in stated


def test_the_pictures_kept_are_the_pictures_drawn(draw: ModuleType, tmp_path: Path) -> None:
    draw.draw_results(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (FIGURES / path.name).read_text(), f"{path.name} is old; run make figures"


def test_pictures_are_small_whole_and_fetch_nothing() -> None:
    pictures = [*FIGURES.glob("*.svg"), FIGURES / "report.png"]
    assert len(pictures) == 7
    for path in pictures:
        assert path.stat().st_size < 200_000
        pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        assert any(path.name in page.read_text() for page in pages)
        if path.suffix == ".svg":
            text = path.read_text()
            ElementTree.fromstring(text)
            assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
            assert not re.search(r"/(home|root|tmp|work|Users)/", text)


def test_a_terminal_is_recorded_without_paths_of_this_machine(draw: ModuleType, tmp_path: Path) -> None:
    draw.record_terminal(make_run(steps=800, run="resnet50-1"), tmp_path / "train.svg")
    text = " ".join("".join(ElementTree.parse(tmp_path / "train.svg").getroot().itertext()).split())
    assert "$ make train" in text
    assert "runs/resnet50-1" in text
    # Line by line: at the run's own pace, from the command to the last word.
    delays = re.findall(r"#t-line-(\d+)\)\" style=\"animation-delay:([\d.]+)s", (tmp_path / "train.svg").read_text())
    paced = [float(delay) for _, delay in sorted(delays, key=lambda pair: int(pair[0]))]
    assert paced == sorted(paced)
    assert paced[0] == 0.0
    assert 6.0 <= paced[-1] <= 7.0
    assert len(set(paced)) > 5
    assert str(tmp_path) not in text
