"""A device profile for hardware that nobody here has: a measured one, scaled to a published rate. Torch-free.

Each pass of each layer is taken apart in three. What its arrays take to travel goes by the devices' bandwidths: an
array that is kept is written, read by the next layer and read on the way back, and its gradient is written and read.
The rest goes by their speeds of multiplication. What it takes however small the batch is becomes longer as those two
do: it is taken for work that too few images leave undivided, not for launches and waits, which would stay as they
are. One factor on all of it, the same for every batch and layer, then meets the published rate at its batch: it says
how much more or less the published software makes of its device than ours of the measured one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lockstep.errors import LockstepError
from lockstep.plan.device import BatchTime, DeviceProfile, LayerTime

FORWARD_TRIPS, BACKWARD_TRIPS = 2, 3  # of a kept array between the chip and its memory
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Datasheet:
    """What a maker says of a device: dense operations a second in a format, bytes a second, bytes."""

    name: str
    flops: float
    bandwidth: float
    memory_bytes: int
    precision: str = "fp16"
    decodes: bool = False  # JPEGs, by engines like those of the device that was measured


@dataclass(frozen=True)
class Rate:
    """Images a second of one device at a batch, as published, and where."""

    images_s: float
    batch: int
    source: str


DATASHEETS = {
    "h200": Datasheet("NVIDIA H200 SXM", 989e12, 4.8e12, 141 * 10**9, decodes=True),
    "h100": Datasheet("NVIDIA H100 SXM", 989e12, 3.35e12, 80 * 10**9, decodes=True),
    "a100": Datasheet("NVIDIA A100 SXM 80 GB", 312e12, 2.039e12, 80 * 10**9),
    "v100": Datasheet("NVIDIA V100 SXM2 16 GB", 125e12, 0.9e12, 16 * 10**9),
    "p100": Datasheet("NVIDIA P100 SXM2", 10.6e12, 0.732e12, 16 * 10**9, "fp32"),
    # FP16 is what it stores; it multiplies in FP32, as its FP16 runs at a 64th of that.
    "p40": Datasheet("NVIDIA P40", 11.76e12, 0.346e12, 24 * 10**9),
}
MEASURED_ON = "h200"  # what the others are derived from
RATES = {
    ("h100", "resnet50"): Rate(7162, 400, "MLPerf Training v4.0, MXNet, 8 devices: 57,295 images/s in all"),
    ("a100", "resnet50"): Rate(3410, 512, "NVIDIA DeepLearningExamples, MXNet 22.10, FP16, 1 device"),
    ("v100", "resnet50"): Rate(1376, 256, "NVIDIA DeepLearningExamples, MXNet, FP16, 1 device"),
    ("p100", "resnet50"): Rate(138, 32, "He et al. as cited by You et al.: 90 epochs in 29 hours on 8 devices"),
    ("p40", "resnet50"): Rate(218, 64, "Jia et al., arXiv 1807.11205, mixed precision, 1 device"),
    ("v100", "alexnet"): Rate(3297, 128, "arXiv 1902.06855: 95 epochs in 1.5 minutes on 512 devices, speed-up 410.2"),
}
STAND_IN = "resnet50"  # whose rate calibrates a device that has none for the model


def derive(measured: DeviceProfile, known: Datasheet, wanted: Datasheet, factor: float = 1.0) -> DeviceProfile:
    """The measured profile's quickest way to execute the step, on another device; `factor` is on all of it."""
    if not 0 < factor < 1e6:
        raise LockstepError(f"A profile cannot be derived with a factor of {factor:g}; check the published rate.")
    rows = sorted(_quickest(measured), key=lambda row: row.batch)
    if len(rows) < 2:
        raise LockstepError(f"A profile of {measured.device} at one batch tells too little to derive another from.")
    scaling = _Scaling(known, wanted, factor)
    made = measured.input
    return replace(
        measured,
        input=made if made is None or wanted.decodes else replace(made, device_images_s=0.0),
        device=wanted.name,
        precision=wanted.precision,
        source="derived",
        note=f"from {measured.device} by datasheets ({wanted.flops / 1e12:g} TFLOP/s, {wanted.bandwidth / 1e9:g} GB/s)",
        memory_bytes=wanted.memory_bytes,
        batches=tuple(scaling.scale_row(row, rows[0], rows[1]) for row in rows),
    )


