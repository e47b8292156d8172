"""Our fused updates beside PyTorch's optimisers and beside the bytes they must move, in one run.

Every row is the median of many updates timed by events on the device's stream. The floor is what the bytes of the
update would take at the speed of a measured copy. On a CPU the plain versions run, once around.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lockstep.bench.device_time import Call, capture, measure_calls, measure_copy
from lockstep.bench.results import check_files, write_rows
from lockstep.errors import LockstepError
from lockstep.kernels import has_triton
from lockstep.layout import plan_layout
from lockstep.models import build_model
from lockstep.models.initialize import initialize
from lockstep.optim.adamw import AdamW
from lockstep.optim.groups import describe_parameters
from lockstep.optim.lamb import Lamb
from lockstep.optim.lars import Lars
from lockstep.optim.loss_scale import LossScale
from lockstep.optim.rule import Rule
from lockstep.optim.sgd import Sgd
from lockstep.optim.storage import build_weights, views

Model = Literal["resnet50", "alexnet"]
MOMENTUM, WEIGHT_DECAY, TRUST = 0.9, 1e-4, 1e-3
CLIP_NORM = 1e-6  # below that of the gradients here, so that they are clipped
MODELS: tuple[Model, ...] = ("resnet50", "alexnet")
RULES: dict[str, type[Rule]] = {"lars": Lars, "lamb": Lamb, "adamw": AdamW, "sgd": Sgd}
# What a sweep tries: elements and warps of a tile; half vector, order and cache hint.
SHAPES = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
ORDERS = ((4, True, True), (4, True, False), (4, False, False), (8, True, True))
# Bytes a parameter with FP16 gradients and a loss scale: what the norms read, what the update reads and writes.
OUR_BYTES = {"lars": 6 + 20, "lamb": 14 + 28, "adamw": 2 + 28, "sgd": 2 + 20}
# What clipping reads besides: LAMB's squares are not those of the gradients.
CLIP_BYTES = {"lars": 0, "lamb": 2, "adamw": 0, "sgd": 0}
# All in FP32: w, g and v read, w and v written, for AdamW also m; LARS reads w and g once more for the norms.
TORCH_BYTES = {"sgd": 20, "adamw": 28, "lars": 28}


@dataclass(frozen=True)
class Row:
    """One way to update a model's weights."""

    name: str
    model: str
    median_s: float
    spread_s: float  # between the quartiles
    bytes: int
    floor_s: float


