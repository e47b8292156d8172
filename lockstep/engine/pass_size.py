"""`train.max_batch_per_rank = 0`: how many samples a pass has, by what fits and is quickest (step 0 on the walk).

On a GPU passes of noise are tried before the plan is made: 256 samples, half as many for as long as they do not fit, or
twice as many for as long as that is quicker. The answer takes the place of the question in the run's configuration, as
batch norm sees it: whoever goes on with the run takes passes of the same size. A later run in the same setup remembers
it. On a CPU it is 256.
"""

import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lockstep.comm.moment import seconds_between, take_moment, wait_for
from lockstep.comm.world import World
from lockstep.config import USUAL_PASS, RunConfig
from lockstep.data.order import share
from lockstep.engine.apply import apply_execution
from lockstep.engine.build import Parts
from lockstep.engine.measure import fake_batch, suits_own_kernels
from lockstep.engine.setup import default_plan_folder, describe_setup
from lockstep.engine.state import put_back
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.files import read_small, write_whole
from lockstep.plan.plan import Execution
from lockstep.plan.profile import read_setup
from lockstep.recipe_values import MOST

GAIN = 0.02  # by which a larger pass must be quicker for each of its samples
ROOM = 0.8  # of the memory there is, that a pass may take: recordings and other kernels need some more
BATCHES_AHEAD = 4  # whole batches of images on the device beside it: prepared ones, the one at hand, a recording's own
TIMED_PASSES = 3
FILE = "pass.json"  # in the folder of a setup
MAX_BYTES = 1 << 12
NO_ROOM = ("memory", "ALLOC_FAILED")  # in the messages of CUDA's libraries

Try = Callable[[int], float | None]  # samples of a pass -> seconds for each of them; None: it does not fit


def settle_pass(config: RunConfig, parts: Parts, world: World, *, again: bool = False) -> tuple[RunConfig, Parts, str]:
    """Configuration and parts with the size of a pass in place of 0, and a sentence that says so.

    Every rank must call it; nothing that a step changes has changed afterwards. `again`: nothing is remembered.
    """
    train = config.train
    if train.max_batch_per_rank or train.accumulate:
        return config, parts, ""
    said = ""
    if world.device.type == "cuda":
        size, source = _recall_or_measure(config, parts, world, again)
        said = f"A pass has up to {size:,} samples ({source}; train.max_batch_per_rank)."
    else:
        size = USUAL_PASS
    settled = with_size(config, size)
    return settled, replace(parts, max_batch_per_rank=settled.train.largest_pass), said


def with_size(config: RunConfig, size: int) -> RunConfig:
    """The same with this size of a pass, unless it says one itself."""
    if config.train.max_batch_per_rank or config.train.accumulate:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"max_batch_per_rank": size})})


def _recall_or_measure(config: RunConfig, parts: Parts, world: World, again: bool) -> tuple[int, str]:
    """The size of a pass on these GPUs, and where it comes from."""
    setup = read_setup(world.broadcast_value(asdict(describe_setup(config, parts, world))))
    file = default_plan_folder() / setup.name / FILE
    if known := int(world.broadcast_value(_recall(file) if world.is_first and not again else 0)):
        return known, "remembered"
    begun = time.perf_counter()
    start, stop = share(config.train.global_batch, 0, world.size)
    own_kernels = config.train.own_kernels != "off" and suits_own_kernels(parts.model)
    apply_execution(Execution("own" if own_kernels else "torch"), parts)
    with put_back(parts), world.patience():
        size = choose_size(stop - start, config.train.norm_batch, lambda size: _try(size, config, parts, world))
    if world.is_first:
        with contextlib.suppress(OSError):  # a full disk costs the memory of it, not the run
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"max_batch_per_rank": size}))
    return size, f"measured in {time.perf_counter() - begun:.1f} s"


def choose_size(num_samples: int, norm_batch: int, take: Try) -> int:
    """The best size of a pass over `num_samples` that batch norm allows; without one that fits, a single sample.

    Passes over a share are nearly equal, so that a size stands for the largest pass it leads to.
    """
    most = min(num_samples, norm_batch or num_samples)

    def take_equal(size: int) -> float | None:
        return take(-(-num_samples // -(-num_samples // size)))

    size = first = min(most, USUAL_PASS)
    best = take_equal(size)
    while best is None and size > 1:
        size = -(-size // 2)
        best = take_equal(size)
    while best is not None and first <= size < most:
        larger = min(2 * size, most)
        seconds = take_equal(larger)
        if seconds is None or seconds > (1 - GAIN) * best:
            break
        size, best = larger, seconds
    return size


def _try(size: int, config: RunConfig, parts: Parts, world: World) -> float | None:
    """Seconds a sample in a pass of `size`, by the slowest rank; None if one has no room for it."""
    seconds, fits = 0.0, True
    try:
        seconds = _time_pass(size, replace(parts, max_batch_per_rank=size), config, world)
        fits = _has_room(config, parts, world)
    except RuntimeError as error:  # out of memory is one, whether PyTorch says so or a library below it
        if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in NO_ROOM):
            raise
        fits = False
    parts.clock.take()
    gc.collect()
    torch.cuda.empty_cache()
    slowest, fails = world.maximum(torch.tensor([seconds, float(not fits)], dtype=torch.float64)).tolist()
    return None if fails else slowest / size


def _time_pass(size: int, parts: Parts, config: RunConfig, world: World) -> float:
    """Seconds of a step of one pass with nothing sent, the first apart: it chooses kernels."""
    batch = fake_batch(config, world, size)
    with parts.reducer.muted():
        train_step(parts, batch, 0.0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of what the search for kernels took
        torch.cuda.reset_peak_memory_stats(world.device)
        begun = take_moment(on_gpu=True)
        for _ in range(TIMED_PASSES):
            train_step(parts, batch, 0.0)
        done = take_moment(on_gpu=True)
    wait_for(done)
    return seconds_between(begun, done) / TIMED_PASSES


def _has_room(config: RunConfig, parts: Parts, world: World) -> bool:
    """Whether what the last pass took at most, and the images of whole batches, leave the rest of the memory free."""
    start, stop = share(config.train.global_batch, world.rank, world.size)
    image_bytes = 3 * config.data.image_size**2 * torch.empty((), dtype=parts.dtype).element_size()
    free, _ = torch.cuda.mem_get_info(world.device)
    there = free + torch.cuda.memory_reserved(world.device)
    taken = torch.cuda.max_memory_reserved(world.device) + BATCHES_AHEAD * (stop - start) * image_bytes
    return taken <= ROOM * there


def _recall(file: Path) -> int:
    """What an earlier run in this setup settled on; 0 if none did."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, LockstepError):
        size = json.loads(read_small(file, MAX_BYTES))["max_batch_per_rank"]
        return size if type(size) is int and 1 <= size <= MOST else 0
    return 0
