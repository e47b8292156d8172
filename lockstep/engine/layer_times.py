"""Where in the forward pass each layer begins, and what it keeps for the backward pass (for `profiling.py`).

A layer is a convolution or a linear layer with what follows it until the next one; a block's projection belongs to the
layer before it, as its norm is added there. Both are seen from hooks on PyTorch's modules. The fused kernels run across
modules and call no hooks: there, the passes are measured as a whole and spread by the shares of PyTorch's kernels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.moment import Moment, seconds_between, take_moment

PROJECTION = "downsample"  # as torchvision names it
END = ""  # of the forward pass, among the layers' names


@dataclass(frozen=True)
class Layer:
    """A module that begins a layer, and the slots of the layer."""

    name: str
    slots: tuple[str, ...]


def list_layers(model: nn.Module) -> list[Layer]:
    """The layers in forward order; every parameter that is trained is in one."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    slots: dict[str, list[str]] = {}
    name = ""
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and PROJECTION not in path.split("."):
            name = path
            slots[name] = []
        own = [f"{path}.{each}".lstrip(".") for each, _ in module.named_parameters(recurse=False)]
        if own := [each for each in own if each in trained]:
            slots.setdefault(name, []).extend(own)
    return [Layer(name, tuple(names)) for name, names in slots.items()]


@dataclass
class Begun:
    """Moments at which the layers of the last forward pass began, and at which it ended; replays pass them anew."""

    moments: dict[str, Moment] = field(default_factory=dict)

    def seconds(self, layers: Sequence[Layer]) -> list[float]:
        """Each layer's, to the beginning of the next; the device must be done with the pass.

        A layer that is never called as a module, as attention's last one, takes no time of its own: it begins where the
        next one does.
        """
        names = [*(layer.name for layer in layers), END]
        moments = [self.moments[END]]
        for name in reversed(names[:-1]):
            moments.insert(0, self.moments.get(name, moments[0]))
        return [max(0.0, seconds_between(begin, end)) for begin, end in pairwise(moments)]


@contextmanager
def note_begins(model: nn.Module, layers: Sequence[Layer], *, on_gpu: bool) -> Iterator[Begun]:
    """While inside, forward passes by PyTorch's kernels note when each layer begins."""
    begun = Begun()
    modules = dict(model.named_modules())

    def note(name: str, *ignored: Any) -> None:
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        begun.moments[name] = take_moment(on_gpu=on_gpu, in_recording=capturing)

    hooks = [modules[layer.name].register_forward_pre_hook(partial(note, layer.name)) for layer in layers]
    hooks.append(model.register_forward_hook(partial(note, END)))
    try:
        yield begun
    finally:
        for hook in hooks:
            hook.remove()


def count_kept(model: nn.Module, layers: Sequence[Layer], images: Tensor) -> tuple[int, list[int]]:
    """Bytes that a forward pass keeps for the backward pass: of all of it, and by layer as far as hooks tell.

    Each storage counts once, for the layer that kept it first; parameters are kept anyway and do not count.
    """
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = dict.fromkeys((layer.name for layer in layers), 0)
    current = layers[0].name
    modules = dict(model.named_modules())

    def enter(name: str, *ignored: Any) -> None:
        nonlocal current
        current = name

    def pack(values: Tensor) -> Tensor:
        storage = values.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[current] += storage.nbytes()
        return values.detach()  # or what a node gave would hold the node

    hooks = [modules[layer.name].register_forward_pre_hook(partial(enter, layer.name)) for layer in layers]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda values: values):
            output = model(images)
        del output
    finally:
        for hook in hooks:
            hook.remove()
    return sum(kept.values()), list(kept.values())


def spread(total: float, shares: Sequence[float]) -> list[float]:
    """A total over the layers in the given proportion; evenly where there is none."""
    whole = sum(shares)
    return [total * share / whole if whole else total / len(shares) for share in shares]


def time_backward(layers: Sequence[Layer], ready_s: dict[str, float], backward_s: float) -> list[float]:
    """Each layer's part of the backward pass: from the gradients of the one behind it to its own.

    What comes after the last gradient belongs to the first layer, so that the parts add up to the whole.
    """
    parts, last = [], 0.0
    for layer in reversed(layers):
        ready = max([last, *(ready_s[name] for name in layer.slots)])
        parts.append(ready - last)
        last = ready
    parts[-1] += max(0.0, backward_s - last)
    return spread(backward_s, parts[::-1])
