"""Full gradients at anchors (svrg, halp): their norms, the grid of the offsets, and how far offsets came on it."""

from collections.abc import Sequence

from lockstep.events import MOST_AT_END, MOST_AT_ZERO, AnchorTaken
from lockstep.report.history import History, Spot, number
from lockstep.report.page.charts import Chart, Numbers, draw_curve, draw_marks, sample_rows, tell_time
from lockstep.report.page.document import Section, tell
from lockstep.report.page.log_axis import build_log_axis
from lockstep.report.phrases import brief, percent, plural

Taken = Sequence[tuple[Spot, AnchorTaken]]
MOST_ROWS = 24


def tell_anchors(history: History) -> Section | None:
    """What the passes at anchors found; nothing of a run without any."""
    # A run that goes on where an anchor is due takes that anchor again.
    taken = list({spot.epoch: (spot, event) for spot, event in history.placed(AnchorTaken)}.values())
    if not taken:
        return None
    reached = [
        (spot, event)
        for spot, event in taken
        if number(event.share_at_end) is not None and number(event.share_at_zero) is not None
    ]
    charts = [_draw_norms(history, taken), *([_draw_reach(history, reached)] if reached else [])]
    lead = "At an anchor a pass over the epoch takes the full gradient, and the offsets of the weights begin anew."
    warnings = "".join(f'<p class="warning">{tell(text)}</p>' for text in _judge(reached))
    return Section("anchors", "Full gradients at anchors", lead=lead, above=warnings, charts=charts, short="Anchors")


def _judge(reached: Taken) -> list[str]:
    """Whether the grid of the offsets was too narrow, or too coarse, as the run warns of."""
    at_end = sum((event.share_at_end or 0.0) > MOST_AT_END for _, event in reached)
    at_zero = sum((event.share_at_zero or 0.0) > MOST_AT_ZERO for _, event in reached)
    found = (
        (at_end, f"more than {100 * MOST_AT_END:g} % of the offsets were at an end of their grid; a lower optim.mu"),
        (at_zero, f"more than {100 * MOST_AT_ZERO:g} % of the offsets were still at zero; a higher optim.mu"),
    )
    ends = ("lets them reach farther", "makes their grid finer")
    return [
        f"At {times} of {plural(len(reached), 'anchor')} {what} {end}."
        for (times, what), end in zip(found, ends, strict=True)
        if times
    ]


def _draw_norms(history: History, taken: Taken) -> Chart:
    spots = [spot for spot, _ in taken]
    norms, scales = [event.gradient_norm for _, event in taken], [event.scale for _, event in taken]
    traces = [
        draw_curve("norm of the full gradient", spots, norms, "--blue", mode="lines+markers", template="%{y:.3g}")
    ]
    says = f"The norm of the full gradient was {_show(norms[0])} at step {taken[0][1].step:,}"
    if len(taken) > 1:
        says += f" and {_show(norms[-1])} at step {taken[-1][1].step:,}"
    has_grid = any(number(scale) is not None for scale in scales)
    if has_grid:
        traces.append(draw_curve("scale of the offsets", spots, scales, "--orange", mode="lines+markers", dash="dash"))
        says += f"; the scale of the offsets ended at {_show(scales[-1])}"
    rows = [
        [
            *(f"{event.step:,}", brief(spot.epoch), tell_time(spot.wall_s)),
            *(_show(event.loss), _show(event.gradient_norm), _show(event.scale)),
        ]
        for spot, event in _sample(taken)
    ]
    return Chart(
        name="full-gradients",
        title="Norm of the full gradient",
        says=f"{says}.",
        traces=traces,
        marks=draw_marks(history.boundaries, "resumed"),
        layout={"yaxis": build_log_axis([value for value in map(number, [*norms, *scales]) if value is not None])},
        numbers=Numbers(["step", "epoch", "time", "loss of all samples", "norm", "scale of the offsets"], rows),
        note="The scale is the distance between neighbours on the grid of the offsets; it falls with the norm."
        if has_grid
        else "",
    )


def _draw_reach(history: History, reached: Taken) -> Chart:
    spots = [spot for spot, _ in reached]
    curves = (
        ("at an end of their grid", "--red", [event.share_at_end for _, event in reached]),
        ("at zero", "--gray", [event.share_at_zero for _, event in reached]),
    )
    at_end, at_zero = _share(reached[-1][1].share_at_end), _share(reached[-1][1].share_at_zero)
    rows = [
        [f"{event.step:,}", brief(spot.epoch), _share(event.share_at_end), _share(event.share_at_zero)]
        for spot, event in _sample(reached)
    ]
    return Chart(
        name="offsets",
        title="Offsets before each anchor",
        says=f"Before the anchor at step {reached[-1][1].step:,}, {at_end} of the offsets were at an end of their grid "
        f"and {at_zero} at zero.",
        traces=[
            draw_curve(name, spots, values, color, mode="lines+markers", template="%{y:.1%}")
            for name, color, values in curves
        ],
        marks=draw_marks(history.boundaries, "resumed"),
        layout={"yaxis": {"tickformat": ".0%", "range": [-0.02, 1.02]}},
        numbers=Numbers(["step", "epoch", "at an end", "at zero"], rows),
    )


def _sample(taken: Taken) -> Taken:
    return [taken[place] for place in sample_rows(len(taken), MOST_ROWS)]


def _show(value: object) -> str:
    found = number(value)
    return "–" if found is None else brief(found, 3)


def _share(value: float | None) -> str:
    return percent(value or 0.0)
