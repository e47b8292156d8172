"""Our kernels between convolutions beside the bytes they must move and beside the compiler's, over a whole network.

Every time is the median over replays of a CUDA graph that launches a pass over several copies of its arrays, one after
the other; the copies are far beyond the L2 cache together, so each finds its arrays in memory and not in the cache. The
floor is what the bytes of the passes take at the speed of a measured copy.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lockstep.bench import products
from lockstep.bench.device_time import count_copies, measure_cold, measure_copy, measure_replay, record, warm_up
from lockstep.bench.norm_launches import Copy, build_copy, build_launches, build_norms, call_norm
from lockstep.bench.norm_shapes import HALF_BYTES, Use, find_norms, list_passes
from lockstep.bench.results import check_files, write_rows
from lockstep.engine.compiler import guard_compiled
from lockstep.errors import LockstepError
from lockstep.kernels import has_triton
from lockstep.models import RESNET_DEPTHS


@dataclass(frozen=True)
class Row:
    """A pass, or a norm's whole forward or backward, at one shape; seconds and bytes are those of one of `count`."""

    name: str
    channels: int
    side: int
    count: int
    seconds: float
    floor_s: float
    bytes: int
    compiled_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the JSON file."""
        fields = dict(vars(self))
        return {"pass": fields.pop("name"), **fields}


def run_bench(
    model: str, *, batch: int, compiled: bool = True, json_file: Path | None = None, console: Console | None = None
) -> list[Row | products.Row]:
    """Measure every pass, norm and fused product of a model; prints tables and what they come to."""
    if model not in ("alexnet", *RESNET_DEPTHS):
        raise LockstepError(f"--model {model} is unknown; choose alexnet or {', '.join(RESNET_DEPTHS)}.")
    check_files(json_file, None)
    if not (torch.cuda.is_available() and has_triton()):
        raise LockstepError("`bench kernels` times the fused kernels and needs a GPU with Triton; run it on one.")
    console = console or Console()
    bytes_per_s = measure_copy(torch.device("cuda"))
    console.print(f"A copy on the device moves {bytes_per_s / 1e12:.2f} TB/s.", highlight=False)
    uses = find_norms(model, batch)
    passes: list[Row] = []
    wholes: list[Row] = []
    fused: list[products.Row] = []
    parts: list[tuple[list[Any], Iterator[Any]]] = [
        (passes, measure_passes(uses, bytes_per_s, console)),
        (wholes, measure_wholes(uses, bytes_per_s, compiled, console)),
        (fused, products.measure_products(products.find_products(model, batch), bytes_per_s, console)),
    ]
    try:
        for found, measured in parts:
            for row in measured:
                found.append(row)
                if json_file is not None:
                    rows: list[Row | products.Row] = [*passes, *wholes, *fused]
                    write_rows(json_file, [row.to_json() for row in rows])
    except torch.cuda.OutOfMemoryError:
        raise LockstepError(f"The GPU has too little memory for --batch {batch}; choose a smaller one.") from None
    console.print(draw_table(f"{model}, batch {batch}, FP16: each pass over its norms by itself", passes))
    console.print(draw_table("whole norms, one gradient coming back", wholes))
    console.print("Small arrays stay in the cache from a norm's first pass to its second, which may beat the floor.")
    console.print(sum_up(wholes), highlight=False, soft_wrap=True)
    if fused:
        console.print(products.draw_table(fused))
        console.print(products.sum_up(fused), highlight=False, soft_wrap=True)
    return [*passes, *wholes, *fused]


def measure_passes(uses: Counter[Use], bytes_per_s: float, console: Console) -> Iterator[Row]:
    """Each pass at each shape, once, however many kinds of norm have it."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for use, count in uses.items():
        for part in list_passes(use):
            counts[part.name, use.channels, use.side] += count
    done = set()
    for use in uses:
        console.print(f"  passes of {_describe(use)}", highlight=False)
        of_copies = zip(*(build_launches(use, copy) for copy in _build_copies(use)), strict=True)
        for part, launches in zip(list_passes(use), of_copies, strict=True):
            key = (part.name, use.channels, use.side)
            if key not in done:
                done.add(key)
                num_bytes = part.count_bytes(use)
                yield Row(*key, counts[key], measure_cold(launches), num_bytes / bytes_per_s, num_bytes)


