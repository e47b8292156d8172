"""What a measurement before step 0 is true of, and where such measurements are kept (step 0 on the walk)."""

import platform
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import __version__
from lockstep.comm.topology import GUESSED_INTER, GUESSED_INTRA, Link, Topology
from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.generated import default_cache
from lockstep.data.order import share
from lockstep.engine.build import Parts
from lockstep.plan.profile import Setup

CACHE = "plans"  # the folder under the user's cache


def default_plan_folder() -> Path:
    """Where plans are kept between runs, a folder for each setup."""
    return default_cache() / CACHE


def describe_setup(config: RunConfig, parts: Parts, world: World) -> Setup:
    """What a measurement made now is true of."""
    on_gpu, topology = world.device.type == "cuda", parts.topology
    start, stop = share(config.train.global_batch, 0, world.size)
    layout = parts.layout
    return Setup(
        device=torch.cuda.get_device_name(world.device) if on_gpu else f"{platform.machine()} CPU",
        topology=topology.key(),
        links=_describe_links(topology),
        backend=_describe_backend() if world.size > 1 else "",
        precision=config.precision.compute,
        batch=stop - start,
        max_batch=config.train.max_batch_per_rank,
        image_size=config.data.image_size,
        model=f"{config.model.name}: {len(layout.slots)} gradients, {layout.numel} elements, {layout.split} half",
        pins=_describe_pins(config),
        versions=f"lockstep {__version__}, torch {torch.__version__}",
    )


def _describe_links(topology: Topology) -> str:
    """In words, with digits enough to tell any two apart: a profile is true of these links alone."""
    if (topology.intra, topology.inter) == (GUESSED_INTRA, GUESSED_INTER):
        return ""
    return f"{_describe_link(topology.intra)} inside a node, {_describe_link(topology.inter)} between nodes"


def _describe_link(link: Link) -> str:
    return f"{link.latency_s * 1e6:.12g} us and {link.bytes_per_s * 8e-9:.12g} Gbit/s"


def _describe_backend() -> str:
    name = str(dist.get_backend())
    return f"{name} {'.'.join(map(str, torch.cuda.nccl.version()))}" if name == "nccl" else name


def _describe_pins(config: RunConfig) -> str:
    """What the recipe leaves no choice in, and what decides the update.

    How long one may look is none of it, but whether one looks at messages at all is.
    """
    pins = [] if config.comm.tune_s else ["tune_s=0"]
    for section, keys in (
        (config.comm, ("algorithm", "group_size", "fusion", "buffer_mb", "overlap", "wire", "division")),
        (config.train, ("accumulate", "norm_batch", "own_kernels", "cuda_graph", "compile")),
    ):
        defaults = type(section).model_fields
        pins += [f"{key}={value}" for key in keys if (value := getattr(section, key)) != defaults[key].default]
    return ", ".join([config.optim.name, *pins])
