"""The page of a run: its headline, and every section that it has records for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.events import Event, RunEnded, RunStarted, read_events
from lockstep.files import write_whole
from lockstep.named import GIVEN
from lockstep.report.history import History, list_notes, list_warnings, number
from lockstep.report.page.anchors import tell_anchors
from lockstep.report.page.charts import Numbers, tell_time
from lockstep.report.page.curves import draw_curves
from lockstep.report.page.document import Document, Section, build_document, build_list, build_table, escape, tell
from lockstep.report.page.layers import tell_layers
from lockstep.report.page.plan_section import tell_plan
from lockstep.report.page.prediction_section import tell_prediction
from lockstep.report.page.ranks import tell_ranks
from lockstep.report.page.samples import tell_ledger, tell_mistakes
from lockstep.report.page.time_spent import tell_spent, tell_timeline
from lockstep.report.phrases import brief, count, count_parameters, percent, plural

REPORT_NAME = "report.html"
JOULES_PER_KWH = 3.6e6
MOST_CLASSES = 100  # whose names are listed
MOST_NOTES = 50
PREDICTION = "A prediction: nothing was trained."
FOOTER = "Made by Lockstep from {}. Nothing in this page was fetched, and nothing leaves it."
LIVE = '<span class="live"></span>'


def write_report(source: Path, target: Path | None = None, price: float | None = None) -> Path:
    """The page of a run's folder or log, written whole beside it or where it is wanted; `price` of a device hour."""
    page = build_report(read_events(source), price)
    target = target or (source if source.is_dir() else source.parent) / REPORT_NAME
    try:
        write_whole(target, page)
    except OSError as error:
        raise LockstepError(f"Cannot write the report {target}: {error.strerror}; choose another file.") from None
    return target


def build_report(events: Iterable[Event], price: float | None = None) -> str:
    """The page of a run from its records, ended or not."""
    history = History(events)
    curves = draw_curves(history)
    told = [
        Section("curves", "Training", charts=curves, switch=True) if curves else None,
        tell_spent(history),
        tell_ranks(history),
        tell_timeline(history),
        tell_plan(history),
        tell_prediction(history),
        tell_anchors(history),
        tell_layers(history),
        tell_mistakes(history),
        tell_ledger(history),
        tell_energy(history, price),
        tell_warnings(history),
        tell_notes(history),
        tell_settings(history),
        tell_environment(history),
    ]
    return build_document(
        Document(
            title=f"{history.start.run}{', predicted' if history.is_predicted else ''} – Lockstep",
            header=build_header(history),
            sections=[section for section in told if section],
            data={"summary": history.summary},
            footer=FOOTER.format("a prediction's records" if history.is_predicted else "the run's own records"),
        )
    )


def build_header(history: History, now: str = "") -> str:
    """What a reader wants to know first: what was trained, how well, how quickly; `now` of a run that goes on."""
    start, summary, ended = history.start, history.summary, history.ended
    is_well = bool(now) or (ended is not None and ended.status == "finished" and not history.is_predicted)
    state = now or describe_state(history)
    facts = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{tell(value)}</dd><dd class="beside">{tell(beside)}</dd></div>'
        for name, value, beside in _list_facts(summary, history.is_predicted)
    )
    return (
        f'<p class="kind">Lockstep · {escape(start.recipe)}</p><h1>{escape(start.run)}</h1>'
        f'<p class="what">{escape(describe_work(start, history.is_predicted))}</p>'
        f'<p class="{"state" if is_well else "state warning"}">{LIVE if now else ""}'
        f"{tell(state)}</p>"
        f'<dl class="facts">{facts}</dl>{_build_equation(summary)}'
    )


def describe_work(start: RunStarted, is_predicted: bool = False) -> str:
    """The model, the data and the devices in one sentence."""
    model = _setting(start.config, "model", "name") or "a model"
    model = "a network of the program" if model == GIVEN else model
    source = _setting(start.config, "data", "path") or name_images(_setting(start.config, "data", "source"))
    batch = number(_setting(start.config, "train", "global_batch"))
    # The planner knows of no evaluation.
    checked = "" if is_predicted else f"{plural(start.num_val, 'validation sample')}, "
    return (
        f"{model}, {count_parameters(start.num_parameters)}, on {source}: "
        f"{start.num_train:,} training samples, "
        f"{checked}{start.num_classes:,} class{'' if start.num_classes == 1 else 'es'}. "
        f"{plural(start.world_size, 'rank')} ({start.device})"
        f"{f', global batch {batch:,.0f}' if batch else ''}."
    )


