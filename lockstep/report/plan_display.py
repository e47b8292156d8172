"""A plan for people, in a terminal: tables, bars of plain characters, and what binds. Torch-free."""

from collections.abc import Sequence
from dataclasses import astuple

from rich.table import Table

from lockstep.plan.cluster import Cluster
from lockstep.plan.optimizers import RuleRow
from lockstep.plan.prediction import Impossible, Prediction
from lockstep.plan.published import Checked, Claim
from lockstep.report.phrases import brief, count, plural, size

BAR = 60  # characters of the longest step
# What a step is made of, each by a letter.
LETTERS = "ifbscLu"
LEGEND = "i input, f forward, b backward, s slowest rank, c communication, L launching, u update"
KWH = 3.6e6


def build_plan_table(predictions: Sequence[Prediction], title: str) -> Table:
    """How quick each size is."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left", pad_edge=False)
    for head in ("devices", "each", "step ms", "T", "S", "e", "of best", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("binds", no_wrap=True)
    for one in predictions:
        table.add_row(
            f"{one.devices:,}",
            f"{one.batch_per_device:,}",
            brief(one.step_s * 1e3),
            count(one.images_per_second),
            count(one.speed_one_rank),
            f"{one.efficiency:.1%}",
            f"{one.efficiency_whole:.1%}",
            tell_long(one.train_s),
            one.binds,
        )
    return table


def build_need_table(predictions: Sequence[Prediction]) -> Table:
    """What each size costs, and what a device and a node must have."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("devices", "nodes", "dollars", "kWh", "memory GB", "node images/s", "cores", "disk GB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in predictions:
        need = one.input
        table.add_row(
            f"{one.devices:,}",
            f"{one.nodes:,}",
            "-" if one.dollars is None else f"{one.dollars:,.0f}",
            "-" if one.energy_j is None else brief(one.energy_j / KWH, 3),
            f"{one.memory_bytes / 1e9:.3g}/{one.memory_limit_bytes / 1e9:.3g}",
            "-" if need is None else count(need.images_per_second),
            "-" if need is None else f"{need.decode_cores:,.0f}/{need.cores or '?'}",
            "-" if need is None else f"{need.storage_bytes_per_s / 1e9:.2g}",
        )
    return table


def tell_long(seconds: float) -> str:
    """A length of time in the unit that fits it."""
    for unit, scale in (("days", 2 * 86400), ("h", 7200), ("min", 120)):
        if seconds >= scale:
            return f"{brief(seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit], 3)} {unit}"
    return f"{seconds:.3g} s"


def draw_steps(predictions: Sequence[Prediction]) -> list[str]:
    """Each step as a bar of letters for its parts, all of the same length: shares, with milliseconds beside them."""
    return [f"{one.devices:>9,} {draw_bar(one)} {brief(one.step_s * 1e3)} ms" for one in predictions]


def draw_bar(one: Prediction) -> str:
    """The parts of a step in letters, rounded so that they fill the bar."""
    edges, total, bar = 0.0, one.step_s, ""
    for letter, seconds in zip(LETTERS, astuple(one.parts), strict=True):
        edges += seconds
        bar += letter * (round(BAR * edges / total) - len(bar))
    return bar


def draw_scaling(predictions: Sequence[Prediction]) -> list[str]:
    """Images per second of each device: a bar for what is reached, dots up to the best of one device."""
    lines = []
    for one in predictions:
        reached = round(BAR * one.efficiency_whole)
        rate = count(one.images_per_second / one.devices)
        lines.append(f"{one.devices:>9,} {'#' * reached}{'.' * (BAR - reached)} {rate}")
    return lines


def describe_size(one: Prediction) -> list[str]:
    """How gradients travel, and what to change."""
    lines = [f"{plural(one.devices, 'device')}: {one.advice}"]
    if one.devices > 1:
        words = list(dict.fromkeys(one.reduction.all_reduces))
        lines.append(
            f"  {one.reduction.rule}, {one.reduction.text}: {', '.join(words)}; "
            f"{brief(one.comm_s * 1e3, 3)} ms of messages, {brief(one.parts.communicate_s * 1e3, 3)} ms exposed"
        )
    return lines


def describe_impossible(row: Impossible) -> str:
    return f"{plural(row.devices, 'device')}, {row.scaling} scaling: {row.reason}"


def build_cluster_table(clusters: Sequence[Cluster]) -> Table:
    """The presets, with what they are made of."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("cluster", style="cyan", no_wrap=True)
    for head in ("a node", "inside GB/s", "between GB/s", "cores", "disk GB/s", "$/h", "watts"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in clusters:
        machine = one.machine
        storage = machine.storage_bytes_per_s
        table.add_row(
            one.name,
            f"{one.devices_per_node} × {machine.device}",
            f"{one.intra.bytes_per_s / 1e9:,.3g}",
            f"{one.inter.bytes_per_s / 1e9:,.3g}",
            "-" if machine.cores_per_node is None else f"{machine.cores_per_node}",
            "-" if storage is None else f"{storage / 1e9:,.3g}",
            "-" if machine.dollars_per_device_hour is None else f"{machine.dollars_per_device_hour:.2f}",
            "-" if machine.watts_per_device is None else f"{machine.watts_per_device:,.0f}",
        )
    return table


def build_rule_table(rows: Sequence[RuleRow]) -> Table:
    """Update rules beside each other."""
    title = "update rules: bytes that a device keeps, moves and sends; milliseconds"
    table = Table(box=None, header_style="bold", title=title, title_justify="left", pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for head in ("devices", "state", "moved", "sent", "update", "exposed", "step"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.rule}{', sharded' if row.sharded else ''}",
            f"{row.devices:,}",
            size(row.state_bytes),
            size(row.moved_bytes),
            size(row.sent_bytes),
            f"{row.update_s * 1e3:.3f}",
            f"{row.exposed_s * 1e3:.3f}",
            f"{row.step_s * 1e3:,.5g}",
        )
    return table


def build_checked_table(rows: Sequence[Checked]) -> Table:
    """Predicted against published."""
    title = "predicted against published; *: calibrated on this row, which is no prediction"
    table = Table(box=None, header_style="bold", title=title, title_justify="left", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("quantity", no_wrap=True)
    for head in ("published", "predicted", "off by"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.run}{' *' if row.calibrated else ''}",
            row.quantity,
            show_quantity(row.published),
            show_quantity(row.predicted),
            f"{row.error:+.1%}",
        )
    return table


def show_quantity(value: float) -> str:
    """Four digits, never as a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def list_check_notes(rows: Sequence[Checked]) -> list[str]:
    """What is to be said of single rows."""
    return [f"{row.run}: {row.note}" for row in rows if row.note]


def build_claim_table(claims: Sequence[Claim]) -> Table:
    """The paper's claims, and what the simulator makes of them."""
    table = Table(box=None, header_style="bold", title="the paper's claims", title_justify="left", pad_edge=False)
    for head in ("claim", "claimed", "simulated"):
        table.add_column(head)
    for claim in claims:
        table.add_row(claim.claim, claim.claimed, claim.simulated)
    return table
