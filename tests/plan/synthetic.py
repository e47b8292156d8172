"""A profile as an H200 might have it: the step's rates are measured ones, the layers' shares a roofline's."""

from collections.abc import Iterator, Mapping

from lockstep.plan.device import BatchTime, DeviceInput, DeviceProfile, LayerTime, SlotReady
from lockstep.plan.plan import Execution

OWN = Execution("own", recorded=True)
# Images a second of ResNet-50, own kernels, recorded.
RESNET50_RATES = {16: 4803.0, 32: 6607.0, 64: 8243.0, 128: 9713.0, 256: 10751.0, 512: 11156.0}
ALEXNET_RATES = {16: 12000.0, 128: 40000.0, 512: 60000.0}
FLOPS, BYTES_S = 790e12, 4.3e12
UPDATE_S = 0.19e-3


def list_convolutions(model: str) -> Iterator[tuple[str, int, int, int]]:
    """Name, multiplications of an image, elements of the output, weights."""
    if model == "alexnet":
        convolutions = ((3, 96, 11, 55), (96, 256, 5, 27), (256, 384, 3, 13), (384, 384, 3, 13), (384, 256, 3, 13))
        for number, (old, new, kernel, side) in enumerate(convolutions):
            weights = old * new * kernel**2
            yield f"features.{2 * number}", weights * side**2, new * side**2, weights
        for number, (old, new) in enumerate(((9216, 4096), (4096, 4096), (4096, 1000))):
            yield f"classifier.{3 * number}", old * new, new, old * new
        return
    yield "conv1", 3 * 64 * 49 * 112**2, 64 * 112**2, 3 * 64 * 49
    channels = 64
    for stage, (width, blocks, side) in enumerate(((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)), start=1):
        for block in range(blocks):
            for number, (old, new, kernel) in enumerate(
                ((channels, width, 1), (width, width, 3), (width, 4 * width, 1)), start=1
            ):
                weights = old * new * kernel**2
                yield f"layer{stage}.{block}.conv{number}", weights * side**2, new * side**2, weights
            channels = 4 * width
    yield "fc", 2048 * 1000, 1000, 2048 * 1000


def synthesize(model: str = "resnet50", rates: Mapping[int, float] = RESNET50_RATES) -> DeviceProfile:
    """The profile of a model, forward a third and backward two thirds of what the update leaves of the step."""
    rows = []
    found = list(list_convolutions(model))
    for batch, rate in rates.items():
        kept = [4 * elements * batch for _, _, elements, _ in found]
        times = [
            2 * macs * batch / FLOPS + 2 * num_bytes / BYTES_S + 20e-6
            for (_, macs, _, _), num_bytes in zip(found, kept, strict=True)
        ]
        scale = (batch / rate - UPDATE_S) / (3 * sum(times))
        layers = tuple(
            LayerTime(name, scale * seconds, 2 * scale * seconds, num_bytes, (f"{name}.weight",))
            for (name, *_), seconds, num_bytes in zip(found, times, kept, strict=True)
        )
        slots, ready_s = [], 0.0
        for layer, (name, _, _, weights) in zip(reversed(layers), reversed(found), strict=True):
            ready_s += layer.backward_s
            slots.append(SlotReady(f"{name}.weight", weights, 2 * weights, ready_s))
        forward_s = sum(layer.forward_s for layer in layers)
        rows.append(
            BatchTime(
                batch=batch,
                execution=OWN,
                step_s=batch / rate,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                update_s=UPDATE_S,
                launch_s=2e-4,
                memory_bytes=10**9 + sum(kept),
                layers=layers,
                slots=tuple(slots),
            )
        )
    return DeviceProfile(
        device="NVIDIA H200",
        model=model,
        image_size=224,
        precision="fp16",
        rule="lars",
        source="measured",
        note="made up for a test",
        memory_bytes=141 * 10**9,
        batches=tuple(rows),
        input=DeviceInput("cpu", 500.0, 110e3, 50e9),
    )
