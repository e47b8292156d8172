"""PyTorch's DistributedDataParallel as the peer of `step.py`: as everyone writes it, and the settings worth a try."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.compiler import guard_compiled

MIB = 1 << 20
DEFAULT_CAP_MB, DEFAULT_FIRST_MB = 25, 1  # what DDP does when nobody says anything
FIRST_BUCKET = "_DEFAULT_FIRST_BUCKET_BYTES"  # in torch.distributed; read when DDP is built
CAPS_MB = (1, 4, DEFAULT_CAP_MB, 100)
MAX_GRAPHS = 1024  # that the compiler may make of one network's code, over all settings


class Setting(NamedTuple):
    """How DDP cuts gradients into buckets, whether gradients are views of them, and whether they travel as FP16."""

    cap_mb: int = DEFAULT_CAP_MB
    first_mb: int = DEFAULT_FIRST_MB
    is_view: bool = False
    is_half: bool = False

    def __str__(self) -> str:
        first = "" if self.first_mb == self.cap_mb else f", the first {self.first_mb}"
        how = f"{', views' if self.is_view else ''}{', sent as FP16' if self.is_half else ''}"
        return f"buckets of {self.cap_mb} MiB{first}{how}"


DEFAULT = Setting()


def list_settings() -> list[Setting]:
    """Every bucket size, with a first bucket as large and with PyTorch's small one, as far as this release can."""
    pairs = dict.fromkeys((cap, first) for cap in CAPS_MB for first in (cap, DEFAULT_FIRST_MB))
    return [Setting(*pair, is_view=True) for pair in pairs if _is_possible(*pair)]


def compile_wrapped(model: DistributedDataParallel, setting: Setting) -> nn.Module:
    """torch.compile around DDP, as PyTorch documents it: the compiler cuts the network where DDP cuts the gradients."""
    from torch._dynamo import config

    guard_compiled()
    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MAX_GRAPHS)
    compiled: Any = torch.compile(model, backend=build_backend(setting), dynamic=False)
    return compiled  # type: ignore[no-any-return]


@functools.cache
def build_backend(setting: Setting) -> Callable[..., Any]:
    """PyTorch's usual compiler under a name of its own for each setting.

    Under one name, a network with other buckets would run what was compiled, and cut, for the first.
    """

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    return compile_graph


def wrap(model: nn.Module, setting: Setting) -> DistributedDataParallel:
    """DDP over `model`; only the broadcast of batch norm's statistics at every step is off, as it is in Lockstep."""
    # A bucket size of one's own also sets the first bucket's; only the default one leaves it apart.
    if setting.first_mb == setting.cap_mb:
        sizes: dict[str, object] = {"bucket_cap_mb": setting.cap_mb}
    elif setting.cap_mb == DEFAULT_CAP_MB:
        sizes = {}
    else:
        sizes = {"bucket_cap_mb_list": [setting.first_mb, setting.cap_mb]}
    with warnings.catch_warnings(), _first_bucket(setting.first_mb):
        # Newer releases rename the argument, older ones lack the new name.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            gradient_as_bucket_view=setting.is_view,
            broadcast_buffers=False,
            **sizes,  # type: ignore[arg-type]
        )
    if setting.is_half:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def _is_possible(cap_mb: int, first_mb: int) -> bool:
    """Before torch 2.13 a first bucket of another size needs the default one for the rest."""
    has_list = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters
    return first_mb == cap_mb or cap_mb == DEFAULT_CAP_MB or has_list


@contextmanager
def _first_bucket(first_mb: int) -> Iterator[None]:
    """Set the size of the first bucket while inside."""
    before = getattr(dist, FIRST_BUCKET)
    setattr(dist, FIRST_BUCKET, first_mb * MIB)
    try:
        yield
    finally:
        setattr(dist, FIRST_BUCKET, before)
