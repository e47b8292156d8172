"""Layer by layer over the run: gradient norms, weight norms and trust ratios as heat maps."""

import math
from typing import Any

from lockstep.events import LayersMeasured
from lockstep.report.history import History, Spot, number
from lockstep.report.page.charts import LONGEST_LABEL, Chart, Numbers, label, place, sample_rows
from lockstep.report.page.document import Section
from lockstep.report.phrases import brief, plural

MOST_COLUMNS = 160
MOST_LAYERS = 400
SHORT_NAME = 18  # characters of a layer's name beside a map, if that tells layers apart

GRADIENTS = ("gradient_norms", "gradient-norms", "Gradient norms")
MAPS = (GRADIENTS, ("trust_ratios", "trust-ratios", "Trust ratios"))  # a ratio is weight over gradient: two say all
MAPS_WITHOUT_RATIOS = (GRADIENTS, ("weight_norms", "weight-norms", "Weight norms"))


def tell_layers(history: History) -> Section | None:
    """A heat map for each quantity that was measured."""
    measured = history.placed(LayersMeasured)
    layers = [str(layer) for layer in history.start.layers][:MOST_LAYERS]
    if not measured or not layers:
        return None
    maps = MAPS if any(event.trust_ratios for _, event in measured) else MAPS_WITHOUT_RATIOS
    charts = [chart for field, name, title in maps if (chart := _draw_map(measured, layers, field, name, title))]
    if not charts:
        return None
    lead = (
        "A row for each layer, the first one after the image at the top and the classifier at the bottom. Colours go "
    )
    lead += "by powers of ten, with a gap where it is zero."
    return Section("layers", "Layer by layer", lead=lead, charts=charts, short="Layers")


def _draw_map(
    measured: list[tuple[Spot, LayersMeasured]], layers: list[str], field: str, name: str, title: str
) -> Chart | None:
    columns = [(spot, getattr(event, field)) for spot, event in measured if getattr(event, field)]
    columns = [columns[index] for index in sample_rows(len(columns), MOST_COLUMNS)]
    if not columns:
        return None
    # The layout is in backward order: turned round, so that the image's side is at the top.
    rows = [
        [_log(values[place]) if place < len(values) else None for _, values in columns] for place in range(len(layers))
    ]
    known = sorted(value for row in rows for value in row if value is not None)
    if not known:
        return None
    low, high = known[len(known) // 100], known[-1 - len(known) // 100]
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)
    last = [(row[-1], layer) for row, layer in zip(rows, layers, strict=True) if row[-1] is not None]
    smallest, largest = min(last, default=None), max(last, default=None)
    says = f"{title} of {len(layers)} layers at {plural(len(columns), 'step')}"
    if smallest and largest:
        low_end, high_end = (f"{brief(10**value, 2)} ({layer})" for value, layer in (smallest, largest))
        says += f"; at the end from {low_end} to {high_end}"
    return Chart(
        name=name,
        title=title,
        says=f"{says}.",
        traces=[
            {
                "type": "heatmap",
                "z": rows,
                "at": place([spot for spot, _ in columns]),
                "y": list(range(len(layers))),
                "customdata": [[label(layer)] * len(columns) for layer in layers],
                "colorscale": "--heat",
                "zmin": low,
                "zmax": high,
                "colorbar": _draw_bar(low, high),
                "hovertemplate": "%{customdata}<br>10^%{z:.2f}<extra></extra>",
                "hoverongaps": False,
            }
        ],
        layout={
            "yaxis": {
                "tickvals": _ticks(len(layers)),
                "ticktext": shorten_names([layers[tick] for tick in _ticks(len(layers))]),
                "showgrid": False,
                "range": [-0.5, len(layers) - 0.5],
            },
            "xaxis": {"showgrid": False},
        },
        height=max(260, min(560, 110 + 4 * len(layers))),
        numbers=Numbers(
            ["layer", "first", "last"],
            [[layer, _show(row[0]), _show(row[-1])] for layer, row in zip(layers, rows, strict=True)],
        ),
    )


def _log(value: object) -> float | None:
    found = number(value)
    return round(math.log10(found), 3) if found is not None and found > 0 else None


def _show(value: float | None) -> str:
    return "–" if value is None else brief(10**value, 3)


def _ticks(count: int) -> list[int]:
    return sample_rows(count, 9)


def shorten_names(names: list[str]) -> list[str]:
    """Long names without their middle, each as short as all can be and still be told apart."""
    length = SHORT_NAME
    while length < LONGEST_LABEL and len({_cut(name, length) for name in names}) < len(set(names)):
        length += 1
    return [label(_cut(name, length)) for name in names]


def _cut(name: str, length: int) -> str:
    """The beginning, which says in which block a layer is, and the end, which says what it is there."""
    begin = (length - 1) // 2
    return name if len(name) <= length else f"{name[:begin]}…{name[begin + 1 - length :]}"


def _draw_bar(low: float, high: float) -> dict[str, Any]:
    whole = range(math.floor(low), math.ceil(high) + 1)
    powers: list[float] = [power for power in whole if low <= power <= high] or [low, high]
    step = -(-len(powers) // 6)
    return {
        "tickvals": powers[::step],
        "ticktext": [
            f"10<sup>{power}</sup>" if power == int(power) else f"{10**power:.2g}" for power in powers[::step]
        ],
        "thickness": 8,
        "outlinewidth": 0,
        "len": 0.9,
        "xpad": 6,
    }
