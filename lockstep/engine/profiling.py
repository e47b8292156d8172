"""One step on this device at many batches -> a device profile, as `lockstep profile` asks for (no part of a run).

The step is the one a rank among others takes, with nothing sent: gradients move into their flat array, which a rank
alone on a CPU spares itself. All times are the device's own. Forward, backward and update are cut where a timeline is,
gradients are watched as before step 0 (`measure.py`), layers by `layer_times.py`. In a step with own kernels or a
compiler, the forward pass and what it keeps are spread over layers by the shares that PyTorch's kernels have in a
recording; the backward pass is always cut by the step's own gradients.
"""

import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch.nn import functional

from lockstep import __version__
from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.data.sources import Source
from lockstep.engine.apply import Step, apply_execution, build_launched
from lockstep.engine.build import Parts, assemble, build_network, build_train_pipeline, plan_input, set_number_formats
from lockstep.engine.layer_times import count_kept, list_layers, note_begins, spread, time_backward
from lockstep.engine.measure import READY_PASSES, fake_batch, suits_own_kernels
from lockstep.engine.number_format import settle_format
from lockstep.engine.recorded import WARM_UP_STEPS, RecordedStep
from lockstep.engine.state import list_changing, put_back
from lockstep.engine.timeline import Passes, pick_middle, time_steps
from lockstep.errors import LockstepError
from lockstep.models import find_own
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import list_executions
from lockstep.plan.device import BatchTime, DeviceInput, DeviceProfile, LayerTime, SlotReady
from lockstep.plan.plan import Execution, InputPlan

GPU_BATCHES = (16, 32, 64, 128, 256, 512)
CPU_BATCHES = (4, 8, 16)
TURN_S, MIN_STEPS, MAX_STEPS = 0.5, 5, 40  # of one way at one batch
LAYER_PASSES = 3
INPUT_S, INPUT_BATCH, COPY_BYTES, COPIES = 1.0, 16, 64 << 20, 10
SAMPLED_FILES = 64
ROOM = 0.9  # of the free memory of a host, which kills who takes too much instead of saying so
PLAIN = Execution()

Say = Callable[[str], None]


def profile_device(
    config: RunConfig,
    world: World,
    source: Source,
    batches: Sequence[int] = (),
    *,
    note: str = "",
    say: Say = lambda line: None,
) -> DeviceProfile:
    """Measure every way to execute the step at every batch, and the input."""
    config, _ = settle_format(config, world)
    on_gpu = world.device.type == "cuda"
    rows = measure_batches(config, world, len(source.classes), batches, say=say)
    say("measuring the input")
    return DeviceProfile(
        device=torch.cuda.get_device_name(world.device) if on_gpu else describe_host(world.num_threads),
        model=config.model.name,
        image_size=config.data.image_size,
        precision=config.precision.compute,
        rule=config.optim.name,
        source="measured",
        note="; ".join(filter(None, [_describe_versions(on_gpu), note])),
        memory_bytes=count_memory(on_gpu=on_gpu),
        batches=rows,
        input=measure_input(config, world, source),
    )


def measure_batches(
    config: RunConfig, world: World, num_classes: int, batches: Sequence[int] = (), *, say: Say = lambda line: None
) -> tuple[BatchTime, ...]:
    """The step at every batch in every way to execute it; batches that do not fit are left out and named."""
    on_gpu = world.device.type == "cuda"
    batches = sorted(set(batches)) or list(GPU_BATCHES if on_gpu else CPU_BATCHES)
    passes = {"max_batch_per_rank": batches[-1], "global_batch": batches[-1], "accumulate": 0, "norm_batch": 0}
    train = config.train.model_copy(update=passes)
    config = config.model_copy(update={"train": train})
    set_number_formats(config.precision)
    schedule = Schedule("constant", config.optim.lr, total_steps=1)
    parts = assemble(config, world, build_network(config, num_classes), schedule)
    parts.reducer.landing = "by buffer" if on_gpu else "at once"  # as among others
    ways = list_executions(config.train, on_gpu=on_gpu, has_own_kernels=suits_own_kernels(parts.model))
    ways = [*ways, *([] if PLAIN in ways else [PLAIN])]
    bench = _Bench(config, parts, world)
    with put_back(parts):
        rows = [row for way in ways for row in _measure_way(bench, way, batches, say)]
    if not rows:
        raise LockstepError("No batch could be measured, for the reasons above; ask for smaller ones with --batch.")
    return tuple(rows)


def describe_host(num_threads: int) -> str:
    """This processor, and how much of it takes part."""
    return f"{platform.machine()} CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"


