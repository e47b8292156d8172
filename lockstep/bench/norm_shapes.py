"""Which batch norms a network has, what follows each, and the bytes its passes must move; nothing is computed."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.models import build_model
from lockstep.models.norm import BatchNorm

Kind = Literal["norm + ReLU", "norm + shortcut + ReLU", "norm + normalised shortcut + ReLU", "norm + ReLU + pool"]
RELU: Kind = "norm + ReLU"
ADD: Kind = "norm + shortcut + ReLU"
ADD_NORM: Kind = "norm + normalised shortcut + ReLU"
POOL: Kind = "norm + ReLU + pool"

IMAGE_SIZE = 224
HALF_BYTES = 2


class Use(NamedTuple):
    """A norm and what follows it."""

    kind: Kind
    batch: int
    channels: int
    side: int
    padding: int = 0  # of the pool
    num_gradients: int = 1  # that come back: two where a shortcut begins

    @property
    def numel(self) -> int:
        return self.batch * self.channels * self.side**2

    @property
    def pooled_side(self) -> int:
        return (self.side + 2 * self.padding - 3) // 2 + 1

    @property
    def num_norms(self) -> int:
        return 2 if self.kind == ADD_NORM else 1


class Pass(NamedTuple):
    """One pass over memory: how many arrays it reads or writes, each once. Sums by channel are too few to count."""

    name: str
    is_forward: bool
    arrays: int  # as large as the norm's input, in half precision
    pooled: int = 0  # as large as the pool's output
    winners: int = 0  # the same, of one byte: which pixel was the largest

    def count_bytes(self, use: Use) -> int:
        """Bytes it must move for a norm."""
        pooled = use.batch * use.channels * use.pooled_side**2
        return HALF_BYTES * (self.arrays * use.numel + self.pooled * pooled) + self.winners * pooled


STATISTICS = Pass("statistics", True, arrays=1)
INPUT_GRADIENT = Pass("input gradient", False, arrays=3)


def list_passes(use: Use) -> list[Pass]:
    """The passes of `kernels/batch_norm.py` and `kernels/pool.py` over one norm, in order."""
    two = ", two gradients" if use.num_gradients == 2 else ""
    if use.kind == RELU:
        return [
            STATISTICS,
            Pass("normalise, ReLU", True, arrays=2),
            Pass("gradient sums", False, arrays=2),
            Pass("ReLU, input gradient", False, arrays=3),
        ]
    if use.kind == POOL:
        return [
            STATISTICS,
            Pass("normalise, ReLU, pool", True, arrays=1, pooled=1, winners=1),
            # x is read for the sums, then again, and dx is written; what comes back through the pool is read both times
            Pass(f"pool's gradient, sums, input gradient{two}", False, 1 + 2, 2 * use.num_gradients, winners=2),
        ]
    # x, y and the gradients are read, what is left of them behind ReLU is written
    sums = Pass(f"gradient sums, masked gradient written{two}", False, arrays=3 + use.num_gradients)
    if use.kind == ADD:
        return [STATISTICS, Pass("normalise, add, ReLU", True, arrays=3), sums, INPUT_GRADIENT]
    return [
        STATISTICS,
        STATISTICS,
        Pass("normalise both, add, ReLU", True, arrays=3),
        Pass(f"both gradient sums, masked gradient written{two}", False, arrays=4 + use.num_gradients),
        Pass("both input gradients", False, arrays=5),
    ]


@dataclass
class _Sighting:
    use: Use
    num_gradients: int = 0


def find_norms(model: str, batch: int) -> Counter[Use]:
    """The norms of a network that the fused kernels take, by what they are and how often each occurs."""
    with torch.device("meta"):
        network = build_model(model, 1000, image_size=IMAGE_SIZE).train()
        images = torch.empty(batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    seen: list[_Sighting] = []
    for module in network.modules():
        if isinstance(module, BatchNorm):
            for name in ("relu", "add_relu", "relu_pool"):
                setattr(module, name, _watch(name, getattr(module, name), seen))
    network(images).sum().backward()
    return Counter(sighting.use._replace(num_gradients=sighting.num_gradients) for sighting in seen)


def _watch(name: str, call: Callable[..., Any], seen: list[_Sighting]) -> Callable[..., Any]:
    """The same call, noting what it was given and how many gradients come back."""

    def watched(*given: Any, **named: Any) -> Any:
        bound = inspect.signature(call).bind(*given, **named)
        bound.apply_defaults()
        sighting = _Sighting(_read_use(name, bound.arguments))
        seen.append(sighting)

        def note(_: Tensor) -> None:
            sighting.num_gradients += 1

        out = call(*given, **named)
        # Views, because both of a pair are one tensor here and would tell of one gradient only.
        views = [part.view_as(part) for part in (out if isinstance(out, tuple) else (out,))]
        for view in views:
            view.register_hook(note)
        return tuple(views) if isinstance(out, tuple) else views[0]

    return watched


def _read_use(name: str, arguments: dict[str, Any]) -> Use:
    batch, channels, side, _ = arguments["x"].shape
    if name == "relu":
        return Use(RELU, batch, channels, side)
    if name == "relu_pool":
        return Use(POOL, batch, channels, side, arguments["padding"])
    return Use(ADD if arguments["shortcut_norm"] is None else ADD_NORM, batch, channels, side)
