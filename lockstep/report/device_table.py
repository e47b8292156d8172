"""A device profile for people: a table of batches and ways, and which layers the time goes to. Torch-free."""

from collections.abc import Sequence

from rich.table import Table

from lockstep.plan.device import BatchTime, DeviceProfile
from lockstep.report.phrases import brief, count, size

MOST_LAYERS = 12


def describe_profile(profile: DeviceProfile) -> list[str]:
    """Of what it is, and what the input can do."""
    lines = [
        f"[bold]{profile.model} on {profile.device}[/bold], {profile.source}: {profile.precision}, "
        f"{profile.image_size} pixels, {profile.rule}, {size(profile.memory_bytes)} of memory",
        profile.note,
    ]
    if found := profile.input:
        copied = f"; {found.copy_bytes_s / 1e9:.1f} GB/s to the device" if found.copy_bytes_s else ""
        by_device = f", {found.device_images_s:,.0f} decoded by the device" if found.device_images_s else ""
        lines.append(
            f"input: {found.images_per_core_s:,.0f} images/s a core ({found.decoder}){by_device}, "
            f"{size(round(found.image_bytes))} an image{copied}"
        )
    return [line for line in lines if line]


def build_batch_table(rows: Sequence[BatchTime]) -> Table:
    """Milliseconds of a step and of its parts, executed in one way."""
    title = f"{rows[0].execution}: milliseconds of a step with nothing sent"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for heading in ("batch", "images/s", "step", "forward", "backward", "update", "launch", "memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = (row.step_s, row.forward_s, row.backward_s, row.update_s, row.launch_s)
        table.add_row(
            f"{row.batch:,}",
            count(row.batch / row.step_s),
            *(brief(1e3 * seconds, 3) for seconds in times),
            size(row.memory_bytes),
        )
    return table


def build_layer_table(row: BatchTime) -> Table:
    """The layers that take longest, in forward order, and the others together."""
    title = f"layers at batch {row.batch:,}, {row.execution}, in milliseconds"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("layer")
    for heading in ("forward", "backward", "keeps", "gradients"):
        table.add_column(heading, justify="right")
    ranked = sorted(row.layers, key=lambda layer: -layer.forward_s - layer.backward_s)[:MOST_LAYERS]
    num_bytes = {slot.name: slot.num_bytes for slot in row.slots}
    shown = [(layer.name, [layer]) for layer in row.layers if layer in ranked]
    if others := [layer for layer in row.layers if layer not in ranked]:
        shown.append((f"{len(others)} others", others))
    for name, layers in shown:
        table.add_row(
            name,
            brief(1e3 * sum(layer.forward_s for layer in layers), 3),
            brief(1e3 * sum(layer.backward_s for layer in layers), 3),
            size(sum(layer.activation_bytes for layer in layers)),
            size(sum(num_bytes[slot] for layer in layers for slot in layer.slots)),
        )
    return table
