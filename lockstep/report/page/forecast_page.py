"""The page of a plan: sliders for devices, batch and network, and what `lockstep plan` says at each of their stops.

Every stop was simulated here, by `plan/grid.py`: the page looks predictions up and makes none, so that there is one
model and not a second one in JavaScript. `forecast.js` moves the sliders and draws.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lockstep.plan.choose import MARGIN
from lockstep.plan.cluster import Cluster
from lockstep.plan.grid import Batches, Grid
from lockstep.plan.nccl import NETWORK_US
from lockstep.plan.prediction import Impossible, Prediction
from lockstep.plan.simulate import StepParts
from lockstep.plan.workload import Workload
from lockstep.report.page.charts import Chart, Numbers
from lockstep.report.page.document import Document, Section, build_document, build_table, escape
from lockstep.report.phrases import brief, count, percent
from lockstep.report.plan_display import KWH, describe_impossible, show_quantity, tell_long

# What the page knows of each prediction, by the names that `--json` has.
COLUMNS = (
    *("step_s", "comm_s", "images_per_second", "speed_one_rank", "efficiency", "efficiency_whole", "train_s"),
    *("dollars", "energy_j", "memory_bytes", "devices", "nodes", "global_batch", "batch_per_device", "passes", "steps"),
)
NEEDS = ("images_per_second", "decode_cores", "storage_bytes_per_s")
PARTS = tuple(field.name for field in fields(StepParts))
WORDS = ("binds", "advice", "reduction")  # sentences, each kept once
FOOTER = "Made by Lockstep: predictions, and no measurements. Nothing in this page was fetched, and nothing leaves it."
SAYS = "The sentence about it, and its numbers in a table, need JavaScript as the drawing does."


def build_forecast(rows: Sequence[Prediction | Impossible], grid: Grid, workload: Workload, cluster: Cluster) -> str:
    """The page from what was asked for and from every setting beside it."""
    asked = [row for row in rows if isinstance(row, Prediction)]
    first = asked[0]
    what = (
        f"{first.model} on {first.device}, {cluster.devices_per_node} in a node: {first.epochs:g} epochs of "
        f"{workload.num_images:,} images. How long, how much and what binds, before anyone rents it."
    )
    header = (
        f'<p class="kind">Lockstep · plan</p><h1>{escape(first.recipe)} on {escape(cluster.name)}</h1>'
        f'<p class="what">{escape(what)}</p><p class="state">Profile {escape(first.profile)}.</p>'
    )
    sections = [
        Section(
            "setting",
            "At this setting",
            above=_build_controls(grid),
            charts=_list_charts(grid, cluster, first),
            body='<div id="changed"></div><div id="every"></div>',
            short="Setting",
        ),
        _tell_asked(rows),
        _tell_ground(asked, grid),
    ]
    return build_document(
        Document(
            title=f"{first.recipe} on {cluster.name} – Lockstep",
            header=header,
            sections=sections,
            data={"plan": encode_grid(grid, cluster.machine.dollars_per_device_hour)},
            scripts=("page.js", "forecast.js"),
            footer=FOOTER,
        )
    )


def encode_grid(grid: Grid, price: float | None) -> dict[str, Any]:
    """The grid by columns: one value for each point, or one for each network where the network matters."""
    first = grid.points[0][0]
    columns = {name: [_merge([getattr(one, name) for one in point]) for point in grid.points] for name in COLUMNS}
    columns |= {name: [_merge([getattr(one.parts, name) for one in point]) for point in grid.points] for name in PARTS}
    if first.input is not None:
        for name in NEEDS:
            columns[f"node_{name}"] = [
                _merge([getattr(one.input, name) for one in point if one.input]) for point in grid.points
            ]
    words: dict[str, list[str]] = {}
    for name in WORDS:
        numbers: dict[str, int] = {}
        columns[name] = [
            _merge([numbers.setdefault(_tell(one, name), len(numbers)) for one in point]) for point in grid.points
        ]
        words[name] = list(numbers)
    return {
        "devices": grid.devices,
        "bandwidths": grid.bandwidths,
        "latencies": grid.latencies,
        "start": {
            "devices": grid.start_devices,
            "bandwidth": grid.start_bandwidth,
            "latency": grid.start_latency,
            "strong": grid.strong.start,
            "weak": grid.weak.start,
        },
        "strong": _encode_batches(grid.strong),
        "weak": _encode_batches(grid.weak),
        "columns": columns,
        "words": words,
        "parts": PARTS,
        "is_between": grid.is_between,
        "epochs": first.epochs,
        "memory_limit_bytes": first.memory_limit_bytes,
        "dollars_per_device_hour": price,
        "node": None
        if first.input is None
        else {"cores": first.input.cores, "storage_bytes_per_s": first.input.storage_limit_bytes_per_s},
    }


def _encode_batches(batches: Batches) -> dict[str, Any]:
    return {"sizes": batches.sizes, "places": batches.places}


def _merge(values: list[Any]) -> Any:
    """One value where all are the same: what no network changes is kept once."""
    return values[0] if all(value == values[0] for value in values) else values


def _tell(one: Prediction, name: str) -> str:
    if name != "reduction":
        return str(getattr(one, name))
    if one.devices == 1:
        return one.reduction.text
    return f"{one.reduction.text}: {', '.join(dict.fromkeys(one.reduction.all_reduces))}"


def _build_controls(grid: Grid) -> str:
    """Sliders over a headline; both are shown by the script, which alone can fill them."""
    where = "between nodes" if grid.is_between else "inside the node"
    sliders = "".join(
        f'<div class="slider"><label for="{name}">{text}</label><output id="{name}-value" for="{name}"></output>'
        f'<input type="range" id="{name}" min="0" max="{last}" step="1" value="{start}"></div>'
        for name, text, last, start in (
            ("devices", "Devices", len(grid.devices) - 1, grid.start_devices),
            ("batch", "Batch", len(grid.strong.sizes) - 1, grid.strong.start),
            ("bandwidth", f"Bandwidth {where}", len(grid.bandwidths) - 1, grid.start_bandwidth),
            ("latency", f"Latency {where}", len(grid.latencies) - 1, grid.start_latency),
        )
    )
    scalings = "".join(
        f'<label><input type="radio" name="scaling" value="{value}"{" checked" if value == "strong" else ""}>'
        f"<span>{text}</span></label>"
        for value, text in (("strong", "Batch for all"), ("weak", "Batch for each device"))
    )
    return (
        '<div class="controls" id="controls" role="group" aria-label="What to plan for" hidden>'
        f'<div class="sliders">{sliders}</div><div class="choices">'
        f'<fieldset class="switch"><legend>What the batch slider sets</legend>{scalings}</fieldset>'
        '<button type="button" id="reset">Reset</button></div></div>'
        '<div id="headline" hidden><p class="warning" id="reason"></p><p class="binds" id="binds" role="status"></p>'
        '<dl class="facts" id="facts"></dl>'
        '<div class="equation" id="equation" role="group" aria-label="T = S · N · e"></div>'
        '<dl class="pairs" id="pairs"></dl></div>'
    )


def _list_charts(grid: Grid, cluster: Cluster, first: Prediction) -> list[Chart]:
    cost = "Cost" if first.dollars is not None else "Energy" if first.energy_j is not None else "Device hours"
    links = "between nodes" if grid.is_between else "inside the node"
    titles = {
        "time": "Time for the recipe's epochs, against devices",
        "cost": f"{cost}, against devices",
        "efficiency": "Efficiency, against devices",
        "network": f"Time, against bandwidth {links}",
    }
    note = (
        f"As in a run, PyTorch's own all-reduce stays unless another way is {100 * MARGIN:g} % quicker: a line may "
        "rise a little where the network gets better."
    )
    if cluster.machine.backend == "nccl" and grid.is_between:
        note += (
            f" NCCL's own hops take up to {max(NETWORK_US['ring']):g} µs; a latency below that changes none of them."
        )
    charts = [
        Chart(name, title, SAYS, [], height=320, note=note if name == "network" else "")
        for name, title in titles.items()
    ]
    height = 120 + 30 * len(grid.devices)
    return [*charts, Chart("parts", "What a step is made of, against devices", SAYS, [], height=height, wide=True)]


def _tell_asked(rows: Sequence[Prediction | Impossible]) -> Section:
    """The sizes of the command, as it printed them."""
    heads = ["devices", "scaling", "each", "step ms", "T", "S", "e", "of best", "time", "dollars", "kWh", "binds"]
    table = [
        [
            f"{one.devices:,}",
            one.scaling,
            f"{one.batch_per_device:,}",
            show_quantity(one.step_s * 1e3),
            count(one.images_per_second),
            count(one.speed_one_rank),
            percent(one.efficiency),
            percent(one.efficiency_whole),
            tell_long(one.train_s),
            "–" if one.dollars is None else f"{one.dollars:,.0f}",
            "–" if one.energy_j is None else brief(one.energy_j / KWH, 3),
            one.binds,
        ]
        for one in rows
        if isinstance(one, Prediction)
    ]
    rest = "".join(f"<li>{escape(describe_impossible(row))}</li>" for row in rows if isinstance(row, Impossible))
    body = build_table(Numbers(heads, table), name="asked-table", is_whole=True) + (f"<ul>{rest}</ul>" if rest else "")
    lead = (
        "Strong scaling keeps the recipe's global batch; weak scaling gives each device as many images. T: images/s of "
        "all; S: of one device that waits for nobody; of best: a device's rate over its best at any batch."
    )
    return Section("asked", "As asked", lead=lead, body=body)


def _end_sentence(text: str) -> str:
    """A note of the terminal's, which stands behind a word there, as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _tell_ground(asked: Sequence[Prediction], grid: Grid) -> Section:
    """What to know before believing it."""
    told = [
        f"Every stop of the sliders was simulated, {grid.num_settings:,} settings in all: no prediction is "
        "interpolated or made in the page, which adds only ratios and the dotted line of perfect scaling.",
        f"The times suppose {asked[0].epochs:g} epochs at every batch; whether a larger one trains as well, no planner "
        "knows.",
        "Not in it: start-up, evaluation and checkpoints; congestion, uneven links, ranks that are always slow.",
        *dict.fromkeys(note for one in asked for note in one.notes),
    ]
    items = "".join(f"<li>{escape(_end_sentence(text))}</li>" for text in told)
    return Section("ground", "What it rests on", body=f"<ul>{items}</ul>", short="Assumptions")