def name_images(source: object) -> str:
    """Images that lie in no folder."""
    return "images of the program" if source == GIVEN else f"{source or 'some'} images"


def describe_state(history: History) -> str:
    """How the run ended, or that it did not."""
    summary, ended = history.summary, history.ended
    after = f"after {tell_time(summary['wall_s'])} and {plural(summary['steps'], 'step')}"
    resumed = summary["resumed"]
    parts = f" It was resumed {'once' if resumed == 1 else plural(resumed, 'time')}." if resumed else ""
    if history.is_predicted:
        return f"{PREDICTION} It would take {tell_time(summary['wall_s'])} for {plural(summary['steps'], 'step')}."
    if ended is None:
        total = history.start.steps_total
        return (
            f"This run did not end: its log stops {after} of {total:,}. It may still be going on, or it was killed."
            f"{parts}"
        )
    words = {"finished": "Finished", "interrupted": "Interrupted", "failed": "Failed"}
    reason = f" {ended.reason}" if ended.reason else ""
    return f"{words.get(ended.status, ended.status)} {after}.{reason}{parts}"


def _list_facts(summary: dict[str, Any], is_predicted: bool) -> list[tuple[str, str, str]]:
    """Name, value and what stands beside it."""
    facts = []
    if summary["top1"] is not None:
        fifth = f"top-5 {percent(summary['top5'])}" if summary["top5"] is not None else ""
        facts.append(("Top-1", percent(summary["top1"]), fifth))
    if summary.get("average_top1") is not None:
        fifth = f"top-5 {percent(summary['average_top5'])}" if summary["average_top5"] is not None else ""
        facts.append(("Top-1, averaged weights", percent(summary["average_top1"]), fifth))
    best = summary["best"]
    if best is not None:
        facts.append(
            ("Time to best accuracy", tell_time(best["wall_s"]), f"{percent(best['top1'])} at step {best['step']:,}")
        )
    running, speed = ("Predicted time", "Predicted throughput") if is_predicted else ("Running time", "Throughput")
    facts.append((running, tell_time(summary["wall_s"]), tell_epochs(summary["epochs"])))
    if summary["T"]:  # a run that failed at its first step has none
        facts.append((speed, f"{count(summary['T'])}", "images/s"))
    if (scale := summary["noise_scale"]) is not None:
        beside = f"noise scale; {scale['last']:,.0f} at the end"
        facts.append(("Useful batch", f"{scale['middle']:,.0f}", beside))
    return facts


def tell_epochs(epochs: float) -> str:
    return f"{brief(epochs)} epoch{'' if epochs == 1 else 's'}"


def _build_equation(summary: dict[str, Any]) -> str:
    """T = S · N · e with its numbers."""
    if summary["S"] is None or summary["e"] is None:
        return ""
    terms = (
        ("T", count(summary["T"]), "images/s"),
        ("S", count(summary["S"]), "images/s of one rank alone"),
        ("N", f"{summary['N']:,}", "rank" if summary["N"] == 1 else "ranks"),
        ("e", percent(summary["e"]), "efficiency"),
    )
    shown = [
        f'<div class="term"><span class="letter">{letter}</span><b>{escape(value)}</b><span>{escape(unit)}</span></div>'
        for letter, value, unit in terms
    ]
    signs = [f'<span class="sign" aria-hidden="true">{sign}</span>' for sign in ("=", "·", "·")]
    pieces = [shown[0], *(piece for pair in zip(signs, shown[1:], strict=True) for piece in pair)]
    return f'<div class="equation" role="group" aria-label="T = S · N · e">{"".join(pieces)}</div>'


