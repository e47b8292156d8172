"""1×1 convolutions that do a norm's sums on the way, beside the same product by cuBLAS with the pass behind it.

Part of `lockstep bench kernels`; times and floors as in `norm_passes.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from lockstep.bench.device_time import count_copies, measure_cold
from lockstep.bench.norm_shapes import HALF_BYTES, IMAGE_SIZE
from lockstep.models import build_model
from lockstep.models.chain import Pointwise
from lockstep.models.norm import BatchNorm
from lockstep.models.resnet import Bottleneck

Kind = Literal["product, statistics", "product, gradient sums"]
STATISTICS: Kind = "product, statistics"
SUMS: Kind = "product, gradient sums"

Launch = Callable[[], object]


class Product(NamedTuple):
    """A product of N·H·W rows, as a network has it: backward, what the convolution gives is `inner`."""

    kind: Kind
    batch: int
    inner: int
    channels: int
    side: int

    @property
    def num_bytes(self) -> int:
        """Bytes it must move: statistics come with x and z; sums with dz, the shortcut's gradient, x, y and g."""
        arrays = 1 if self.kind == STATISTICS else 4
        return HALF_BYTES * self.batch * self.side**2 * (self.inner + arrays * self.channels)


@dataclass(frozen=True)
class Row:
    """A product; seconds and bytes are those of one of `count`."""

    name: str
    inner: int
    channels: int
    side: int
    count: int
    seconds: float
    apart_s: float
    floor_s: float
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """As it stands in the JSON file."""
        fields = dict(vars(self))
        return {"pass": fields.pop("name"), **fields}


def find_products(model: str, batch: int, dtype: torch.dtype = torch.float16) -> Counter[Product]:
    """The products of a network that the kernels take, and how often each occurs; nothing is computed."""
    from lockstep.kernels.pointwise import suits_stats, suits_sums

    with torch.device("meta"):
        network = build_model(model, 1000, image_size=IMAGE_SIZE).train()
        images = torch.empty(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    found: Counter[Product] = Counter()
    blocks = [module for module in network.modules() if isinstance(module, Bottleneck)]
    follows_a_sum = {block.conv1 for block in blocks[1:]}

    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        assert isinstance(module, Pointwise)
        made, inner, side = module.out_channels, module.in_channels, out.shape[2]
        if suits_stats(dtype, inner, made):
            found[Product(STATISTICS, batch, inner, made, side)] += 1
        if module in follows_a_sum and suits_sums(dtype, made, inner):
            found[Product(SUMS, batch, made, inner, side)] += 1

    for module in network.modules():
        if isinstance(module, Pointwise):
            module.register_forward_hook(note)
    network(images)
    return found


def build_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    """Ours, and the product with the pass behind it; each may be called any number of times."""
    from lockstep.kernels.batch_norm import gradient_sums
    from lockstep.kernels.pointwise import product_stats, product_sums

    _, batch, inner, channels, side = product

    def noise(channels: int) -> Tensor:
        values = torch.randn(batch, side, side, channels, device=device, dtype=torch.float16)
        return values.permute(0, 3, 1, 2)  # channels-last

    norm = BatchNorm(channels).to(device)
    assert norm.running_mean is not None
    given = noise(inner)
    rows = given.permute(0, 2, 3, 1)
    if product.kind == STATISTICS:
        weight = torch.randn(channels, inner, 1, 1, device=device, dtype=torch.float16) / inner**0.5
        pivot = norm.running_mean

        def multiply() -> Tensor:
            z, partial = product_stats(given, weight, pivot)
            return norm.moments(z, partial)

        return multiply, lambda: norm.moments(functional.linear(rows, weight.flatten(1)).permute(0, 3, 1, 2))
    weight = torch.randn(inner, channels, 1, 1, device=device, dtype=torch.float16) / inner**0.5
    more_dy, x, y = (noise(channels) for _ in range(3))
    moments, g = norm.moments(x), torch.empty_like(x)

    def multiply_apart() -> object:
        dy = (rows @ weight.flatten(1)).permute(0, 3, 1, 2)
        return gradient_sums(dy, more_dy, x, moments, mask_from=y, g=g)

    return lambda: product_sums(given, weight, more_dy, x, y, moments, g), multiply_apart


def measure_products(products: Counter[Product], bytes_per_s: float, console: Console) -> Iterator[Row]:
    """Each product, ours and apart."""
    for product, count in products.items():
        kind, _, inner, channels, side = product
        console.print(f"  {kind}, {inner} → {channels}, {side} × {side}", highlight=False)
        num_copies = count_copies(HALF_BYTES * product.batch * side**2 * channels)
        copies = [build_launches(product, torch.device("cuda")) for _ in range(num_copies)]
        ours, apart = (measure_cold(launches) for launches in zip(*copies, strict=True))
        floor_s = product.num_bytes / bytes_per_s
        yield Row(kind, inner, channels, side, count, ours, apart, floor_s, product.num_bytes)


def draw_table(rows: list[Row]) -> Table:
    """The rows, with how far each is from its floor and how much longer the two apart take."""
    table = Table(box=None, header_style="bold", title="1×1 convolutions that do a norm's sums on the way")
    table.add_column("pass")
    for heading in ("shape", "count", "µs", "floor µs", "× floor", "apart µs", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.inner} → {row.channels}, {row.side} × {row.side}",
            str(row.count),
            f"{row.seconds * 1e6:,.1f}",
            f"{row.floor_s * 1e6:,.1f}",
            f"{row.seconds / row.floor_s:.2f}",
            f"{row.apart_s * 1e6:,.1f}",
            f"{row.apart_s / row.seconds:.2f}",
        )
    return table


def sum_up(rows: list[Row]) -> str:
    """One sentence on all of a network's."""
    ours = sum(row.count * row.seconds for row in rows)
    apart = sum(row.count * row.apart_s for row in rows)
    return f"All of these in a step: {ours * 1e3:.2f} ms, apart {apart * 1e3:.2f} ms."
