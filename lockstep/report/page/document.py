"""One HTML file that needs nothing else: style, script, data and plotly.js in it, and no request ever made.

What a run says is text, wherever it lands: escaped in the page, escaped in the data. Should that fail somewhere, the
page's own policy still lets no script run but the two whose hashes it names, and nothing be fetched from anywhere.
"""

import base64
import gzip
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.report.history import number
from lockstep.report.page.charts import Chart, Numbers

# JSON in a script element ends at the first "</script>", and old parsers stumble over these two line ends.
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}

# The space before a unit; a terminal's lines have plain ones, which any log can hold.
UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|min|h|kB|MB|GB|J|kJ|W|kWh|images/s)(?![\w/]))")

NO_SCRIPT = '<noscript><p class="warning">The charts need JavaScript; the text under them says the same.</p></noscript>'


@dataclass(frozen=True)
class Section:
    """A heading with what lies under it; one without charts and text is never made."""

    name: str  # in the address, to jump to
    title: str
    lead: str = ""  # one sentence, plain text
    above: str = ""  # HTML, already escaped: over the charts
    charts: Sequence[Chart] = ()
    beside: str = ""  # HTML, already escaped: takes a chart's place
    body: str = ""  # the same, under the charts
    switch: bool = False  # whether the reader chooses the axis here
    short: str = ""  # its title among the links at the top


@dataclass(frozen=True)
class Document:
    """A page before it is written."""

    title: str
    header: str  # HTML, already escaped
    sections: Sequence[Section]
    data: Mapping[str, Any] = field(default_factory=dict)  # more for the script
    scripts: Sequence[str] = ("page.js",)
    connect: str = "'none'"  # from where the page may fetch
    draws: bool = True  # whether it has charts, or will have; without, plotly.js stays out
    footer: str = (
        "Made by Lockstep from the runs' own records. Nothing in this page was fetched, and nothing leaves it."
    )


def escape(text: object) -> str:
    """Text for HTML, in an element or in a quoted attribute."""
    return html.escape(str(text), quote=True)


def tell(text: object) -> str:
    """A sentence for HTML, in which no line ends between a number and its unit."""
    return UNIT.sub("\N{NO-BREAK SPACE}", escape(text))


def embed_json(value: object) -> str:
    """JSON that can lie in a script element."""
    text = encode_data(value)
    for character, code in UNSAFE.items():
        text = text.replace(character, code)
    return text


def encode_data(value: object) -> str:
    """JSON as browsers read it, which has no infinity: a number that a stranger's record drove so far becomes null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_clean(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _clean(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(one) for one in value]
    return number(value) if isinstance(value, float) else value


def build_document(document: Document) -> str:
    """The whole page."""
    plotly, plotly_hash = read_plotly() if document.draws else ("", "")
    script = "\n".join(read_asset(name) for name in document.scripts)
    allowed = " ".join(f"'{one}'" for one in (_hash(script.encode()), plotly_hash) if one)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {document.connect}; base-uri 'none'; form-action 'none'"
    )
    charts = [chart.as_data() for section in document.sections for chart in section.charts]
    links = "".join(
        f'<a href="#{section.name}">{escape(section.short or section.title)}</a>' for section in document.sections
    )
    body = "".join(map(build_section, document.sections))
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(document.title)}</title>
<link rel="icon" href="data:,">
<style>{read_asset("page.css")}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<div class="bar"><nav aria-label="Sections">{links}</nav>
<button type="button" id="theme" aria-label="Change between light and dark">Dark</button></div>
<header>{document.header}</header>
{NO_SCRIPT if document.draws else ""}
<main id="content">{body}</main>
<footer>{escape(document.footer)}</footer>
<script type="application/json" id="data">{embed_json({"charts": charts, **document.data})}</script>
{f'<script type="text/plain" id="plotly">{plotly}</script>' if plotly else ""}
<script>{script}</script>
</body>
</html>
"""
    # A name on disk may be no UTF-8 and a record may hold half a pair: shown as an escape, never a failure.
    return text.encode(errors="backslashreplace").decode()


