"""`precision.compute = "auto"`: which number format a run computes in, decided before anything is built (step 0).

The answer takes the place of the question in the run's configuration: whoever goes on with it, on whatever device,
computes in the same format, unless he asks for another.
"""

from typing import Literal

import torch

from lockstep.comm.world import World
from lockstep.config import ANCHORED, RunConfig

TENSOR_CORES = (7, 0)  # from this compute capability on, GPUs multiply FP16 several times as fast as FP32


def settle_format(config: RunConfig, world: World) -> tuple[RunConfig, str]:
    """The configuration with a format in place of "auto", and a sentence that says so; every rank must call it.

    FP16 only if the GPUs of all ranks are made for it: gradients of two formats cannot be added.
    """
    if config.precision.compute != "auto":
        return config, ""
    is_exact = config.optim.name in ANCHORED
    can = [format == "fp16" and not is_exact for format in world.gather_values(find_format(world.device))]
    precision = config.precision.settle("fp16" if all(can) else "fp32")
    settled = config.model_copy(update={"precision": precision})
    if all(can):
        return settled, "Computing in FP16 with a loss scale, FP32 master weights (precision.compute = auto)."
    if is_exact and world.device.type == "cuda":
        why = f"as {config.optim.name} compares gradients at two places near each other"
        return settled, f"Computing in FP32, {why} (precision.compute = auto)."
    why = "a rank's device has no tensor cores" if any(can) or world.device.type == "cuda" else "on a CPU"
    return settled, f"Computing in FP32, {why} (precision.compute = auto)."


def find_format(device: torch.device) -> Literal["fp16", "fp32"]:
    """What a device computes in by itself: FP16 where it has tensor cores."""
    has_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= TENSOR_CORES
    return "fp16" if has_cores else "fp32"
