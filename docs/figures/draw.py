"""Makes the pictures of README and docs: `make figures`.

Bars and the timeline are drawn from `results.json`, whose numbers are those that `docs/results.md` states with their
commands and commits. The terminal and the report are those of a quickstart run, trained here unless one is given.
"""

import argparse
import html
import io
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from lockstep.events import CheckpointSaved, Evaluated, Event, RunEnded, RunStarted, read_events
from lockstep.report.display import LiveDisplay
from lockstep.report.page.run_page import build_report

HERE = Path(__file__).parent
WIDTH = 860
FIRST_S, SHOWN_S = 0.8, 6.0  # of a terminal: until the command is read, and its whole run
STYLE = """<style>
text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; fill: #1d2430; }
.title { font-weight: 600; font-size: 16px; } .muted { fill: #5b6472; font-size: 12.5px; }
.ours { fill: #2563a8; } .theirs { fill: #b9bec7; } .third { fill: #8b93a0; } .sum { fill: #c45f14; }
.line { stroke: #c9ccd2; } .strong { font-weight: 600; } .on { fill: #ffffff; font-size: 12.5px; }
@media (prefers-color-scheme: dark) {
text { fill: #e7e9ee; } .muted { fill: #a2abb9; } .ours { fill: #6aa9ee; } .theirs { fill: #525b69; }
.third { fill: #77818f; } .sum { fill: #f0a25c; } .line { stroke: #3a414e; } .on { fill: #10151c; }
}
</style>"""
CURVES = """<style>
.curve { stroke-width: 2; } polyline.curve { fill: none; }
.curve.ours { stroke: #2563a8; } .curve.third { stroke: #8b93a0; } .curve.sum { stroke: #c45f14; }
</style>"""
INK, PAPER = (231, 233, 238), (23, 27, 34)
COLORS = [(58, 65, 78), (240, 135, 148), (85, 192, 149), (240, 200, 120), (106, 169, 238), (177, 151, 234)]
THEME = TerminalTheme(PAPER, INK, [*COLORS, (94, 200, 210), INK])
TERMINAL = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>make train: a ResNet trained on two ranks, from nothing</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
text {{ animation: appear 0.01s linear both; }}
@keyframes appear {{ from {{ opacity: 0; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="{width}" height="{height}" rx="10" fill="#171b22"/>
<g transform="translate(10, 22)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


class Recorder(LiveDisplay):
    """The live display less its moving lines, which a picture cannot show."""

    def show_progress(self, event: Event) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of README and docs.")
    parser.add_argument("--run", type=Path, help="a quickstart run's folder; trained now if not given")
    parser.add_argument("--out", type=Path, default=HERE, help="where the pictures go")
    asked = parser.parse_args()
    draw_results(asked.out)
    with tempfile.TemporaryDirectory() as folder:
        run = asked.run or Path(folder) / "runs" / "quickstart"
        if asked.run is None:
            command = [sys.executable, "-m", "lockstep", "train", "quickstart", "--ranks", "2", "--out", str(run)]
            subprocess.run(command, check=True)
        events = read_run(run)
        record_terminal(events, asked.out / "train.svg")
        photograph_report(events, asked.out / "report.png")


def draw_results(out: Path) -> None:
    """Everything that is drawn from stated results."""
    stated = json.loads((HERE / "results.json").read_text())
    (out / "one-gpu.svg").write_text(draw_bars(stated["one-gpu"]))
    (out / "32-ranks.svg").write_text(draw_groups(stated["32-ranks"]))
    (out / "overlap.svg").write_text(draw_overlap(stated["overlap"]))
    (out / "batch.svg").write_text(draw_accuracy(stated["batch"]))
    (out / "halp.svg").write_text(draw_curves(json.loads((HERE / "halp.json").read_text())))


def draw_bars(figure: dict[str, Any]) -> str:
    """A bar for each side, ours in colour."""
    rows, left, top = figure["rows"], 350, 62
    scale = (WIDTH - left - 150) / max(row["value"] for row in rows)
    ours = next(row["value"] for row in rows if row["side"] == "Lockstep")
    shapes = []
    for place, row in enumerate(rows):
        y, width, is_ours = top + 32 * place, row["value"] * scale, row["side"] == "Lockstep"
        shapes.append(_text(left - 12, y + 16, row["side"], "strong" if is_ours else "", anchor="end"))
        shapes.append(_bar(left, y, width, 22, "ours" if is_ours else "theirs"))
        beside = "" if is_ours else f"   Lockstep is {ours / row['value']:.2f}×"
        shapes.append(_text(left + width + 9, y + 16, f"{row['value']:,}{beside}", "strong" if is_ours else ""))
    return _frame(figure, shapes, top + 32 * len(rows) + 14)


def draw_groups(figure: dict[str, Any]) -> str:
    """Three bars for each case, each case on its own scale: they are far apart, and the ratios count."""
    sides, left, y = ("DDP, default", "DDP, tuned", "Lockstep"), 270, 62.0
    shapes = []
    for row in figure["rows"]:
        scale = (WIDTH - left - 230) / max(row[side] for side in sides)
        shapes.append(_text(left - 110, y + 37, row["case"], "strong", anchor="end"))
        for place, side in enumerate(sides):
            kind = ("theirs", "third", "ours")[place]
            shapes.append(_text(left - 10, y + 14, side, "muted", anchor="end"))
            shapes.append(_bar(left, y, row[side] * scale, 18, kind))
            over = side.replace("DDP,", "over")
            beside = f"   Lockstep is {row[over]:.2f}×" if over != side else ""
            strong = "strong" if side == "Lockstep" else ""
            shapes.append(_text(left + row[side] * scale + 9, y + 14, f"{row[side]:,} ms{beside}", strong))
            y += 22
        y += 16
    return _frame(figure, shapes, y + 4)


def draw_overlap(figure: dict[str, Any]) -> str:
    """The end of a backward pass, and the sums that are sent while it still runs."""
    first, last, left, right, top = 13.5, 17.0, 150, WIDTH - 40, 66
    scale = (right - left) / (last - first)
    end = left + (figure["backward_ends"] - first) * scale
    shapes = [_text(left - 14, top + 16, "backward pass", anchor="end"), _bar(left, top, end - left, 22, "ours")]
    shapes.append(_text(left + 10, top + 15, f"… ends at {figure['backward_ends']:.2f} ms", "on"))
    for place, row in enumerate(figure["rows"]):
        y = top + 36 + 32 * place
        x, width = left + (row["begins"] - first) * scale, (row["ends"] - row["begins"]) * scale
        full = left + (row["full"] - first) * scale
        shapes.append(_text(left - 14, y + 16, f"sum of buffer {row['buffer']}", anchor="end"))
        shapes.append(
            f'<line class="line" x1="{full:.1f}" x2="{full:.1f}" y1="{top}" y2="{y + 22}" stroke-dasharray="3 3"/>'
        )
        shapes.append(_bar(x, y, width, 22, "sum"))
        said = f"{row['begins']:.2f} – {row['ends']:.2f}"
        is_late = x + width + 80 > right
        shapes.append(_text(x - 8 if is_late else x + width + 8, y + 16, said, "muted", "end" if is_late else "start"))
    y = top + 36 + 32 * len(figure["rows"])
    shapes.append(f'<line class="line" x1="{left}" x2="{right}" y1="{y + 4}" y2="{y + 4}"/>')
    for tick in (14.0, 14.5, 15.0, 15.5, 16.0, 16.5, 17.0):
        shapes.append(_text(left + (tick - first) * scale, y + 22, f"{tick:.1f} ms", "muted", anchor="middle"))
    shapes.append(
        _text(left, y + 44, "after the backward pass began; a dashed line is where a buffer is full", "muted")
    )
    return _frame(figure, shapes, y + 58)


def draw_curves(figure: dict[str, Any]) -> str:
    """Norms over passes, the norms by powers of ten; Lockstep's own steps with dots."""
    rows, left, top, width, height = figure["rows"], 70, 66, 500, 380
    most = max(row["passes"][-1] for row in rows)
    lowest, highest = -17, 0

    def place(passes: float, norm: float) -> tuple[float, float]:
        share = (highest - max(lowest, math.log10(norm))) / (highest - lowest)
        return left + passes / most * width, top + share * height

    shapes = [CURVES]
    for power in range(highest, lowest - 1, -2):
        _, y = place(0, 10.0**power)
        shapes.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" class="line"/>')
        shapes.append(_text(left - 8, y + 5, f"1e{power}", "muted", anchor="end"))
    for passes in range(0, round(most) + 1, 6):
        shapes.append(_text(place(passes, 1.0)[0], top + height + 18, str(passes), "muted", anchor="middle"))
    shapes.append(_text(left + width, top + height + 36, "passes over the data", "muted", anchor="end"))
    ends: list[float] = []
    for row in sorted(rows, key=lambda row: -row["norms"][-1]):
        points = [place(*pair) for pair in zip(row["passes"], row["norms"], strict=True)]
        is_ours, is_halp = "Lockstep" in row["arithmetic"], row["name"].startswith("HALP")
        color = "ours" if is_halp else "third" if row["name"].startswith(("SGD", "LP")) else "sum"
        dash = ' stroke-dasharray="6 4"' if "16" in row["name"] else ""
        dash = ' stroke-dasharray="1 3"' if row["name"] == "SGD" else dash
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{path}" class="curve {color}"{dash}/>')
        if is_ours:
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="{color}"/>' for x, y in points]
        y = max(points[-1][1], ends[-1] + 17 if ends else 0.0)  # names must not lie upon each other
        ends.append(y)
        name = f"{row['name']}, {row['arithmetic']}"
        shapes.append(_text(left + width + 10, y + 5, name, "strong" if is_ours else "muted"))
    return _frame(figure, shapes, max(top + height + 44, ends[-1] + 24))


def draw_accuracy(figure: dict[str, Any]) -> str:
    """Accuracy against batch, the batch by powers of two: a curve for each rule, a bar for the spread of its seeds."""
    rows, left, top, width, height = figure["rows"], 70, 70, 560, 300
    batches = [point["batch"] for point in rows[0]["points"]]
    first, last = math.log2(batches[0]), math.log2(batches[-1])

    def place(batch: float, percent: float) -> tuple[float, float]:
        x = left + 20 + (math.log2(batch) - first) / (last - first) * (width - 40)
        return x, top + (1 - percent / 100) * height

    shapes = [CURVES]
    for percent in range(0, 101, 20):
        _, y = place(batches[0], percent)
        shapes.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" class="line"/>')
        shapes.append(_text(left - 8, y + 5, f"{percent} %", "muted", anchor="end"))
    for batch in batches:
        shapes.append(_text(place(batch, 0)[0], top + height + 18, f"{batch:,}", "muted", anchor="middle"))
    shapes.append(_text(left + width, top + height + 36, "samples in a step", "muted", anchor="end"))
    ends: list[float] = []
    for row in sorted(rows, key=lambda row: -row["points"][-1]["top1"]):
        kind = {"Muon": "ours", "LARS": "sum"}.get(row["name"], "third")
        points = [(*place(point["batch"], point["top1"]), point["spread"]) for point in row["points"]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        shapes.append(f'<polyline points="{path}" class="curve {kind}"/>')
        for x, y, spread in points:
            half = spread / 100 * height
            ends_y = (max(top, y - half), min(top + height, y + half))
            shapes.append(
                f'<line x1="{x:.1f}" y1="{ends_y[0]:.1f}" x2="{x:.1f}" y2="{ends_y[1]:.1f}" class="curve {kind}"/>'
            )
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>')
        y = max(points[-1][1], ends[-1] + 18 if ends else 0.0)  # names must not lie upon each other
        ends.append(y)
        shapes.append(_text(left + width + 10, y + 5, f"{row['name']}, {row['points'][-1]['top1']:.2f} %", "strong"))
    return _frame(figure, shapes, max(top + height + 44, ends[-1] + 24))


def _frame(figure: dict[str, Any], shapes: list[str], bottom: float) -> str:
    """The title, where it was measured, and by which command of which commit."""
    source = f"{figure['command']} · commit {figure['commit']}"
    height = bottom + 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n'
        f"<title>{html.escape(figure['title'])}</title>\n{STYLE}\n"
        + "\n".join([_text(8, 22, figure["title"], "title"), _text(8, 43, figure["where"], "muted"), *shapes])
        + f"\n{_text(8, bottom + 12, source, 'muted')}\n</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    shown = html.escape(text).replace("   ", "\u2003")
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{shown}</text>'


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="3" class="{kind}"/>'


def read_run(folder: Path) -> list[Event]:
    """The run's records, under the name that `make train` would have given it."""
    events = read_events(folder)
    start = next(event for event in events if isinstance(event, RunStarted))
    name = f"{start.recipe}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(start.time_s))}"
    return [replace(event, run=name) if isinstance(event, RunStarted) else event for event in events]


def record_terminal(events: list[Event], target: Path) -> None:
    """What `make train` shows, line by line, from the run's own records; no path of this machine is in it.

    Each line appears when it came, the whole run in a few seconds.
    """
    shown = io.StringIO()
    console = Console(record=True, force_terminal=True, width=108, file=shown, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), ("make train", "bold")))
    start = next(event for event in events if isinstance(event, RunStarted))
    came_s = [0.0]  # each line, after the first record
    # The middle of the run says the same again and again.
    middle = [event for event in events if isinstance(event, Evaluated | CheckpointSaved)][2:-3]
    display = Recorder(console, Path("runs") / start.run)
    for event in events:
        if event in middle:
            if event is middle[0]:
                console.print(Text("...", style="dim"))
        else:
            display.emit(event)
        came_s += [event.time_s - start.time_s] * (shown.getvalue().count("\n") - len(came_s))
        if isinstance(event, RunEnded):
            break
    svg = pace_lines(console.export_svg(theme=THEME, code_format=TERMINAL, unique_id="t"), came_s)
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def pace_lines(svg: str, came_s: list[float]) -> str:
    """Let every line of a terminal appear at its time, the last after SHOWN_S."""
    scale = SHOWN_S / max(*came_s, 1.0)

    def delay(line: re.Match[str]) -> str:
        place = min(int(line[1]), len(came_s) - 1)
        return f'{line[0]} style="animation-delay:{FIRST_S * (place > 0) + scale * came_s[place]:.2f}s"'

    return re.sub(r'clip-path="url\(#t-line-(\d+)\)"', delay, svg)


def photograph_report(events: list[Event], target: Path) -> None:
    """The top of the run's report in a real browser; the old picture stays where there is none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"There is no chromium here, so {target.name} stays as it is.")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(build_report(events), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        flags += ["--window-size=1240,1180", f"--user-data-dir={folder}/profile", f"--screenshot={target.resolve()}"]
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