def build_section(section: Section) -> str:
    lead = f'<p class="lead">{tell(section.lead)}</p>' if section.lead else ""
    charts = "".join(map(build_chart, section.charts))
    charts += f'<div class="chart">{section.beside}</div>' if section.beside else ""
    grid = f'<div class="charts">{charts}</div>' if charts else ""
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">'
        f'<div class="head"><h2 id="{section.name}-title">{escape(section.title)}</h2>'
        f"{SWITCH if section.switch else ''}</div>{lead}{section.above}{grid}{section.body}</section>"
    )


SWITCH = (
    '<fieldset class="switch"><legend>Horizontal axis</legend>'
    + "".join(
        f'<label><input type="radio" name="axis" value="{value}"{" checked" if value == "step" else ""}>'
        f"<span>{text}</span></label>"
        for value, text in (("step", "Steps"), ("epoch", "Epochs"), ("wall", "Time"))
    )
    + "</fieldset>"
)


def build_chart(chart: Chart) -> str:
    """A figure: its title, the drawing, the sentence that says the same, and the numbers as a table."""
    note = f"<p>{tell(chart.note)}</p>" if chart.note else ""
    numbers = f"<details><summary>Numbers</summary>{build_table(chart.numbers)}</details>" if chart.numbers else ""
    return (
        f'<figure class="{"chart wide" if chart.wide else "chart"}">'
        f'<h3 id="chart-{chart.name}-title">{escape(chart.title)}</h3>'
        f'<div class="plot" id="chart-{chart.name}" role="img" tabindex="0" aria-labelledby="chart-{chart.name}-title" '
        f'aria-describedby="{chart.name}-says" style="height:{chart.height}px"></div>'
        f'<figcaption><p id="{chart.name}-says">{tell(chart.says)}</p>{note}{numbers}</figcaption></figure>'
    )


def build_table(numbers: Numbers, *, name: str = "", is_whole: bool = False) -> str:
    """A table whose first column names the rows and whose others are aligned to the right, if they are numbers."""
    caption = f"<caption>{escape(numbers.caption)}</caption>" if numbers.caption else ""
    is_right = [
        all(_is_numeric(row[place]) for row in numbers.rows if place < len(row) and row[place])
        for place in range(len(numbers.heads))
    ]
    heads = "".join(
        f'<th scope="col"{_align(right and place > 0)}>{tell(head)}</th>'
        for place, (head, right) in enumerate(zip(numbers.heads, is_right, strict=True))
    )
    rows = "".join(_build_row(row, is_right) for row in numbers.rows)
    attribute = f' id="{name}"' if name else ""
    # Scrolls by itself where it is wider than a phone, by keyboard too.
    return (
        f'<div class="{"scroll whole" if is_whole else "scroll"}" tabindex="0" role="region" '
        f'aria-label="{escape(numbers.caption or "Table")}">'
        f"<table{attribute}>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _build_row(row: Sequence[str], is_right: Sequence[bool]) -> str:
    cells = "".join(
        f"<td{_align(right)}>{escape(cell)}</td>" for cell, right in zip(row[1:], is_right[1:], strict=False)
    )
    short = ' class="short"' if is_right[0] else ""  # a step, which needs no room for words
    return f'<tr><th scope="row"{short}>{escape(row[0])}</th>{cells}</tr>'


def _align(right: bool) -> str:
    return ' class="number"' if right else ""


def _is_numeric(cell: str) -> bool:
    return cell[:1].isdigit() or (cell[:1] in "-−+" and cell[1:2].isdigit()) or cell == "–"


def build_list(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line."""
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{tell(value)}</dd></div>" for name, value in rows)
    return f'<dl class="pairs">{pairs}</dl>'


@cache
def read_asset(name: str) -> str:
    return (resources.files("lockstep.report.page") / name).read_text(encoding="utf-8")


@cache
def read_plotly() -> tuple[str, str]:
    """plotly.js as base64 of its gzip, less than half of its 4.8 MB, and the hash by which the page lets it run."""
    found = importlib.util.find_spec("plotly")
    folders = found.submodule_search_locations if found else None
    if not folders:
        raise LockstepError("A page with charts needs plotly; install it with: pip install plotly.")
    file = Path(folders[0]) / "package_data" / "plotly.min.js"
    try:
        source = file.read_bytes()
    except OSError as error:
        raise LockstepError(f"plotly is installed without {file.name} ({error.strerror}); install it anew.") from None
    return base64.b64encode(gzip.compress(source, 6, mtime=0)).decode(), _hash(source)


def _hash(source: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}"