def count_memory(*, on_gpu: bool) -> int:
    """Bytes that the device has."""
    if on_gpu:
        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _describe_versions(on_gpu: bool) -> str:
    versions = f"lockstep {__version__}, torch {torch.__version__}"
    return f"{versions}, cuDNN {torch.backends.cudnn.version()}" if on_gpu else versions


def _measure_way(bench: "_Bench", way: Execution, batches: Sequence[int], say: Say) -> list[BatchTime]:
    """The batches of one way; after one that does not fit, larger ones would not either."""
    rows: list[BatchTime] = []
    for batch in batches:
        begun = time.perf_counter()
        needed = rows[-1].memory_bytes * batch / rows[-1].batch if rows else 0
        try:
            if not bench.on_gpu and needed > ROOM * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise MemoryError(f"it would take about {needed / 1e9:.1f} GB")
            row = bench.measure(way, batch)
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            say(f"left out: {way} at batch {batch} and beyond, for memory ({str(error).splitlines()[0][:100]})")
            break
        except RuntimeError as error:  # compilers and drivers raise it for nearly anything
            say(f"left out: {way} at batch {batch}: {(str(error).splitlines() or ['unknown'])[0][:160]}")
            continue
        finally:
            bench.clean_up()
        rows.append(row)
        rate = batch / row.step_s
        say(f"{way}, batch {batch}: {rate:,.1f} images/s, in {time.perf_counter() - begun:.0f} s of measuring")
    return rows


