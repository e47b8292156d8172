"""The page of a benchmark: its charts and its rows, as pages of runs are. Torch-free."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import write_whole
from lockstep.report.page.charts import Chart, Numbers
from lockstep.report.page.document import Document, Section, build_document, build_table, escape

FOOTER = "Made by Lockstep from what was just measured. Nothing in this page was fetched, and nothing leaves it."


def write_page(file: Path, title: str, about: str, charts: Sequence[Chart], rows: Numbers) -> None:
    """One page that needs nothing else."""
    header = f'<p class="kind">Lockstep · benchmark</p><h1>{escape(title)}</h1><p class="what">{escape(about)}</p>'
    sections = [
        Section("charts", "Side by side", charts=charts),
        Section("rows", "Everything measured", body=build_table(rows, name="measured-table", is_whole=True)),
    ]
    page = build_document(Document(title=f"{title} – Lockstep", header=header, sections=sections, footer=FOOTER))
    try:
        write_whole(file, page)
    except OSError as error:
        raise LockstepError(f"Cannot write {file}: {error.strerror}.") from None
