"""A model's parameters as flat arrays over one layout; built once, before step 0 of the walk.

Afterwards every parameter is a view: the update rule writes the weights the model reads. FP32 parameters are views of
the master weights themselves, half ones of a flat half array beside them. Gradients live in flat arrays over the same
layout that the reducer owns; batch-norm statistics stay ordinary tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.layout import Layout, Slot


@torch.no_grad()
def build_weights(
    model: nn.Module, layout: Layout, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Move the model to the device and its parameters, values kept, into the slots of flat arrays.

    Returns the FP32 master weights over the layout and the half weights (of `dtype`) over its half part.
    """
    model.to(device)
    master = torch.zeros(layout.numel, device=device)
    half = torch.zeros(layout.split, dtype=dtype, device=device)
    parameters = dict(model.named_parameters())
    own = mixed_views(half, master[layout.split :], layout)
    for slot, master_view, view in zip(layout.slots, views(master, layout), own, strict=True):
        parameter = parameters[slot.name]
        master_view.copy_(parameter)
        parameter.data = view
    half.copy_(master[: layout.split])
    return master, half


@torch.no_grad()
def hold_constants(model: nn.Module, layout: Layout, half: set[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of the parameters that the layout has no slot for; the model computes with those of `half` in `dtype`."""
    slots = {slot.name for slot in layout.slots}
    constants = {}
    for name, parameter in model.named_parameters():
        if name in slots:
            continue
        constants[name] = parameter.detach().clone(memory_format=torch.contiguous_format)
        if name in half and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return constants


@torch.no_grad()
def fill_constants(model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Let the model compute with what the constants hold now."""
    for name, values in constants.items():
        model.get_parameter(name).copy_(values)


def views(flat: Tensor, layout: Layout) -> list[Tensor]:
    """Each slot of a flat array as a tensor of its parameter's shape; convolution weights lie channels-last."""
    return [_view(flat, slot, slot.offset) for slot in layout.slots]


def mixed_views(half: Tensor, full: Tensor, layout: Layout) -> list[Tensor]:
    """The same over two arrays: `half` over elements [0, split) of the layout, `full` from there on."""
    return [
        _view(half, slot, slot.offset) if slot.half else _view(full, slot, slot.offset - layout.split)
        for slot in layout.slots
    ]


def _view(flat: Tensor, slot: Slot, start: int) -> Tensor:
    values = flat[start : start + slot.numel]
    if len(slot.shape) != 4:
        return values.view(slot.shape)
    out_channels, in_channels, height, width = slot.shape
    return values.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)


def named_views(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Every slot by parameter name, in forward order."""
    named = sorted(zip(layout.slots, views(flat, layout), strict=True), key=lambda pair: -pair[0].depth)
    return {slot.name: view for slot, view in named}


def named_arrays(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The same as copies in the usual strides, where the array lies."""
    return {name: view.clone(memory_format=torch.contiguous_format) for name, view in named_views(flat, layout).items()}


def copy_to_host(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the usual strides, one after the other and done when this returns: the form of a checkpoint."""
    usual = torch.contiguous_format
    return {name: array.detach().to("cpu", copy=True, memory_format=usual) for name, array in arrays.items()}


@torch.no_grad()
def load_named(flat: Tensor, layout: Layout, arrays: Mapping[str, Tensor]) -> None:
    """Fill a flat array from arrays by parameter name; nothing is written unless all names and shapes are right."""
    names = {slot.name for slot in layout.slots}
    if missing := sorted(names - arrays.keys()):
        raise LockstepError(
            f"The array of parameter '{missing[0][:LONGEST]}' is missing{_and_more(missing)}: {_ADVICE}"
        )
    if unknown := sorted(arrays.keys() - names):
        raise LockstepError(f"The model has no parameter '{unknown[0][:LONGEST]}'{_and_more(unknown)}: {_ADVICE}")
    for slot in layout.slots:
        if tuple(arrays[slot.name].shape) != slot.shape:
            found = tuple(arrays[slot.name].shape)
            raise LockstepError(f"Parameter '{slot.name}' has shape {slot.shape}, its array {found}: {_ADVICE}")
    for slot, view in zip(layout.slots, views(flat, layout), strict=True):
        view.copy_(arrays[slot.name])


LONGEST = 200  # characters of a name in a sentence: it may come from a forged file
_ADVICE = "use the model settings these arrays were saved with."


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
