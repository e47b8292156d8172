"""Pages in a real browser: drawn, whole at any width, silent on the console, and nothing asked of any network."""

import base64
import io
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lockstep.data.generated import build_generated
from lockstep.events import EventLog, RunEnded, StepDone
from lockstep.report.page.charts import Numbers
from lockstep.report.page.contact_sheet import Shot, build_contact_sheet
from lockstep.report.page.document import Document, Section, build_document, build_table
from lockstep.report.page.run_page import write_report
from tests.engine import commands
from tests.engine.conftest import tiny_settings
from tests.report.browser import Page, open_browser
from tests.report.made_run import make_run, write_run
from tests.report.test_page import HOSTILE

# How many lines, bars and maps each chart has drawn.
DRAWN = """Object.fromEntries([...document.querySelectorAll('.plot')].map((plot) => [
    plot.id.slice(6),
    plot.querySelectorAll('.js-line, .scatterlayer .point, .barlayer .point path, .heatmaplayer image').length,
]))"""
WIDTHS = "[...document.querySelectorAll('.plot')].map((plot) => [plot._fullLayout.width, plot.clientWidth])"
# Boxes that lie over each other, things wider than the page, text that a chart cuts off, and legends that scroll.
FAULTS = """(() => {
    const faults = [], box = (one) => one.getBoundingClientRect();
    if (document.documentElement.scrollWidth > innerWidth) faults.push('the page is too wide');
    const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    for (const family of ['header, section, footer', 'figure.chart', '.images figure', '.facts > div', '.term']) {
        const all = [...document.querySelectorAll(family)];
        all.forEach((one, place) => all.slice(place + 1).forEach((other) => {
            if (over(box(one), box(other))) faults.push(`${one.textContent} lies over ${other.textContent}`);
        }));
    }
    for (const mark of document.querySelectorAll('.measured')) {
        const text = mark.closest('li').querySelector('.value');
        if (box(mark).top < box(text).bottom) faults.push(`a mark lies over ${text.textContent}`);
    }
    for (const plot of document.querySelectorAll('.plot')) {
        for (const mark of plot.querySelectorAll('.annotation-text')) {
            for (const tick of plot.querySelectorAll('.ytick text')) {
                if (over(box(mark), box(tick))) faults.push(`${mark.textContent} lies over ${tick.textContent}`);
            }
        }
        const frame = box(plot), figure = box(plot.closest('figure'));
        for (const text of plot.querySelectorAll('.main-svg text')) {
            const at = box(text), isWide = at.left < figure.left || at.right > figure.right;
            if (at.width && (isWide || at.top < frame.top - 2 || at.bottom > frame.bottom + 2)) {
                faults.push(`${plot.id} cuts off ${text.textContent}`);
            }
        }
        // Names beyond a legend's end are still in the document, and no box tells that nobody sees them.
        if ([...plot.querySelectorAll('.legend .scrollbar')].some((bar) => box(bar).height > 0)) {
            faults.push(`${plot.id} has a legend that scrolls`);
        }
    }
    return faults;
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that really trained."""
    folder = tmp_path_factory.mktemp("real")
    images = build_generated(folder / "cache", 130, 50)
    settings = [f"--set={setting}" for setting in [*tiny_settings(images), "train.log_every=1", "train.duration=3ep"]]
    status, out, err = commands.run("train", "quickstart", "--ranks=1", f"--out={folder / 'run'}", *settings)
    assert status == 0, out + err
    return folder / "run"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with every kind of record, resumed once."""
    first = make_run(steps=600, ends=False)
    events = [*first[: len(first) // 2], *make_run(steps=600, first=200, begun_s=1.8e9)]
    return write_report(write_run(tmp_path_factory.mktemp("made") / "run", events))


def check(page: Page) -> dict[str, int]:
    """Nothing said on the console, nothing asked for, nothing over another, every chart drawn."""
    assert page.complaints == []
    assert [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))] == []
    assert page.run(FAULTS) == []
    drawn: dict[str, int] = page.run(DRAWN)
    assert drawn
    assert all(drawn.values()), drawn
    return drawn


def resize(page: Page, width: int) -> None:
    """Another width of the window, and the charts drawn anew for it."""
    turn = page.run("document.documentElement.dataset.drawn")
    page.resize(width)
    page.wait(f"document.documentElement.dataset.drawn !== '{turn}'")
    page.wait(f"{WIDTHS}.every(([drawn, place]) => Math.abs(drawn - place) < 1)")


def test_a_real_run_is_drawn(page: Page, real: Path) -> None:
    for width, scheme in ((1400, "light"), (400, "dark")):
        page.show(f"file://{real}/report.html", width=width, scheme=scheme)
        assert set(check(page)) >= {"loss", "accuracy", "lr", "throughput", "spent"}
    summary = commands.summary(real)
    # One rank on a CPU measures nothing beforehand, and predicts nothing.
    assert summary["prediction"] is None
    assert page.run("document.getElementById('prediction')") is None
    assert page.run("lockstep.data.summary") == summary
    assert f"{100 * float(str(summary['top1'])):.1f} %" in page.run("document.querySelector('.facts').innerText")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_chart_is_drawn_and_whole(page: Page, made: Path, width: int, scheme: str) -> None:
    page.show(f"file://{made}", width=width, scheme=scheme)
    assert len(check(page)) == 13
    rows = page.run("document.querySelectorAll('#prediction-table tbody tr').length")
    assert rows == 14
    assert "1.25 times the 88.2 ms that were predicted" in page.run("document.getElementById('prediction').innerText")
    assert page.run("document.documentElement.dataset.theme") == scheme
    ink, paper = (page.run(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert _contrast(ink, paper) > 7
    table = "document.getElementById('prediction-table').parentElement"
    assert page.run(f"{table}.scrollWidth - {table}.clientWidth") == 0
    if width == 1400:
        page.run("document.querySelectorAll('figure details').forEach((one) => { one.open = true; })")
        hidden = "[...document.querySelectorAll('figure .scroll')].map((one) => one.scrollWidth - one.clientWidth)"
        assert set(page.run(hidden)) == {0}


def test_where_a_run_went_on_is_marked_inside_the_chart(page: Page, tmp_path: Path) -> None:
    """Also at its left edge; and not where a chart begins later than that."""
    silent = [replace(one, noise_scale=None) if isinstance(one, StepDone) else one for one in make_run(steps=1200)]
    early = [one for one in silent if getattr(one, "step", 0) <= 30 and not isinstance(one, RunEnded)]
    events = [*early, *make_run(steps=1200, first=30, begun_s=1.8e9)]
    page.show(f"file://{write_report(write_run(tmp_path / 'run', events))}")
    check(page)
    texts = "[...document.querySelectorAll('#chart-{} .annotation-text')].map((one) => one.textContent)"
    assert page.run(texts.format("loss")) == ["resumed"]
    assert page.run(texts.format("noise-scale")) == []


def test_paper_is_white_and_has_two_columns(page: Page, made: Path) -> None:
    """However dark the screen was, and however narrow the paper; a screen is as it was afterwards."""
    page.show(f"file://{made}", scheme="dark")
    look = """addEventListener("beforeprint", () => { window.printed = [
        getComputedStyle(document.body).color, document.querySelector("#chart-loss .ytick text").style.fill] })"""
    page.run(look)
    page.send("Page.printToPDF", preferCSSPageSize=True)
    for color in page.run("window.printed"):
        assert _contrast(color, "rgb(255, 255, 255)") > 4.5
    page.wait("document.documentElement.dataset.theme === 'dark'")
    page.send("Emulation.setEmulatedMedia", media="print")
    page.resize(700)
    columns = "getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length"
    assert page.run(columns) == 2
    page.send("Emulation.setEmulatedMedia", media="")


def test_a_chart_without_a_neighbour_takes_its_place(page: Page, tmp_path: Path) -> None:
    unscaled = [replace(one, loss_scale=None) if isinstance(one, StepDone) else one for one in make_run(steps=200)]
    page.show(f"file://{write_report(write_run(tmp_path / 'run', unscaled))}")
    assert len(check(page)) == 12
    widths = "[...document.querySelectorAll('#curves .chart')].map((one) => Math.round(one.offsetWidth))"
    *pairs, last = page.run(widths)
    assert len(pairs) == 4
    assert last == page.run("document.querySelector('#curves .charts').offsetWidth") > 2 * pairs[0]


def test_a_window_made_narrow_and_wide_again_has_whole_charts(page: Page, made: Path) -> None:
    page.show(f"file://{made}")
    heights = "[...document.querySelectorAll('.plot')].map((plot) => plot.clientHeight)"
    wide = page.run(heights)
    for width in (400, 1400):
        resize(page, width)
        check(page)
    assert page.run(heights) == wide


def test_a_table_wider_than_the_page_says_that_it_scrolls(page: Page, tmp_path: Path) -> None:
    """A shade at the edge beyond which there is more, and none at an end of the table."""
    rows = [[f"row {n}", *(f"{n}.{column}" for column in range(12))] for n in range(4)]
    wide, narrow = (Numbers([f"column {n}" for n in range(count)], [row[:count] for row in rows]) for count in (13, 2))
    body = build_table(wide, is_whole=True) + build_table(narrow, is_whole=True)
    sections = [Section("table", "Table", body=body)]
    (tmp_path / "page.html").write_text(build_document(Document("Table", "", sections, draws=False)))
    for scheme in ("light", "dark"):
        page.show(f"file://{tmp_path}/page.html", width=400, scheme=scheme)
        assert page.run(FAULTS) == []
        assert look_at_edges(page, tmp_path) == [(False, True), (False, False)]
        page.run("document.querySelector('.scroll').scrollTo(40, 0)")
        assert look_at_edges(page, tmp_path)[0] == (True, True)
        page.run("document.querySelector('.scroll').scrollTo(9999, 0)")
        assert look_at_edges(page, tmp_path)[0] == (True, False)


def look_at_edges(page: Page, folder: Path) -> list[tuple[bool, bool]]:
    """Whether each table's left and right edges look otherwise than the page beside them."""
    boxes = "[...document.querySelectorAll('.scroll')].map((one) => one.getBoundingClientRect().toJSON())"
    page.save_picture(folder / "page.png")
    picture = Image.open(folder / "page.png").convert("RGB")
    edges = []
    for box in page.run(boxes):
        # A row of the picture between two lines of text.
        across = [picture.getpixel((x, int(box["top"]) + 3)) for x in (4, int(box["left"]), int(box["right"]) - 1)]
        edges.append((across[1] != across[0], across[2] != across[0]))
    return edges


