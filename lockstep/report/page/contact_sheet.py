"""What a network says of images, as one page: thumbnails, names and probabilities. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.report.page.document import Document, Section, build_document, escape
from lockstep.report.page.samples import read_jpeg
from lockstep.report.phrases import percent, plural

MOST_IMAGES = 2_000  # a browser draws them in a second, from a page of 8 MB


@dataclass(frozen=True)
class Shot:
    """One image and what it was taken for, the surest guess first."""

    name: str
    guesses: Sequence[tuple[str, float]]
    jpeg: str  # small, in base64; empty if there is none


def build_contact_sheet(title: str, shots: Sequence[Shot], unreadable: Sequence[tuple[str, str]]) -> str:
    """The page: the images by class, the surest first, and those that could not be read with the reason."""
    groups: dict[str, list[Shot]] = {}
    shown = list(shots)[:MOST_IMAGES]
    for shot in shown:
        groups.setdefault(shot.guesses[0][0], []).append(shot)
    sections = [
        Section(
            f"class-{place}",
            name,
            lead=plural(len(group), "image"),
            body=f'<div class="images">{"".join(_show(shot) for shot in sorted(group, key=_order))}</div>',
        )
        for place, (name, group) in enumerate(sorted(groups.items()))
    ]
    if unreadable:
        items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in unreadable)
        sections.append(Section("unreadable", "Could not be read", body=f"<ul>{items}</ul>"))
    more = f" The first {MOST_IMAGES:,} of them are shown." if len(shots) > MOST_IMAGES else ""
    told = f"{plural(len(shots), 'image')}, taken for {len(groups):,} of the classes."
    header = (
        f'<p class="kind">Lockstep · predictions</p><h1>{escape(title)}</h1>'
        f'<p class="state">{escape(told + more)} Each has its best guess, and how sure the network is.</p>'
    )
    footer = "Made by Lockstep. Nothing in this page was fetched, and nothing leaves it."
    return build_document(Document(f"{title} – Lockstep", header, sections, draws=False, footer=footer))


def _order(shot: Shot) -> tuple[float, str]:
    return -shot.guesses[0][1], shot.name


def _show(shot: Shot) -> str:
    (best, probability), *others = shot.guesses
    data = read_jpeg(shot.jpeg)
    says = f"{best}, {percent(probability)}"
    rest = ", ".join(f"{name} {percent(chance)}" for name, chance in others[:2])
    image = (
        f'<img src="data:image/jpeg;base64,{data}" alt="{escape(shot.name)}: {escape(says)}" '
        f'title="{escape(shot.name)}">'
        if data
        else ""
    )
    return (
        f"<figure>{image}<figcaption><b>{escape(says)}</b><span>{escape(rest)}</span>"
        f"<span>{escape(shot.name)}</span></figcaption></figure>"
    )
