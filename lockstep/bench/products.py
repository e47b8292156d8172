"""1×1 convolutions that do a norm's work on the way, beside the same by cuBLAS and passes of `kernels/batch_norm.py`.

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

from lockstep.bench.device_time import count_copies, measure_cold
from lockstep.bench.norm_shapes import HALF_BYTES, IMAGE_SIZE
from lockstep.models import build_model
from lockstep.models.chain import Pointwise, multiply, multiply_back, weight_gradient
from lockstep.models.norm import BatchNorm
from lockstep.models.resnet import Bottleneck

Kind = Literal[
    "product, statistics",
    "both gradients of a product",
    "product, gradient sums, matrix",
    "end of a block, forward",
    "end of a block, backward",
]
STATISTICS: Kind = "product, statistics"
GRADIENTS: Kind = "both gradients of a product"
SUMS: Kind = "product, gradient sums, matrix"
TAIL: Kind = "end of a block, forward"
TAIL_BACK: Kind = "end of a block, backward"

Launch = Callable[[], object]


class Product(NamedTuple):
    """A product of N·H·W rows, as a network has it: backward, what the convolution gives is `inner`.

    For the end of a block, of its own convolution; `next_inner` is what the one behind it gives.
    """

    kind: Kind
    batch: int
    inner: int
    channels: int
    side: int
    next_inner: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes it must move."""
        inner, channels = self.inner, self.channels
        values = {
            STATISTICS: inner + channels,  # x, z
            GRADIENTS: 2 * inner + channels,  # dz, x, dx
            SUMS: inner + 4 * channels,  # dz, the shortcut's gradient, x, y, g
            TAIL: 2 * inner + 2 * channels,  # x for the statistics, then x, the shortcut, y
            # dz, the shortcut's gradient, y, x, g for the sums; then g, x and its gradient
            TAIL_BACK: self.next_inner + 4 * channels + 3 * inner,
        }[self.kind]
        return HALF_BYTES * self.batch * self.side**2 * values


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
    with torch.device("meta"):
        network = build_model(model, 1000, image_size=IMAGE_SIZE).train()
        images = torch.empty(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    sides: dict[nn.Module, int] = {}

    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        sides[module] = out.shape[2]

    for module in network.modules():
        if isinstance(module, Pointwise):
            module.register_forward_hook(note)
    network(images)
    blocks = [module for module in network.modules() if isinstance(module, Bottleneck)]
    found: Counter[Product] = Counter()
    for before, block, following in zip([None, *blocks], blocks, [*blocks[1:], None], strict=False):
        plain: list[nn.Conv2d] = [part for part in block.downsample or () if isinstance(part, Pointwise)]
        if before is None:
            plain.append(block.conv1)
        for kind, convolution, next_inner in _list_products(block, following, plain, dtype):
            inner, channels = convolution.in_channels, convolution.out_channels
            shape = (channels, inner) if kind == SUMS else (inner, channels)
            found[Product(kind, batch, *shape, sides[convolution], next_inner)] += 1
    return found


def _list_products(
    block: Bottleneck, following: Bottleneck | None, plain: list[nn.Conv2d], dtype: torch.dtype
) -> Iterator[tuple[Kind, nn.Conv2d, int]]:
    """Those of a block and of the beginning of the next, as `models/chain.py` divides them; `plain` stand alone."""
    from lockstep.kernels.pointwise import suits_stats
    from lockstep.kernels.pointwise_back import suits_gradients, suits_sums
    from lockstep.kernels.tail import suits_tail

    last = block.conv3
    next_inner = following.conv1.out_channels if following else 0
    if following and suits_tail(dtype, last.in_channels, last.out_channels, next_inner):
        yield TAIL, last, next_inner
        yield TAIL_BACK, last, next_inner
    else:
        plain = [*plain, last]
        if following and suits_sums(dtype, next_inner, last.out_channels):
            yield SUMS, following.conv1, 0
    for convolution in plain:
        if suits_gradients(dtype, convolution.in_channels, convolution.out_channels):
            yield GRADIENTS, convolution, 0
    for convolution in [*plain, *([following.conv1] if following else [])]:
        if suits_stats(dtype, convolution.in_channels, convolution.out_channels):
            yield STATISTICS, convolution, 0


def build_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    """Ours, and the same by cuBLAS and passes of `kernels/batch_norm.py`; each may be called any number of times."""
    return {
        STATISTICS: _statistics_launches,
        GRADIENTS: _gradients_launches,
        SUMS: _sums_launches,
        TAIL: _tail_launches,
        TAIL_BACK: _tail_back_launches,
    }[product.kind](product, device)


def _noise(product: Product, channels: int, device: torch.device) -> Tensor:
    shape = (product.batch, product.side, product.side, channels)
    return torch.randn(shape, device=device, dtype=torch.float16).permute(0, 3, 1, 2)  # channels-last


def _matrix(channels: int, inner: int, device: torch.device) -> Tensor:
    return torch.randn(channels, inner, 1, 1, device=device, dtype=torch.float16) * float(inner**-0.5)


def _statistics_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    from lockstep.kernels.pointwise import product_stats

    x, weight = _noise(product, product.inner, device), _matrix(product.channels, product.inner, device)
    norm = BatchNorm(product.channels).to(device)
    pivot = norm.running_mean
    assert pivot is not None

    def multiply_and_sum() -> Tensor:
        z, partial = product_stats(x, weight, pivot)
        return norm.moments(z, partial)

    return multiply_and_sum, lambda: norm.moments(multiply(x, weight))


def _gradients_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    from lockstep.kernels.pointwise_back import product_gradients

    dz, x = (_noise(product, channels, device) for channels in (product.channels, product.inner))
    weight = _matrix(product.channels, product.inner, device)

    def multiply_apart() -> object:
        return multiply_back(dz, weight), weight_gradient(dz, x, weight)

    return lambda: product_gradients(dz, weight, x), multiply_apart


def _sums_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    from lockstep.kernels.batch_norm import Normed, gradient_sums
    from lockstep.kernels.pointwise_back import product_sums

    dz, weight = _noise(product, product.inner, device), _matrix(product.inner, product.channels, device)
    more_dy, x, y = (_noise(product, product.channels, device) for _ in range(3))
    moments, g = BatchNorm(product.channels).to(device).moments(x), torch.empty_like(x)

    def multiply_and_sum() -> object:
        (sums,), d_weight = product_sums(dz, weight, more_dy, y, [Normed(x, moments)], g)
        return *sums, d_weight

    def multiply_apart() -> object:
        sums = gradient_sums(multiply_back(dz, weight), more_dy, x, moments, mask_from=y, g=g)
        return *sums, weight_gradient(dz, y, weight)

    return multiply_and_sum, multiply_apart


def _tail_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    from lockstep.kernels.batch_norm import normalize_add
    from lockstep.kernels.tail import product_join, square_sums

    x, shortcut = (_noise(product, channels, device) for channels in (product.inner, product.channels))
    weight, norm = _matrix(product.channels, product.inner, device), BatchNorm(product.channels).to(device)
    moments = BatchNorm(product.inner).to(device).moments(x)
    num_rows = x.numel() // product.inner

    def join() -> Tensor:
        behind = norm.product_moments(square_sums(x, moments), moments, weight, num_rows)
        return product_join(x, moments, weight, behind, shortcut, None)

    def join_apart() -> Tensor:
        z = multiply(normalize_add(x, moments), weight)
        return normalize_add(z, norm.moments(z), shortcut)

    return join, join_apart


def _tail_back_launches(product: Product, device: torch.device) -> tuple[Launch, Launch]:
    from lockstep.kernels.batch_norm import Normed, gradient_sums, input_gradient, normalize_add
    from lockstep.kernels.pointwise_back import Made, product_sums
    from lockstep.kernels.tail import square_sums, tail_gradients

    dz, x = (_noise(product, channels, device) for channels in (product.next_inner, product.inner))
    more_dy, y = (_noise(product, product.channels, device) for _ in range(2))
    weight = _matrix(product.channels, product.inner, device)
    next_weight = _matrix(product.next_inner, product.channels, device)
    moments = BatchNorm(product.inner).to(device).moments(x)
    u, g = normalize_add(x, moments), torch.empty_like(y)
    z, squares = multiply(u, weight), square_sums(x, moments)
    behind = BatchNorm(product.channels).to(device).moments(z)

    def go_back() -> object:
        (sums,), d_next_weight = product_sums(
            dz, next_weight, more_dy, y, [Normed(y, behind)], g, Made(x, moments, weight)
        )
        _, own_sums, d_weight = tail_gradients(g, sums, weight, x, moments, squares)
        return sums.d_gamma, own_sums.d_gamma, d_weight, d_next_weight

    def go_back_apart() -> object:
        sums = gradient_sums(multiply_back(dz, next_weight), more_dy, z, behind, mask_from=y, g=g)
        d_next_weight = weight_gradient(dz, y, next_weight)
        d_z = input_gradient(g, z, behind, sums.line, masked=True)
        own_sums = gradient_sums(multiply_back(d_z, weight), None, x, moments, mask_from=x)
        d_weight = weight_gradient(d_z, u, weight)
        return sums.d_gamma, own_sums.d_gamma, d_weight, d_next_weight

    return go_back, go_back_apart


def measure_products(products: Counter[Product], bytes_per_s: float, console: Console) -> Iterator[Row]:
    """Each product, ours and apart."""
    for product, count in products.items():
        kind, _, inner, channels, side, _ = product
        console.print(f"  {kind}, {inner} → {channels}, {side} × {side}", highlight=False)
        num_copies = count_copies(HALF_BYTES * product.batch * side**2 * channels)
        copies = [build_launches(product, torch.device("cuda")) for _ in range(num_copies)]
        ours, apart = (measure_cold(launches) for launches in zip(*copies, strict=True))
        floor_s = product.num_bytes / bytes_per_s
        yield Row(kind, inner, channels, side, count, ours, apart, floor_s, product.num_bytes)


def draw_table(rows: list[Row]) -> Table:
    """The rows, with how far each is from its floor and how much longer it takes apart."""
    table = Table(box=None, header_style="bold", title="1×1 convolutions that do a norm's work on the way")
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
