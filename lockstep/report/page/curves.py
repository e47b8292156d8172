"""Curves of a run: loss, accuracy, learning rate, loss scale, noise scale, throughput."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.events import CheckpointSaved, Evaluated
from lockstep.report.history import History, Spot, number
from lockstep.report.page.charts import Chart, Numbers, draw_curve, draw_marks, sample_rows, tell_time
from lockstep.report.page.log_axis import build_log_axis
from lockstep.report.phrases import brief, count, describe_writing, looks_twice, percent, plural

Told = Sequence[tuple[Spot, Any]]
MOST_ROWS, MOST_EVALUATIONS = 12, 60  # of a table of numbers
NONE = "–"


@dataclass(frozen=True)
class Column:
    """A curve in the table of its chart."""

    head: str
    told: Told
    show: Callable[[float], str]
    is_whole: bool = False  # of evaluations, which are few


def draw_curves(history: History) -> list[Chart]:
    """Every curve that the run has records for; of a prediction none, as its records all say the same."""
    if history.is_predicted:
        return []
    drawn = (
        draw_loss(history),
        draw_accuracy(history),
        draw_rate(history),
        draw_throughput(history),
        draw_loss_scale(history),
        draw_noise_scale(history),
    )
    return [chart for chart in drawn if chart]


def draw_loss(history: History) -> Chart | None:
    trained, checked = _known(history.steps, lambda step: step.loss), _known(history.evaluations, lambda it: it.loss)
    if not trained and not checked:
        return None
    traces, says = [], []
    if trained:
        traces.append(_curve("training", trained, "--blue"))
        first, last = (f"{trained[place][1]:.3g}" for place in (0, -1))
        went = f"stayed at {first}" if first == last else f"went from {first} to {last}"
        says.append(f"Training loss {went if len(trained) > 1 else f'was {first} at step {trained[0][0].step:,}'}")
    if checked:
        traces.append(_curve("validation", checked, "--orange", mode="lines+markers"))
        says.append(f"validation loss ended at {checked[-1][1]:.3g}")
    if averaged := _known(history.evaluations, lambda it: it.average_loss):  # never without those of the weights
        traces.append(_curve("validation, averaged weights", averaged, "--green", mode="lines+markers"))
        says.append(f"that of the averaged weights at {averaged[-1][1]:.3g}")
    return Chart(
        name="loss",
        title="Loss",
        says=_sentence(says),
        traces=traces,
        marks=_marks(history),
        layout={"yaxis": {"rangemode": "tozero"}},
        numbers=_tell(
            Column("training", trained, _show_short),
            Column("validation", checked, _show_short, is_whole=True),
            Column("validation, averaged weights", averaged, _show_short, is_whole=True),
        ),
    )


def draw_accuracy(history: History) -> Chart | None:
    trained = _known(history.steps, lambda step: step.top1)
    first, fifth = (_known(history.evaluations, choose) for choose in (lambda it: it.top1, lambda it: it.top5))
    if not trained and not first:
        return None
    averaged = _known(history.evaluations, lambda it: it.average_top1)
    traces, says = [], []
    if trained:
        traces.append(_curve("training, top-1", trained, "--blue", template="%{y:.1%}"))
    if first:
        traces.append(_curve("validation, top-1", first, "--orange", mode="lines+markers", template="%{y:.2%}"))
        if fifth:
            traces.append(_draw_fifth(fifth))
        if averaged:
            traces.append(
                _curve("averaged weights, top-1", averaged, "--green", mode="lines+markers", template="%{y:.2%}")
            )
        best = max(first, key=lambda point: point[1])
        says.append(
            f"Top-1 on the validation set ended at {percent(first[-1][1])}; its best was {percent(best[1])} "
            f"at step {best[0].step:,}, after {tell_time(best[0].wall_s)}"
        )
        says += [f"that of the averaged weights ended at {percent(averaged[-1][1])}"] if averaged else []
        says += ["each image was answered together with its mirror image"] if looks_twice(history.start) else []
    elif trained:
        says.append(f"Top-1 on training batches ended at {percent(trained[-1][1])}; no evaluation was made")
    return Chart(
        name="accuracy",
        title="Accuracy",
        says=_sentence(says),
        traces=traces,
        marks=_marks(history),
        layout={"yaxis": {"tickformat": ".0%", "range": [0, 1.02]}},
        numbers=_tell(
            Column("training, top-1", trained, percent),
            Column("validation, top-1", first, percent, is_whole=True),
            Column("validation, top-5", fifth, percent, is_whole=True),
            Column("averaged weights, top-1", averaged, percent, is_whole=True),
        ),
    )


def _draw_fifth(told: Told) -> dict[str, Any]:
    """Its points look different too: of a run with one evaluation, points are all that is drawn."""
    marker = {"color": "--orange", "size": 9, "symbol": "diamond-open", "line": {"width": 1.5}}
    dotted = {"mode": "lines+markers", "dash": "dot", "marker": marker, "cliponaxis": False}
    return _curve("validation, top-5", told, "--orange", template="%{y:.2%}", **dotted)


def draw_rate(history: History) -> Chart | None:
    told = _known(history.steps, lambda step: step.lr)
    if not told:
        return None
    highest = max(told, key=lambda point: point[1])
    at_its_highest = f"{highest[1]:.3g} at step {highest[0].step:,}"
    if len(told) > 1:
        at_its_highest += ", the highest that was recorded"
    ended = f", and {told[-1][1]:.3g} at the end" if told[-1][1] < highest[1] else ""
    return Chart(
        name="lr",
        title="Learning rate",
        says=f"The learning rate was {at_its_highest}{ended}.",
        traces=[_curve("learning rate", told, "--blue", showlegend=False)],
        marks=_marks(history),
        layout={"yaxis": {"rangemode": "tozero"}},
        numbers=_tell(Column("learning rate", told, _show_short)),
    )


def draw_loss_scale(history: History) -> Chart | None:
    told = _known(history.steps, lambda step: step.loss_scale)
    if not told:
        return None
    skipped = sum(event.skipped for _, event in history.steps)
    dropped = [(spot, number(event.loss_scale)) for spot, event in history.steps if event.skipped > 0]
    traces = [_curve("loss scale", told, "--blue", line={"color": "--blue", "width": 2, "shape": "hv"})]
    if dropped:
        traces.append(_curve("steps skipped", dropped, "--red", mode="markers"))
    return Chart(
        name="loss-scale",
        title="Loss scale",
        says=f"The loss scale ended at {told[-1][1]:,.0f}; {plural(skipped, 'step')} "
        f"{'was' if skipped == 1 else 'were'} skipped for gradients that were not finite.",
        traces=traces,
        marks=_marks(history),
        layout={"yaxis": build_log_axis([value for _, value in told])},
        numbers=_tell(
            Column("loss scale", told, _show_whole),
            Column("steps skipped", [(spot, it.skipped) for spot, it in history.steps if it.skipped > 0], _show_whole),
        ),
    )


def draw_noise_scale(history: History) -> Chart | None:
    told = _known(history.steps, lambda step: step.noise_scale)
    told = [(spot, value) for spot, value in told if value > 0]
    if not told:
        return None
    train = history.start.config.get("train")
    batch = number(train.get("global_batch")) if isinstance(train, dict) else None
    traces = [_curve("noise scale", told, "--blue")]
    if batch:
        ends = [told[0][0], told[-1][0]]
        traces.append(draw_curve("global batch", ends, [batch, batch], "--orange", dash="dash"))
    useful = history.summary["noise_scale"]
    if useful is None:
        return None
    beside = f"; the global batch is {batch:,.0f}" if batch else ""
    return Chart(
        name="noise-scale",
        title="Gradient noise scale",
        says=f"The largest useful batch was about {useful['middle']:,.0f} samples, and "
        f"{useful['last']:,.0f} at the end{beside}.",
        traces=traces,
        marks=_marks(history),
        layout={"yaxis": build_log_axis([value for _, value in told] + ([batch] if batch else []))},
        numbers=_tell(Column("noise scale, samples", told, _show_whole)),
    )


def draw_throughput(history: History) -> Chart | None:
    told = _known(history.steps, lambda step: step.images_per_second)
    if not told:
        return None
    saved = history.placed(CheckpointSaved)
    traces = [_curve("images/s", told, "--blue", template="%{y:,.0f} images/s")]
    # An evaluation and a checkpoint are often at one step: the triangle lies in the open square.
    square = {"color": "--green", "size": 13, "symbol": "square-open", "line": {"width": 2}}
    triangle = {"color": "--orange", "size": 9, "symbol": "triangle-down", "line": {"color": "--paper", "width": 1}}
    traces += [_draw_events("checkpoint", saved, told, square)] if saved else []
    traces += [_draw_events("evaluation", history.evaluations, told, triangle)] if history.evaluations else []
    values = sorted(value for _, value in told)
    low, middle, high = (count(values[place]) for place in (0, len(values) // 2, -1))
    says = [
        f"The median of its records was {middle} images/s, from {low} to {high}"
        if len(told) > 1
        else f"It was {middle} images/s at step {told[0][0].step:,}"
    ]
    if len(told) > 1 and (all_steps := number(history.summary["T"])) is not None:  # slow steps count by their time
        since = "all steps" if len(history.parts) == 1 else "those since the last resume"
        says.append(f"{since} together made {count(all_steps)}")
    marks = {"evaluation": len(history.evaluations), "checkpoint": len(saved)}
    if any(marks.values()):
        marked = " and ".join(plural(times, noun) for noun, times in marks.items() if times)
        says.append(f"{marked} {'is' if sum(marks.values()) == 1 else 'are'} marked")
    return Chart(
        name="throughput",
        title="Throughput",
        says=_sentence(says),
        traces=traces,
        marks=_marks(history),
        layout={"yaxis": {"rangemode": "tozero"}},
        numbers=_tell(Column("images/s", told, count)),
    )


def _describe_mark(event: Evaluated | CheckpointSaved) -> str:
    if isinstance(event, Evaluated):
        return f"top-1 {percent(event.top1)}, in {event.seconds:.1f} s"
    return f"step {event.step:,}, {describe_writing(event)}"


def _draw_events(name: str, events: Told, told: Told, marker: dict[str, Any]) -> dict[str, Any]:
    """Marks on the curve, whichever axis it is drawn over."""
    spots = [spot for spot, _ in events]
    # Between two records steps and seconds do not go on alike: an evaluation takes time and no step.
    heights = {axis: _follow(told, spots, field) for axis, field in (("step", 0), ("epoch", 1), ("wall", 2))}
    return draw_curve(
        name,
        spots,
        heights["step"],
        marker["color"],
        mode="markers",
        marker=marker,
        details=[_describe_mark(event) for _, event in events],
        template="%{customdata}",
        heights=heights,
        cliponaxis=False,  # a mark at the very end is whole
    )


def _follow(told: Told, spots: Sequence[Spot], field: int) -> list[float | None]:
    """The curve's height where each mark is, by one of a spot's fields."""
    heights: list[float | None] = []
    place = 0
    for at in (spot[field] for spot in spots):
        while place + 1 < len(told) and told[place + 1][0][field] <= at:
            place += 1
        (before, height), (after, other) = told[place], told[min(place + 1, len(told) - 1)]
        length = after[field] - before[field]
        between = (at - before[field]) / length if length > 0 else 0.0
        heights.append(height + (other - height) * min(1.0, max(0.0, between)))
    return heights


def _known(told: Sequence[tuple[Spot, Any]], choose: Callable[[Any], object]) -> list[tuple[Spot, float]]:
    """The points that have a number."""
    return [(spot, value) for spot, event in told if (value := number(choose(event))) is not None]


def _curve(name: str, told: Told, color: str, **more: Any) -> dict[str, Any]:
    return draw_curve(name, [spot for spot, _ in told], [value for _, value in told], color, **more)


def _marks(history: History) -> list[dict[str, Any]]:
    return draw_marks(history.boundaries, "resumed")


def _tell(*columns: Column) -> Numbers:
    """A column for each curve; of each its first, last, lowest and highest rows stay, and of evaluations nearly all."""
    columns = tuple(column for column in columns if column.told)
    cells: dict[tuple[int, float], list[str]] = {}
    times: dict[tuple[int, float], float] = {}
    kept: set[tuple[int, float]] = set()
    for place, column in enumerate(columns):
        keys = [(spot.step, spot.epoch) for spot, _ in column.told]
        for key, (spot, value) in zip(keys, column.told, strict=True):
            cells.setdefault(key, [NONE] * len(columns))[place] = column.show(value)
            times[key] = max(spot.wall_s, times.get(key, 0.0))  # an evaluation ends after its step
        values = [value for _, value in column.told]
        kept |= {keys[index] for index in sample_rows(len(keys), MOST_EVALUATIONS if column.is_whole else MOST_ROWS)}
        kept |= {keys[values.index(min(values))], keys[values.index(max(values))]}
    rows = [
        [f"{key[0]:,}", brief(key[1]), tell_time(times[key]), *cells[key]]
        for key in sorted(kept, key=times.__getitem__)
    ]
    return Numbers(["step", "epoch", "time", *(column.head for column in columns)], rows)


def _show_short(value: float) -> str:
    return f"{value:.4g}"


def _show_whole(value: float) -> str:
    return f"{value:,.0f}"


def _sentence(parts: Sequence[str]) -> str:
    return f"{'; '.join(parts)}."
