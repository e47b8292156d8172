"""What a run did with samples: the ledger, epoch by epoch, and what the network still gets wrong."""

import base64
import binascii
from collections.abc import Sequence

from lockstep.events import MistakesFound
from lockstep.report.history import History, number
from lockstep.report.page.charts import Chart, Numbers, label
from lockstep.report.page.document import Section, build_table, escape, tell
from lockstep.report.phrases import percent, plural

MOST_CLASSES = 24
MOST_NAMED = 12  # classes for which each cell has room for its number
MOST_CONFUSIONS = 12
MOST_IMAGES = 24
LARGEST_IMAGE = 64 << 10  # bytes; these are thumbnails
JPEG_OPENING = b"\xff\xd8\xff"


def tell_mistakes(history: History) -> Section | None:
    """The images most confidently wrong, and what is taken for what."""
    found = history.last(MistakesFound)
    if found is None:
        return None
    images = _show_images(found, history)
    confused = _read_confusion(found)
    charts = [_draw_confusion(confused, history)] if confused else []
    if not images and not charts:
        return None
    table = ""
    if confused:
        rows = [
            [_name(history, true), _name(history, taken), f"{times:,}"]
            for true, taken, times in confused[:MOST_CONFUSIONS]
        ]
        table = build_table(
            Numbers(["class", "taken for", "how often"], rows, caption="The most frequent mistakes"), is_whole=True
        )
    lead = f"By the evaluation at step {found.step:,}."
    return Section(
        "mistakes", "What it gets wrong", lead=lead, charts=charts, beside=table, body=images, short="Mistakes"
    )


def _read_confusion(found: MistakesFound) -> list[tuple[int, int, int]]:
    """(class, taken for, how often), mistakes alone, the most frequent first."""
    entries = [
        (entry[0], entry[1], entry[2])
        for entry in found.confusion
        if isinstance(entry, list) and len(entry) == 3 and all(type(value) is int and value >= 0 for value in entry)
    ]
    return sorted((entry for entry in entries if entry[0] != entry[1] and entry[2] > 0), key=lambda entry: -entry[2])


def _draw_confusion(confused: Sequence[tuple[int, int, int]], history: History) -> Chart:
    involved: dict[int, int] = {}
    for true, taken, times in confused:
        involved[true] = involved.get(true, 0) + times
        involved[taken] = involved.get(taken, 0) + times
    classes = sorted(sorted(involved, key=lambda one: -involved[one])[:MOST_CLASSES])
    if history.start.num_classes <= MOST_CLASSES:
        classes = sorted({*range(history.start.num_classes), *classes})[:MOST_CLASSES]
    where = {one: place for place, one in enumerate(classes)}
    cells: list[list[int | None]] = [[None] * len(classes) for _ in classes]
    for true, taken, times in confused:
        if true in where and taken in where:
            cells[where[true]][where[taken]] = times
    names = [label(_name(history, one)) for one in classes]
    total, (true, taken, times) = sum(entry[2] for entry in confused), confused[0]
    whole = {"dtick": 1} if times < 10 else {}  # or there would be halves of mistakes
    ticks = {"tickvals": list(range(len(classes))), "ticktext": [_clip(name) for name in names], "showgrid": False}
    return Chart(
        name="confusion",
        title="Confusion matrix"
        if len(classes) >= history.start.num_classes
        else "Confusion matrix, most confused classes",
        says=f"{plural(total, 'mistake')}; the most frequent: {_name(history, true)} taken for "
        f"{_name(history, taken)}, {plural(times, 'time')}.",
        traces=[
            {
                "type": "heatmap",
                "z": cells,
                "x": list(range(len(classes))),
                "y": list(range(len(classes))),
                "text": [[f"{row} taken for {column}" for column in names] for row in names],
                "colorscale": "--heat",
                "zmin": 0,
                "zmax": times,
                "xgap": 1,
                "ygap": 1,
                "hoverongaps": False,
                "colorbar": {"thickness": 8, "outlinewidth": 0, "len": 0.9, "xpad": 6, **whole},
                "hovertemplate": "%{text}: %{z}<extra></extra>",
                **({"texttemplate": "%{z}"} if len(classes) <= MOST_NAMED else {}),
            }
        ],
        layout={
            "yaxis": {**ticks, "autorange": "reversed", "title": {"text": "class"}},
            "xaxis": {**ticks, "tickangle": -60, "title": {"text": "taken for"}},
        },
        note="Right answers are left out.",
        height=max(400, min(640, 160 + 24 * len(classes))),
        wide=len(classes) > MOST_NAMED,
    )


def _show_images(found: MistakesFound, history: History) -> str:
    figures: list[str] = []
    told: list[object] = list(found.worst)
    for place, worst in enumerate(told):
        if not isinstance(worst, dict) or len(figures) >= MOST_IMAGES:
            continue
        data = read_jpeg(worst.get("jpeg"))
        if data is None:
            continue
        label_name, taken = (_name(history, worst.get(key)) for key in ("label", "predicted"))
        confidence = number(worst.get("confidence"))
        sure = f", {percent(confidence)} sure" if confidence is not None else ""
        says = f"{label_name}, taken for {taken}{sure}"
        figures.append(
            f'<figure><img src="data:image/jpeg;base64,{data}" alt="Validation image {place + 1}: {escape(says)}" '
            f'title="{escape(worst.get("name", ""))}"><figcaption><b>{escape(label_name)}</b>'
            f"<span>taken for {escape(taken)}{tell(sure)}</span></figcaption></figure>"
        )
    if not figures:
        return ""
    return f'<h3>Most confidently wrong</h3><div class="images">{"".join(figures)}</div>'


def read_jpeg(text: object) -> str | None:
    """The base64 of a small JPEG, written anew; None for anything else."""
    if not isinstance(text, str) or len(text) > 2 * LARGEST_IMAGE:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    is_image = data.startswith(JPEG_OPENING) and len(data) <= LARGEST_IMAGE
    return base64.b64encode(data).decode() if is_image else None


def _name(history: History, place: object) -> str:
    """A class's name, or its number where it has none."""
    names = history.start.class_names
    if type(place) is int and 0 <= place < len(names):
        return str(names[place])
    return f"class {place}"


def _clip(name: str) -> str:
    """Names on the axes stay short; the whole one is in the hover text and the table."""
    return name if len(name) <= 14 or "&" in name else f"{name[:13]}…"


def tell_ledger(history: History) -> Section | None:
    """Whether each epoch saw every sample exactly once."""
    epochs = history.epochs
    if not epochs:
        return None
    wrong = [event.epoch + 1 for event in epochs if not event.ledger_ok]
    which = "the one epoch" if len(epochs) == 1 else f"each of {len(epochs):,} epochs"
    lead = (
        f"In {which} every sample was seen exactly once."
        if not wrong
        else f"{plural(len(wrong), 'epoch')} of {len(epochs)} did not see every sample exactly once."
    )
    bad = history.summary["bad_samples"]
    if bad:
        lead += f" {plural(bad, 'sample')} could not be read."
    rows = [
        [f"{event.epoch + 1:,}", event.ledger, "yes" if event.ledger_ok else "no", f"{event.bad_samples:,}"]
        for event in epochs
    ]
    table = build_table(Numbers(["epoch", "ledger", "each sample once", "unreadable"], rows, caption="Ledger by epoch"))
    return Section(
        "ledger", "Data ledger", lead=lead, body=f"<details><summary>Ledger</summary>{table}</details>", short="Ledger"
    )