def _contrast(first: str, second: str) -> float:
    """WCAG's contrast of two colours."""

    def luminance(text: str) -> float:
        parts = [int(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_reader_chooses_the_axis_and_the_theme(page: Page, made: Path) -> None:
    page.show(f"file://{made}")
    last: Any = "document.getElementById('chart-loss').data[0].x.at(-1)"
    assert page.run(last) == 600
    turn = page.run("document.documentElement.dataset.drawn")
    page.run("document.querySelector('input[value=epoch]').focus()")
    page.run("document.querySelector('input[value=epoch]').click()")
    page.wait(f"document.documentElement.dataset.drawn !== '{turn}'")
    assert page.run(last) == 6
    page.run("document.querySelector('input[value=wall]').click(); document.getElementById('theme').click()")
    page.wait("document.documentElement.dataset.theme === 'dark'")
    page.wait(f"{last} > 60")
    check(page)
    page.run("localStorage.clear()")


def test_strangers_strings_are_text(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "a'b\U0001f600"
    events = make_run(steps=200, run=HOSTILE, names=[HOSTILE, *"bcdef"], device=HOSTILE, layers=[HOSTILE] * 20)
    page.show(write_report(write_run(folder, events)).as_uri())
    check(page)
    assert page.run("document.querySelector('h1').textContent") == HOSTILE
    assert page.run("document.querySelectorAll('script').length") == 4  # three of the page, and plotly
    ticks = page.run("[...document.querySelectorAll('#chart-confusion .ytick text')].map(one => one.textContent)")
    assert any(tick.startswith("<script>alert(1)") for tick in ticks), ticks


@pytest.mark.parametrize("width", [1400, 400])
def test_a_contact_sheet_is_whole_and_its_names_are_text(page: Page, tmp_path: Path, width: int) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (96, 64), (200, 80, 20)).save(picture, "JPEG")
    jpeg = base64.b64encode(picture.getvalue()).decode()
    shots = [Shot(f"{HOSTILE}-{n}.png", [(HOSTILE, 0.5), ("cat", 0.25)], jpeg) for n in range(7)]
    (tmp_path / "sheet.html").write_text(build_contact_sheet(HOSTILE, shots, [(HOSTILE, HOSTILE)]))
    page.show(f"file://{tmp_path}/sheet.html", width=width, scheme="dark")
    assert page.complaints == []
    assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []
    assert page.run(FAULTS) == []
    assert page.run("[...document.images].filter((one) => one.naturalWidth === 96).length") == 7
    assert page.run("document.querySelector('h2').textContent") == HOSTILE
    assert page.run("document.querySelectorAll('script').length") == 2


def test_10000_steps_open_about_as_quickly_as_100(page: Page, tmp_path: Path) -> None:
    """Seconds say little of a page on a machine that is slow or busy; what its own thread computes is compared."""
    work: dict[int, list[float]] = {100: [], 10_000: []}
    num_bytes = {}
    for steps in (100, 10_000) * 2:
        events = make_run(steps=steps, per_epoch=steps // 20, log_every=1)
        report = write_report(write_run(tmp_path / f"run-{steps}-{len(work[steps])}", events))
        page.show(f"file://{report}")
        work[steps].append(page.measure_work())
        num_bytes[steps] = report.stat().st_size
    assert min(work[10_000]) < 1.5 * min(work[100])
    assert num_bytes[10_000] < 1.2 * num_bytes[100] < 8e6  # most of it is plotly.js; curves are thinned
    check(page)


def test_a_run_is_watched_while_it_goes_on(page: Page, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", warn=lambda notice: None)
    events = make_run(steps=200, ends=True)
    process = commands.start("watch", str(tmp_path), "--web", PYTHONUNBUFFERED="1")
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].split(",")[0]
        page.requests.clear()
        page.send("Page.navigate", url=address)
        page.wait("document.querySelector('h1')?.textContent === 'Waiting for the first record'")
        half = len(events) // 2
        for event in events[:half]:
            log.emit(event)
        page.wait("document.querySelectorAll('.plot[data-drawn]').length >= 6")
        before = page.run("document.getElementById('chart-loss').data[0].x.length")
        for event in events[half:]:
            log.emit(event)
        page.wait(f"document.getElementById('chart-loss').data[0].x.length > {before}")
        page.wait("document.querySelector('.state').textContent.startsWith('Finished')")
        assert all(request.startswith((address, "data:", "blob:")) for request in page.requests)
        assert page.complaints == []
        for width in (400, 1400):
            resize(page, width)
            page.wait(f"{FAULTS}.length === 0")  # the last news may still be drawn
        page.send("Page.navigate", url="about:blank")
        process.send_signal(signal.SIGINT)
        status, out, err = commands.finish(process, timeout_s=90)
        assert (status, err) == (0, "")
        assert out.strip() == ""
    finally:
        if process.poll() is None:
            commands.kill_all(process)