class _Bench:
    """What batches are measured with."""

    def __init__(self, config: RunConfig, parts: Parts, world: World) -> None:
        self._config, self._parts, self._world = config, parts, world
        self.on_gpu = world.device.type == "cuda"
        self._layers = list_layers(parts.model)
        self._shares: dict[int, tuple[list[float], list[int]]] = {}  # by batch, of PyTorch's kernels

    def measure(self, way: Execution, batch: int) -> BatchTime:
        """One row: PyTorch's kernels are looked at layer by layer, whatever else is measured as a whole."""
        images = self._fake(batch)
        if way == PLAIN:
            forward_shares, kept = self._look_at_layers(images, recorded=False)
        else:
            if batch not in self._shares:
                self._shares[batch] = self._look_at_layers(images, recorded=self.on_gpu)
                self.clean_up()
            forward_shares, kept_shares = self._shares[batch]
            apply_execution(way, self._parts)
            kept = [round(part) for part in spread(self._count_kept(images)[0], kept_shares)]
        apply_execution(way, self._parts)
        step = self._build(way, images)
        passes = self._time(step, images)
        launch_s = self._time_launch(step, images) if self.on_gpu else 0.0
        memory_bytes = self._read_memory(step, images, sum(kept))
        del step
        ready_s = self._watch(way, images, passes.backward_s)
        names = [slot.name for slot in self._parts.layout.slots]
        forward = spread(passes.forward_s, forward_shares)
        backward = time_backward(self._layers, dict(zip(names, ready_s, strict=True)), passes.backward_s)
        return BatchTime(
            batch=batch,
            execution=way,
            step_s=passes.step_s,
            forward_s=passes.forward_s,
            backward_s=passes.backward_s,
            update_s=passes.update_s,
            launch_s=launch_s,
            memory_bytes=memory_bytes,
            layers=tuple(
                LayerTime(layer.name, forward_s, backward_s, kept_bytes, layer.slots)
                for layer, forward_s, backward_s, kept_bytes in zip(self._layers, forward, backward, kept, strict=True)
            ),
            slots=tuple(
                SlotReady(slot.name, slot.numel, slot.numel * (2 if slot.half else 4), ready)
                for slot, ready in zip(self._parts.layout.slots, ready_s, strict=True)
            ),
        )

    def clean_up(self) -> None:
        """Give back what the last row took."""
        self._parts.clock.take()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _fake(self, batch: int) -> Batch:
        train = self._config.train.model_copy(update={"global_batch": batch})
        return fake_batch(self._config.model_copy(update={"train": train}), self._world)

    def _build(self, way: Execution, images: Batch) -> Step:
        """A step that is warm: compiled, its kernels chosen, recorded where it is to be."""
        count = len(images.labels)
        if way.recorded:
            step = RecordedStep(self._parts, count, images.global_size, warn=lambda text: None)
            step.prepare(images, WARM_UP_STEPS)
            return step
        launched = build_launched(self._parts, count)
        for _ in range(WARM_UP_STEPS if self.on_gpu else 1):
            launched(images, 0.0, False)
        return launched

    def _time(self, step: Step, images: Batch) -> Passes:
        """The middle one of a turn of steps, launched one behind the other as a run does."""
        first = self._take_steps(step, images, 2)[-1]
        count = min(MAX_STEPS, max(MIN_STEPS, int(TURN_S / first.step_s)))
        found = self._take_steps(step, images, count + 1)[1:]  # the first finds the device idle
        return pick_middle(found, lambda passes: passes.step_s)

    def _take_steps(self, step: Step, images: Batch, count: int) -> list[Passes]:
        return time_steps(self._parts.clock, lambda: step(images, 0.0, False), count)

    def _time_launch(self, step: Step, images: Batch) -> float:
        """Seconds in which the host has handed a step to an idle device."""
        seconds = []
        for _ in range(MIN_STEPS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step(images, 0.0, False)
            seconds.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        return median(seconds)

    def _read_memory(self, step: Step, images: Batch, kept_bytes: int) -> int:
        """The most that is held at once; on a CPU, where nobody counts, what the arrays add up to."""
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step(images, 0.0, False)
            torch.cuda.synchronize()
            allocated = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            # A recording's memory looks free between two replays and is not: what cannot be given back is in use.
            return int(max(allocated, torch.cuda.memory_reserved()))
        parts = self._parts
        arrays = [*list_changing(parts).arrays(), parts.half_weights, *parts.reducer.flat]
        return kept_bytes + sum(array.numel() * array.element_size() for array in arrays)

    def _watch(self, way: Execution, images: Batch, backward_s: float) -> list[float]:
        """When each gradient is ready, stretched from the steps that were watched to the one that was timed."""
        rows = []
        with self._parts.reducer.watching() as watch:
            step = self._build(way, images)
            for _ in range(READY_PASSES):
                found = self._take_steps(step, images, 1)[-1]
                rows.append([ready * backward_s / max(found.backward_s, 1e-9) for ready in watch.ready_s()])
        return [min(median(values), backward_s) for values in zip(*rows[1:], strict=True)]

    def _look_at_layers(self, images: Batch, *, recorded: bool) -> tuple[list[float], list[int]]:
        """Forward seconds and kept bytes of each layer by PyTorch's kernels."""
        way = Execution(recorded=recorded)
        apply_execution(way, self._parts)
        kept = self._count_kept(images)[1]
        rows = []
        with note_begins(self._parts.model, self._layers, on_gpu=self.on_gpu) as begun:
            step = self._build(way, images)
            for _ in range(LAYER_PASSES):
                self._take_steps(step, images, 1)  # which waits for its end
                rows.append(begun.seconds(self._layers))
        return [median(values) for values in zip(*rows, strict=True)], kept

    def _count_kept(self, images: Batch) -> tuple[int, list[int]]:
        """As many channels as a recording's place has, so that no kernel is searched for twice."""
        model, values = self._parts.model, images.images.to(self._parts.dtype)
        extra = find_own(model, "input_channels", values.shape[1]) - values.shape[1]
        padded = functional.pad(values, (0, 0, 0, 0, 0, extra)).contiguous(memory_format=torch.channels_last)
        return count_kept(model, self._layers, padded)


def measure_input(config: RunConfig, world: World, source: Source) -> DeviceInput:
    """What one core makes of encoded images, and how quickly a device takes them from its host."""
    train = config.train.model_copy(update={"global_batch": min(INPUT_BATCH, source.num_samples)})
    data = config.data.model_copy(update={"resident": "off", "image_sizes": ()})
    config = config.model_copy(update={"train": train, "data": data})
    usual = plan_input(config, world)
    by_core = replace(usual, decoder="cpu", threads=1, read_processes=0, prefetch_batches=2)
    samples = range(0, source.num_samples, max(1, source.num_samples // SAMPLED_FILES))
    sizes = [len(source.read(sample)) for sample in samples]
    return DeviceInput(
        "cpu",
        _time_input(config, world, source, by_core),
        sum(sizes) / len(sizes),
        measure_copy(world.device),
        # Where the device decodes; its threads read and parse, and the host's cores are counted apart.
        _time_input(config, world, source, replace(usual, decoder="nvjpeg")) if usual.decoder != "cpu" else 0.0,
    )


def _time_input(config: RunConfig, world: World, source: Source, plan: InputPlan) -> float:
    """Images a second that an input makes ready while nothing else is done."""
    with build_train_pipeline(config, world, source, Cursor(), plan) as pipeline:
        for _ in range(3):  # what is ahead was made before the clock began
            next(pipeline)
        begun, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < INPUT_S:
            count += len(next(pipeline).labels)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    return count / passed


def measure_copy(device: torch.device) -> float:
    """Bytes a second from pinned memory; 0 where there is nowhere to copy to."""
    if device.type != "cuda":
        return 0.0
    host = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    seconds = []
    for _ in range(COPIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return float(COPY_BYTES / median(seconds))
