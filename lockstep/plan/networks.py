"""Networks by their shapes alone: elements and multiplications of each layer, for what nobody ran. Torch-free.

A sketched profile shares a step's time among layers by their multiplications; a lent one takes a measured profile of
another network on the same device and stretches it by the ratio of the two networks' multiplications.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.errors import LockstepError
from lockstep.plan.device import BatchTime, DeviceProfile, LayerTime, SlotReady
from lockstep.plan.plan import Execution

RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
NUM_CLASSES = 1000


@dataclass(frozen=True)
class Shaped:
    """One layer: its weights, the parameters of batch norm and bias beside them, its multiplications, its outputs."""

    name: str
    weights: int
    beside: int
    num_beside: int  # tensors: γ and β, or a bias
    macs: int  # an image, forward
    outputs: int


def list_layers(model: str) -> list[Shaped]:
    """The layers of a network for ImageNet, in forward order."""
    if model in RESNETS:
        return _list_resnet(*RESNETS[model])
    if model == "alexnet":
        return _list_alexnet()
    if model == "vgg16":
        return _list_vgg()
    raise LockstepError(f"The shapes of {model} are not known; give a profile of it with --profile.")


def count_macs(model: str) -> int:
    """Multiplications of one image, forward."""
    return sum(layer.macs for layer in list_layers(model))


def _convolve(name: str, inputs: int, outputs: int, kernel: int, side: int, *, bias: bool = False) -> Shaped:
    weights, count = inputs * outputs * kernel * kernel, 1 if bias else 2
    return Shaped(name, weights, count * outputs, count, weights * side * side, outputs * side * side)


def _connect(name: str, inputs: int, outputs: int, *, norm: bool = False) -> Shaped:
    count = 2 if norm else 1
    return Shaped(name, inputs * outputs, count * outputs, count, inputs * outputs, outputs)


def _list_resnet(counts: Sequence[int], is_bottleneck: bool) -> list[Shaped]:
    layers = [_convolve("conv1", 3, 64, 7, 112)]
    inputs, side = 64, 56
    for stage, count in enumerate(counts):
        width = 64 << stage
        outputs = 4 * width if is_bottleneck else width
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            before, side = side, side // 2 if stage and not block else side
            if is_bottleneck:
                layers.append(_convolve(f"{name}.conv1", inputs, width, 1, before))
                layers.append(_convolve(f"{name}.conv2", width, width, 3, side))
                layers.append(_convolve(f"{name}.conv3", width, outputs, 1, side))
            else:
                layers.append(_convolve(f"{name}.conv1", inputs, width, 3, side))
                layers.append(_convolve(f"{name}.conv2", width, outputs, 3, side))
            if inputs != outputs:
                layers.append(_convolve(f"{name}.downsample", inputs, outputs, 1, side))
            inputs = outputs
    return [*layers, _connect("fc", inputs, NUM_CLASSES)]


def _list_alexnet() -> list[Shaped]:
    """In one column, with batch norm."""
    shapes = ((3, 96, 11, 55), (96, 256, 5, 27), (256, 384, 3, 13), (384, 384, 3, 13), (384, 256, 3, 13))
    layers = [_convolve(f"conv{number}", *shape) for number, shape in enumerate(shapes, start=1)]
    hidden = [_connect("fc6", 9216, 4096, norm=True), _connect("fc7", 4096, 4096, norm=True)]
    return [*layers, *hidden, _connect("fc8", 4096, NUM_CLASSES)]


def _list_vgg() -> list[Shaped]:
    layers, inputs, side = [], 3, 224
    for stage, (width, count) in enumerate(VGG16, start=1):
        for number in range(1, count + 1):
            layers.append(_convolve(f"conv{stage}_{number}", inputs, width, 3, side, bias=True))
            inputs = width
        side //= 2
    return [
        *layers,
        _connect("fc6", 512 * 7 * 7, 4096),
        _connect("fc7", 4096, 4096),
        _connect("fc8", 4096, NUM_CLASSES),
    ]


def sketch_profile(
    model: str,
    device: str,
    image_s: float,
    fixed_s: float,
    *,
    update_s: float = 0.0,
    precision: str = "fp16",
    memory_bytes: int = 1 << 40,
    note: str = "",
) -> DeviceProfile:
    """A profile whose step takes `fixed_s` and `image_s` for each image, a third of it forward."""
    layers = list_layers(model)
    width = 2 if precision in ("fp16", "bf16") else 4
    batches = tuple(_sketch_row(layers, batch, image_s, fixed_s, update_s, width) for batch in (1, 1024))
    size = 227 if model == "alexnet" else 224
    return DeviceProfile(device, model, size, precision, "sgd", "derived", note, memory_bytes, batches)


def _sketch_row(
    layers: Sequence[Shaped], batch: int, image_s: float, fixed_s: float, update_s: float, width: int
) -> BatchTime:
    passes_s = fixed_s + batch * image_s - update_s
    total = sum(layer.macs for layer in layers)
    rows = tuple(
        LayerTime(
            layer.name,
            passes_s / 3 * layer.macs / total,
            passes_s * 2 / 3 * layer.macs / total,
            2 * width * batch * layer.outputs,
            (f"{layer.name}.weight", f"{layer.name}.beside"),
        )
        for layer in layers
    )
    ready_s = {}
    at = 0.0
    for row in reversed(rows):
        at += row.backward_s
        ready_s[row.name] = at
    weights = [
        SlotReady(f"{layer.name}.weight", layer.weights, width * layer.weights, ready_s[layer.name])
        for layer in reversed(layers)
    ]
    beside = [
        SlotReady(f"{layer.name}.beside", layer.beside, 4 * layer.beside, ready_s[layer.name])
        for layer in reversed(layers)
    ]
    held = sum(row.activation_bytes for row in rows) + sum(slot.elements for slot in (*weights, *beside)) * (width + 12)
    return BatchTime(
        batch,
        Execution(),
        fixed_s + batch * image_s,
        passes_s / 3,
        passes_s * 2 / 3,
        update_s,
        0.0,
        held,
        rows,
        (*weights, *beside),
    )


def lend_profile(profile: DeviceProfile, model: str) -> DeviceProfile:
    """A profile of another network on the same device: each step stretched by the ratio of multiplications."""
    ratio = count_macs(model) / count_macs(profile.model)
    size = sum(layer.weights + layer.beside for layer in list_layers(model))
    known = sum(slot.elements for slot in profile.batches[0].slots)
    width = 2 if any(slot.num_bytes < 4 * slot.elements for slot in profile.batches[0].slots) else 4
    depth = len(list_layers(model)) / len(list_layers(profile.model))  # kernels to launch, where that is what counts
    rows = []
    for row in profile.batches:
        update_s = row.update_s * size / known
        step_s = (row.step_s - row.update_s) * ratio + update_s
        layers = list_layers(model)
        sketched = _sketch_row(layers, row.batch, 0.0, step_s, update_s, width)
        memory = round((row.memory_bytes - 12 * known) * ratio + 12 * size)
        rows.append(
            replace(
                sketched, execution=row.execution, launch_s=row.launch_s * depth, memory_bytes=max(memory, 12 * size)
            )
        )
    note = f"lent by {profile.model}, at {ratio:.3g} times its multiplications; {profile.note}"
    return replace(profile, model=model, source="derived", note=note[:2000], batches=tuple(rows))
