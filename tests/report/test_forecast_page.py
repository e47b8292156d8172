"""The page of a plan: its numbers are those of `--json`, and its sliders work in a real browser."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.errors import LockstepError
from lockstep.plan.cluster import read_planned
from lockstep.plan.device import to_json
from lockstep.plan.grid import build_grid
from lockstep.plan.sweep import plan_sizes
from lockstep.plan.workload import describe_workload
from lockstep.recipes.read import load_recipe
from lockstep.report.page.forecast_page import COLUMNS, NEEDS, PARTS, build_forecast
from tests.plan.synthetic import synthesize
from tests.report.browser import Page, open_browser
from tests.report.test_browser import check
from tests.report.test_page import HOSTILE

PROFILE = synthesize(rates={16: 4803.0, 128: 9713.0, 512: 11156.0})
CLUSTER = """
nodes = 3
device = "H100"
ranks_per_node = 8
wiring = "nvlink"
nccl = ["ring", "tree", "nvls"]
nics_per_node = 8
cores_per_node = 112
storage_gbyte_per_s = 40
dollars_per_device_hour = 4.916
watts_per_device = 1275
jitter = 0.01
intra = {{ latency_us = 1.9, gbit_per_s = 2960 }}
nvls = {{ latency_us = 25, gbit_per_s = 3816 }}
inter = {{ latency_us = {latency_us}, gbit_per_s = {gbit_per_s} }}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves: a page, its plan as JSON, and the plan for a network wider by 2 and slower by 4."""
    folder = tmp_path_factory.mktemp("forecast")
    (folder / "profile.json").write_text(to_json(PROFILE), encoding="utf-8")
    for name, gbit_per_s, latency_us, files in (
        ("plan", 10, 8, [f"--html={folder / 'plan.html'}"]),
        ("other", 20, 32, []),
    ):
        cluster = folder / f"{name}.toml"
        cluster.write_text(CLUSTER.format(gbit_per_s=gbit_per_s, latency_us=latency_us), encoding="utf-8")
        arguments = [f"--cluster={cluster}", f"--profile={folder / 'profile.json'}", "--devices=8,24"]
        arguments += [f"--json={folder / name}.json", "--set=train.global_batch=1536", *files]
        result = CliRunner().invoke(app, ["plan", "resnet50-64k", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def plan(folder: Path) -> dict[str, Any]:
    """The data in the page."""
    text = (folder / "plan.html").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.partition('id="data">')[2].partition("</script>")[0])["plan"]
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def look_up(plan: dict[str, Any], row: dict[str, Any], bandwidth: int, latency: int) -> dict[str, Any]:
    """Every column at the setting of a row of `--json`, as the page's script looks it up."""
    scaling = row["scaling"]
    place = plan[scaling]["places"][plan["devices"].index(row["devices"])][plan["start"][scaling]]
    network = bandwidth * len(plan["latencies"]) + latency
    values = {name: column[place] for name, column in plan["columns"].items()}
    return {name: value[network] if isinstance(value, list) else value for name, value in values.items()}


@pytest.mark.parametrize(("name", "wider", "slower"), [("plan.json", 0, 0), ("other.json", 1, 1)])
def test_numbers_are_those_of_json(folder: Path, plan: dict[str, Any], name: str, wider: int, slower: int) -> None:
    rows = json.loads((folder / name).read_text())["predictions"]
    assert len(rows) == 4
    for row in rows:
        found = look_up(plan, row, plan["start"]["bandwidth"] + wider, plan["start"]["latency"] + slower)
        for column in COLUMNS:
            assert found[column] == row[column], column
        for column in PARTS:
            assert found[column] == row["parts"][column], column
        for column in NEEDS:
            assert found[f"node_{column}"] == row["input"][column], column
        assert plan["words"]["advice"][found["advice"]] == row["advice"]
        assert plan["words"]["binds"][found["binds"]] == row["binds"]
        assert plan["words"]["reduction"][found["reduction"]].startswith(row["reduction"]["text"])


def test_the_other_network_is_another(folder: Path) -> None:
    first, other = (json.loads((folder / name).read_text())["predictions"] for name in ("plan.json", "other.json"))
    assert [one["step_s"] for one in first] != [one["step_s"] for one in other]


def test_published_runs_have_no_page(folder: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--validate", f"--html={folder / 'no.html'}"])
    assert isinstance(result.exception, LockstepError)
    assert "--validate has no page" in str(result.exception)


def test_the_file_is_small(folder: Path) -> None:
    assert (folder / "plan.html").stat().st_size < 4e6


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_chart_is_drawn_and_whole(page: Page, folder: Path, width: int, scheme: str) -> None:
    page.show(f"file://{folder}/plan.html", width=width, scheme=scheme)
    assert set(check(page)) == {"time", "cost", "efficiency", "network", "parts"}
    table = "document.querySelector('#changed .scroll')"
    assert page.run(f"{table}.scrollWidth - {table}.clientWidth") == 0  # on a phone, too
    says = page.run("[...document.querySelectorAll('figcaption p[id$=says]')].map((one) => one.textContent)")
    assert len(says) == 5
    assert all(any(letter.isdigit() for letter in sentence) for sentence in says), says


def headline(page: Page) -> str:
    return str(page.run("document.getElementById('headline').innerText"))


def move(page: Page, slider: str, key: str) -> None:
    """A slider by keyboard, and all charts drawn anew."""
    turn = page.run("document.documentElement.dataset.drawn")
    page.run(f"document.getElementById('{slider}').focus()")
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])
    page.wait(f"document.documentElement.dataset.drawn !== '{turn}'")