def run_bench(
    models: list[Model],
    *,
    rounds: int,
    sweep: bool = False,
    json_file: Path | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Measure every update on every model; prints a table for each."""
    console = console or Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_files(json_file, None)
    if device.type == "cpu":
        console.print("There is no GPU here: these are the plain versions on the CPU, a few updates each.")
        rounds = min(rounds, 3)
    bytes_per_s = measure_copy(device)
    console.print(f"A copy on the device moves {bytes_per_s / 1e12:.2f} TB/s.", highlight=False)
    rows: list[Row] = []
    for model in models:
        found: list[Row] = []
        updates = sweep_updates(model, device) if sweep else list_updates(model, device)
        for name, num_bytes, update in updates:
            console.print(f"  {model}: {name}", highlight=False)
            times = measure_calls(update, device, rounds)
            quartiles = statistics.quantiles(times, n=4)
            spread = quartiles[2] - quartiles[0]
            found.append(Row(name, model, statistics.median(times), spread, num_bytes, num_bytes / bytes_per_s))
        console.print(draw_table(model, found))
        rows += found
    if json_file is not None:
        write_rows(json_file, [asdict(row) for row in rows])
    return rows


def parse_models(name: str) -> list[Model]:
    """The models a user asked for."""
    if name not in (*MODELS, "both"):
        raise LockstepError(f"There is no benchmark of '{name}': choose {', '.join(MODELS)} or both.")
    return [model for model in MODELS if name in (model, "both")]


def list_updates(model: Model, device: torch.device) -> Iterator[tuple[str, int, Call]]:
    """Name, bytes moved and one update: ours, then PyTorch's on the module's own parameters."""
    yield from list_ours(model, device)
    yield from list_peers(model, device)


def list_ours(model: Model, device: torch.device) -> Iterator[tuple[str, int, Call]]:
    """Our rules with FP16 gradients, loss scale and finite test; on a GPU launched and as a replayed graph."""
    for (name, kind), clip_norm in product(RULES.items(), (0.0, CLIP_NORM)):
        _, update, num_parameters = build_ours(model, kind, device, clip_norm)
        num_bytes = (OUR_BYTES[name] + (CLIP_BYTES[name] if clip_norm else 0)) * num_parameters
        label = f"lockstep {name}{', clipped' if clip_norm else ''}"
        if device.type == "cpu":
            yield f"{label}, plain", num_bytes, update
            continue
        yield f"{label}, launched", num_bytes, update
        yield f"{label}, CUDA graph", num_bytes, capture(update)


def sweep_updates(model: Model, device: torch.device) -> Iterator[tuple[str, int, Call]]:
    """Our rules under every tiling worth trying, as replayed graphs."""
    if device.type == "cpu" or not has_triton():
        raise LockstepError("--sweep tries the fused kernels and needs a GPU with Triton; run it on such a machine.")
    from lockstep.kernels.flat_update import Tiling

    for name in ("lars", "lamb"):
        rule, update, num_parameters = build_ours(model, RULES[name], device)
        for (block, num_warps), (half_vector, reverse, evict_first) in product(SHAPES, ORDERS):
            rule.fuse(Tiling(block, num_warps, half_vector, reverse, evict_first))
            label = f"{name} {block} by {num_warps} warps, half by {half_vector}"
            label += f"{', reverse' if reverse else ''}{', evict first' if evict_first else ''}"
            yield label, OUR_BYTES[name] * num_parameters, capture(update)


def build_ours(model: Model, kind: type[Rule], device: torch.device, clip_norm: float = 0.0) -> tuple[Rule, Call, int]:
    """A rule of ours, one update of a whole model by it, and how many parameters that moves."""
    network = _build_network(model)
    layout = plan_layout(describe_parameters(network, half=True))
    rule = kind(layout, device, weight_decay=WEIGHT_DECAY, clip_norm=clip_norm)  # type: ignore[call-arg]
    master, half = build_weights(network, layout, device, torch.float16)
    scale = LossScale(layout, device)
    flat = torch.zeros(layout.numel, device=device)
    for view in views(flat, layout):  # the padding stays zero
        view.normal_(std=1e-3)
    gradients = flat[: layout.split].half(), flat[layout.split :].clone()
    lr = torch.tensor(1e-3, device=device)
    return rule, lambda: rule.step(master, gradients, lr, half, scale), sum(slot.numel for slot in layout.slots)


def list_peers(model: Model, device: torch.device) -> Iterator[tuple[str, int, Call]]:
    """SGD, AdamW and LARS as PyTorch's users have them, all in FP32, without scaling or a finite test."""
    network = _build_network(model).to(device)
    parameters = list(network.parameters())
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    count = sum(parameter.numel() for parameter in parameters)
    peers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "SGD": partial(torch.optim.SGD, momentum=MOMENTUM),
        "AdamW": torch.optim.AdamW,
    }
    for (name, build), way in product(peers.items(), ("fused", "foreach")):
        optimizer = build(parameters, lr=1e-3, weight_decay=WEIGHT_DECAY, **{way: True})
        yield f"torch {name}, {way}", TORCH_BYTES[name.lower()] * count, optimizer.step
    momentum = [torch.zeros_like(parameter) for parameter in parameters]
    yield "LARS, torch._foreach", TORCH_BYTES["lars"] * count, lambda: step_foreach(parameters, momentum)
    yield "LARS, loop over tensors", TORCH_BYTES["lars"] * count, lambda: step_loop(parameters, momentum)


@torch.no_grad()
def step_loop(parameters: list[nn.Parameter], momentum: list[Tensor], lr: float = 1e-3) -> None:
    """LARS as most implementations have it, without asking the host."""
    for w, v in zip(parameters, momentum, strict=True):
        g = w.grad
        assert g is not None
        w_norm, g_norm = w.norm(), g.norm()
        trust = TRUST * w_norm / (g_norm + WEIGHT_DECAY * w_norm)
        trust = torch.where((w_norm > 0) & (g_norm > 0), trust, 1.0)
        v.mul_(MOMENTUM).add_(lr * trust * (g + WEIGHT_DECAY * w))
        w.sub_(v)


@torch.no_grad()
def step_foreach(parameters: list[nn.Parameter], momentum: list[Tensor], lr: float = 1e-3) -> None:
    """The same, every operation over all tensors at once."""
    weights: list[Tensor] = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    w_norm, g_norm = torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(gradients))
    trust = TRUST * w_norm / (g_norm + WEIGHT_DECAY * w_norm)
    trust = lr * torch.where((w_norm > 0) & (g_norm > 0), trust, 1.0)
    update = torch._foreach_add(gradients, weights, alpha=WEIGHT_DECAY)
    torch._foreach_mul_(update, list(trust.unbind()))
    torch._foreach_mul_(momentum, MOMENTUM)
    torch._foreach_add_(momentum, update)
    torch._foreach_sub_(weights, momentum)


def draw_table(model: str, rows: list[Row]) -> Table:
    """The rows of a model, with how far each is from its floor."""
    table = Table(box=None, header_style="bold", title=model)
    table.add_column("update")
    for heading in ("ms", "quartiles apart", "MB moved", "floor, ms", "× floor"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.median_s * 1e3:.3f}",
            f"{row.spread_s * 1e3:.3f}",
            f"{row.bytes / 1e6:,.0f}",
            f"{row.floor_s * 1e3:.3f}",
            f"{row.median_s / row.floor_s:.2f}",
        )
    return table


def _build_network(model: Model) -> nn.Module:
    network = build_model(model, 1000, image_size=224)
    initialize(network, 0)
    return network