def meet_rate(measured: DeviceProfile, known: Datasheet, wanted: Datasheet, rate: Rate) -> float:
    """The factor with which `derive` meets a published rate exactly."""
    plain = derive(measured, known, wanted)
    return rate.batch / rate.images_s / plain.at(rate.batch).step_s


def derive_published(device: str, model: str, measured: DeviceProfile, stand_in: DeviceProfile) -> DeviceProfile:
    """The profile of a device of `RATES`: by its own rate for the model, else by that for the stand-in."""
    known, wanted = DATASHEETS[MEASURED_ON], DATASHEETS[device]
    rate, base, of = RATES.get((device, model)), measured, model
    if rate is None:
        rate, base, of = RATES[device, STAND_IN], stand_in, STAND_IN
    factor = meet_rate(base, known, wanted, rate)
    found = derive(measured, known, wanted, factor)
    calibrated = f"{rate.images_s:g} images/s of {of} at batch {rate.batch} ({rate.source})"
    return replace(found, note=f"{found.note}, and a factor of {factor:.3g} that meets {calibrated}")


def _quickest(profile: DeviceProfile) -> list[BatchTime]:
    way = profile.at(max(row.batch for row in profile.batches)).execution
    return [row for row in profile.batches if row.execution == way]


class _Scaling:
    """How times of one device become those of another."""

    def __init__(self, known: Datasheet, wanted: Datasheet, factor: float) -> None:
        self._known, self._factor = known, factor
        self._width = ELEMENT_BYTES[wanted.precision] / ELEMENT_BYTES[known.precision]
        self._by_bandwidth = known.bandwidth / wanted.bandwidth * self._width
        self._by_flops = known.flops / wanted.flops

    def scale_row(self, row: BatchTime, first: BatchTime, second: BatchTime) -> BatchTime:
        """One batch; `first` and `second` are the smallest two, which tell what a layer takes without any images."""
        layers = []
        for layer, low, high in zip(row.layers, first.layers, second.layers, strict=True):
            share = first.batch / (second.batch - first.batch)
            fixed = [
                min(a, max(0.0, a - (b - a) * share))
                for a, b in ((low.forward_s, high.forward_s), (low.backward_s, high.backward_s))
            ]
            forward_s = self._scale_pass(layer.forward_s, fixed[0], FORWARD_TRIPS * layer.activation_bytes)
            backward_s = self._scale_pass(layer.backward_s, fixed[1], BACKWARD_TRIPS * layer.activation_bytes)
            kept = round(layer.activation_bytes * self._width)
            layers.append(LayerTime(layer.name, forward_s, backward_s, kept, layer.slots))
        forward_s, backward_s = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
        update_s = row.update_s * self._by_bandwidth * self._factor  # nothing in it but arrays that travel
        old, new = (list(accumulate(layer.backward_s for layer in reversed(each))) for each in (row.layers, layers))
        return replace(
            row,
            step_s=forward_s + backward_s + update_s,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            memory_bytes=round(row.memory_bytes * self._width),
            layers=tuple(layers),
            slots=tuple(
                replace(
                    slot,
                    # What was FP32 stays so.
                    num_bytes=round(min(4 * slot.elements, slot.num_bytes * self._width)),
                    ready_s=bend(slot.ready_s, old, new),
                )
                for slot in row.slots
            ),
        )

    def _scale_pass(self, seconds: float, fixed_s: float, travelling_bytes: float) -> float:
        fixed_s = min(fixed_s, seconds)
        travel_s = min(seconds - fixed_s, travelling_bytes / self._known.bandwidth)
        rest_s = seconds - fixed_s - travel_s
        scaled_s = travel_s * self._by_bandwidth + rest_s * self._by_flops
        growth = scaled_s / (travel_s + rest_s) if seconds > fixed_s else self._by_flops
        return self._factor * (fixed_s * growth + scaled_s)


def bend(moment_s: float, old: Sequence[float], new: Sequence[float]) -> float:
    """A moment between the old ends of layers, at the same place between the new ones."""
    index = bisect_left(old, moment_s)
    if index == len(old):
        return new[-1]
    before, after = (old[index - 1], new[index - 1]) if index else (0.0, 0.0)
    span = old[index] - before
    return after + (new[index] - after) * ((moment_s - before) / span if span > 0 else 1.0)