KEYS = {"End": 35, "Home": 36, "ArrowLeft": 37}
KEY_OF = {"devices": "ArrowLeft", "batch": "End", "bandwidth": "Home", "latency": "End"}


def test_sliders_move_by_keyboard_and_change_what_is_said(page: Page, folder: Path, plan: dict[str, Any]) -> None:
    page.show(f"file://{folder}/plan.html")
    start = headline(page)
    rows = json.loads((folder / "plan.json").read_text())["predictions"]
    asked = next(row for row in rows if row["scaling"] == "strong" and row["devices"] == 24)
    assert asked["advice"] in start
    assert f"{asked['images_per_second']:,.0f}" in start
    assert f"{100 * asked['efficiency']:.1f} %" in start
    assert f"{asked['train_s'] / 60:.3g} min" in start
    for slider in ("devices", "batch", "bandwidth", "latency"):
        before = headline(page)
        move(page, slider, KEY_OF[slider])
        assert headline(page) != before, slider
        text = page.run(f"document.getElementById('{slider}').getAttribute('aria-valuetext')")
        assert text == page.run(f"document.getElementById('{slider}-value').textContent")
    assert page.run("document.getElementById('devices-value').textContent") == f"{plan['devices'][-2]:,}"
    # What is said is what was simulated there.
    place = plan["strong"]["places"][-2][-1]
    seconds = plan["columns"]["step_s"][place]
    network = len(plan["latencies"]) - 1
    milliseconds = 1e3 * (seconds[network] if isinstance(seconds, list) else seconds)
    assert f"{milliseconds:,.0f} ms" in headline(page)
    check(page)
    page.run("document.querySelector('input[value=weak]').click()")
    page.wait("document.getElementById('batch-value').textContent.includes('for each')")
    check(page)
    page.run("document.getElementById('reset').click()")
    page.wait("document.getElementById('reset').disabled")
    assert headline(page) == start


@pytest.fixture
def few_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stops in (("BANDWIDTHS", (0.5, 1)), ("LATENCIES", (1, 4)), ("SHARES", (0.25, 1, 4)), ("SMALLER", (2, 1))):
        monkeypatch.setattr(f"lockstep.plan.grid.{name}", stops)


@pytest.mark.usefixtures("few_stops")
def test_a_setting_that_cannot_run_says_why_and_leaves_no_empty_box(page: Page, tmp_path: Path) -> None:
    page.show(make_page(tmp_path, {"global_batch": 16}, [8]).as_uri())
    assert "Energy" in page.run("document.getElementById('chart-cost-title').textContent")  # nobody names a price
    assert "Cost" not in headline(page)
    move(page, "devices", "End")
    move(page, "batch", "Home")
    assert "cannot be shared by" in headline(page)
    assert page.run("[...document.querySelectorAll('#facts, #equation, #pairs')].every((one) => !one.offsetHeight)")
    assert page.run("document.getElementById('chart-network').closest('figure').hidden")
    assert page.complaints == []
    move(page, "batch", "End")
    assert "cannot" not in headline(page)
    check(page)


def make_page(folder: Path, changes: dict[str, Any], asked: list[int], text: str = "") -> Path:
    """A page made without the command, for what no file of a user could hold."""
    cluster = replace(read_planned("eth-10g"), name=text or "eth-10g", num_nodes=4)
    workload = replace(describe_workload(*load_recipe("resnet50-64k", [])), **{"recipe": text or "some", **changes})
    profile = replace(PROFILE, device=text or "one", note=text)
    rows = plan_sizes(workload, profile, cluster, asked, 8)
    grid = build_grid(workload, profile, cluster, asked, 8)
    file = folder / "plan.html"
    file.write_text(build_forecast(rows, grid, workload, cluster), encoding="utf-8")
    return file


@pytest.mark.usefixtures("few_stops")
def test_strangers_strings_are_text(page: Page, tmp_path: Path) -> None:
    page.show(make_page(tmp_path, {"global_batch": 1024, "image_bytes": 0.0}, [4], HOSTILE).as_uri())
    check(page)
    assert page.run("document.querySelector('h1').textContent") == f"{HOSTILE} on {HOSTILE}"
    assert HOSTILE in page.run("document.getElementById('binds').textContent")
    assert page.run("document.querySelectorAll('script').length") == 4  # three of the page, and plotly