def measure_wholes(uses: Counter[Use], bytes_per_s: float, compiled: bool, console: Console) -> Iterator[Row]:
    """Forward and backward of each norm through autograd, ours and the compiler's.

    One gradient comes back even where the network has two: for the compiled norm, autograd would add them outside it.
    """
    alike: Counter[Use] = Counter()
    for use, count in uses.items():
        alike[use._replace(num_gradients=1)] += count
    for use, count in alike.items():
        console.print(f"  {_describe(use)}, whole" + (" and compiled" if compiled else ""), highlight=False)
        copies = _build_copies(use)
        ours = _measure_whole(use, copies, call_norm, fused=True)
        theirs = _measure_compiled(use, copies, console) if compiled else (None, None)
        for is_forward, seconds, compiled_s in zip((True, False), ours, theirs, strict=True):
            num_bytes = sum(part.count_bytes(use) for part in list_passes(use) if part.is_forward == is_forward)
            name = f"{use.kind}, {'forward' if is_forward else 'backward'}"
            yield Row(
                name, use.channels, use.side, count, seconds, num_bytes / bytes_per_s, num_bytes, compiled_s=compiled_s
            )


def _measure_compiled(use: Use, copies: list[Copy], console: Console) -> tuple[float | None, float | None]:
    from torch._functorch import config

    guard_compiled()
    torch.compiler.reset()  # or it gives up compiling after a few shapes
    try:
        with config.patch(donated_buffer=False):  # or what was saved for a backward pass is written to in it
            return _measure_whole(use, copies, torch.compile(call_norm, dynamic=False), fused=False)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise nearly anything; our own times are still good
        reason = " ".join(str(error).split())[:160]
        console.print(f"left out: compiled {_describe(use)}: {reason}", highlight=False, markup=False, soft_wrap=True)
        return None, None


def _measure_whole(use: Use, copies: list[Copy], call: Callable[..., Tensor], *, fused: bool) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    norm, shortcut_norm = build_norms(use, copies[0].x.device, fused=fused)
    parameters = [*norm.parameters(), *(shortcut_norm.parameters() if shortcut_norm else ())]
    for copy in copies:
        for tensor in copy.inputs:
            tensor.requires_grad_()

    def forward(copy: Copy) -> Tensor:
        return call(use.kind, norm, copy.x, copy.shortcut, shortcut_norm, use.padding)

    def backward(copy: Copy, y: Tensor) -> tuple[Tensor, ...]:
        # What the forward pass saved must stay: memory let go while recording would be written to in every replay.
        return torch.autograd.grad(y, [*copy.inputs, *parameters], copy.dy, retain_graph=True)

    warm_up(lambda: backward(copies[0], forward(copies[0])))
    there, outputs = record(lambda: [forward(copy) for copy in copies])
    # All of them after all forwards, so that none finds in the cache what its forward left there.
    back, _ = record(lambda: [backward(copy, y) for copy, y in zip(copies, outputs, strict=True)], there.pool())
    return measure_replay(there.replay) / len(copies), measure_replay(back.replay) / len(copies)


def _build_copies(use: Use) -> list[Copy]:
    return [build_copy(use, torch.device("cuda")) for _ in range(count_copies(HALF_BYTES * use.numel))]


def _describe(use: Use) -> str:
    return f"{use.kind}, {use.channels} × {use.side} × {use.side}"


def draw_table(title: str, rows: list[Row]) -> Table:
    """The rows with how far each is from its floor, and where compiled, how much slower the compiler's is."""
    table = Table(box=None, header_style="bold", title=title)
    table.add_column("pass")
    has_compiled = any(row.compiled_s for row in rows)
    compiled_headings = ("compiled µs", "ratio") if has_compiled else ()
    for heading in ("shape", "count", "µs", "floor µs", "× floor", *compiled_headings):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [
            row.name,
            f"{row.channels} × {row.side} × {row.side}",
            str(row.count),
            f"{row.seconds * 1e6:,.1f}",
            f"{row.floor_s * 1e6:,.1f}",
            f"{row.seconds / row.floor_s:.2f}",
        ]
        if has_compiled and row.compiled_s:
            cells += [f"{row.compiled_s * 1e6:,.1f}", f"{row.compiled_s / row.seconds:.2f}"]
        table.add_row(*cells)
    return table


def sum_up(rows: list[Row]) -> str:
    """One sentence on all norms of the network."""
    ours = sum(row.count * row.seconds for row in rows)
    floor = sum(row.count * row.floor_s for row in rows)
    text = f"All norms of a step, forward and backward: ours {ours * 1e3:.2f} ms, the bytes alone {floor * 1e3:.2f} ms"
    compiled = [row.count * row.compiled_s for row in rows if row.compiled_s is not None]
    if compiled and len(compiled) == len(rows):
        text += f", compiled {sum(compiled) * 1e3:.2f} ms ({sum(compiled) / ours:.2f}x ours)"
    return f"{text}."