def tell_energy(history: History, price: float | None = None) -> Section | None:
    """What the devices drew, where they tell, and what their hours cost, where a reader names the price."""
    ends = history.all(RunEnded)
    drawn = [(ended, energy) for ended in ends if (energy := number(ended.energy_j)) is not None]
    told = [ended for ended, _ in drawn] or (ends if price is not None else [])
    if not told:
        return None
    joules, images = sum(energy for _, energy in drawn), sum(ended.images for ended in told)
    seconds = sum(ended.wall_s for ended in told)
    hours = sum(ended.wall_s * ended.world_size for ended in told) / 3600
    rows = []
    if drawn:
        rows += [("energy", f"{brief(joules / JOULES_PER_KWH, 3)} kWh ({count(joules / 1e3)} kJ)")]
        rows += [("mean power", f"{count(joules / seconds)} W")] if seconds > 0 else []
        rows += [("an image", f"{brief(joules / images, 3)} J")] if images > 0 else []
    rows += [("device hours", brief(hours, 3))]
    if price is not None:
        rows += [("cost", f"$ {hours * price:,.2f} at $ {price:,.6g} a device hour")]
    missing = len(history.parts) - len(told)
    lead = (
        f"{plural(missing, 'part')} of this run did not tell, and {'is' if missing == 1 else 'are'} left out."
        if missing
        else ""
    )
    title = "Energy" if price is None else "Energy and cost"
    return Section(
        "energy",
        f"{title}, predicted" if history.is_predicted else title,
        short=title,
        lead=lead,
        body=build_list(rows),
    )


def tell_warnings(history: History) -> Section | None:
    warnings = list_warnings(history)
    if not warnings:
        return None
    items = "".join(f"<li>{tell(text)}</li>" for text in warnings[:50])
    return Section("warnings", "Warnings", body=f"<ul>{items}</ul>")


def tell_notes(history: History) -> Section | None:
    """What the run let its reader know, such as what serves as the validation split."""
    notes = list_notes(history)
    if not notes:
        return None
    rows = [(f"step {spot.step:,}, {tell_time(spot.wall_s)}", text) for spot, text in notes[:MOST_NOTES]]
    if len(notes) > MOST_NOTES:
        rows.append(("", f"and {plural(len(notes) - MOST_NOTES, 'note')} more, in the run's log"))
    return Section("notes", "Notes", body=build_list(rows))


def tell_settings(history: History) -> Section | None:
    """Every setting, and what a resume changed."""
    settings = flatten(history.start.config)
    if not settings:
        return None
    first = flatten(history.starts[0].config)
    changed = [[name, first.get(name, "–"), value] for name, value in settings.items() if first.get(name) != value]
    body = ""
    if changed:
        body = build_table(Numbers(["setting", "first", "now"], changed, caption="Changed by a resume"))
    table = build_table(
        Numbers(["setting", "value"], [[name, value] for name, value in settings.items()]), name="settings-table"
    )
    return Section("settings", "Configuration", body=f"{body}<details><summary>All settings</summary>{table}</details>")


def tell_environment(history: History) -> Section:
    start = history.start
    rows = [
        ("device", start.device),
        ("ranks", f"{start.world_size:,}"),
        ("parameters", f"{start.num_parameters:,}"),
        ("classes", list_classes(start)),
        *((str(name), str(value)) for name, value in start.machine.items()),
        *((str(name), str(version)) for name, version in start.versions.items()),
    ]
    return Section("environment", "Environment", body=build_list(rows))


def list_classes(start: RunStarted) -> str:
    """How many classes, and the first of their names."""
    names = [str(name) for name in start.class_names[:MOST_CLASSES]]
    more = ", …" if start.num_classes > len(names) else ""
    return f"{start.num_classes:,}" + (f": {', '.join(names)}{more}" if names else "")


def flatten(config: dict[str, Any], before: str = "") -> dict[str, str]:
    """Settings by their dotted names, as the command line takes them."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and before.count(".") < 4:
            flat |= flatten(value, f"{before}{name}.")
        elif value not in ("", []):
            flat[f"{before}{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def _setting(config: dict[str, Any], group: str, name: str) -> Any:
    found = config.get(group)
    return found.get(name) if isinstance(found, dict) else None
