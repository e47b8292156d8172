"""Which parameters decay, which get a trust ratio, which are computed in half precision; before `layout.py`.

At very large batch decay and trust ratio do not belong on biases and batch norm (Jia et al. 2018, section 3.2): their
decay costs accuracy, and the ratio ‖w‖/‖g‖ of a few values that start at zero or one says nothing about a good rate.
The same holds for every other norm, for the scales of layers, and for embeddings of positions and classes.

All of it follows from the modules that hold the parameters. What convolutions, linear layers and attention multiply by
is half, their biases too, because PyTorch multiplies and adds in one format; their master copies are FP32, as all other
parameters are.
"""

import re
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from lockstep.layout import ParameterSpec
from lockstep.optim.blocks import find_rates

MULTIPLIES = (_ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
NORM_NAME = re.compile(r"Norm(Act)?(\dd)?$")  # of other people's norms


def describe_parameters(
    model: nn.Module,
    *,
    decay_norm_and_bias: bool = False,
    adapt_norm_and_bias: bool = False,
    half: bool = False,
    layer_decay: float = 1.0,
) -> list[ParameterSpec]:
    """The trainable parameters in forward order; `layer_decay` lowers the learning rate of the early layers."""
    holders = find_holders(model)
    spared = _list_spared(model)
    rates = find_rates(model, layer_decay)
    specs = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel():
            continue
        is_matrix = _is_matrix(parameter, holders[name]) and name not in spared
        specs.append(
            ParameterSpec(
                name,
                tuple(parameter.shape),
                decay=decay_norm_and_bias or is_matrix,
                adapt=adapt_norm_and_bias or is_matrix,
                half=half and is_half(holders[name]),
                rate=rates[name],
            )
        )
    return specs


def find_holders(model: nn.Module) -> dict[str, nn.Module]:
    """By parameter's name the module that holds it; of several, the first that multiplies by it."""
    first: dict[int, str] = {}
    holders: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = first.setdefault(id(parameter), f"{path}.{own}".lstrip("."))
            if name not in holders or (is_half(module) and not is_half(holders[name])):
                holders[name] = module
    return holders


def find_half(model: nn.Module) -> set[str]:
    """Names of the parameters that half precision computes in half, trained or not."""
    return {name for name, holder in find_holders(model).items() if is_half(holder)}


def is_half(holder: nn.Module) -> bool:
    """Whether a module's own parameters may be half: it multiplies by them, and nothing else."""
    return isinstance(holder, MULTIPLIES)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises: PyTorch's own, or by its class's name."""
    return isinstance(module, NORMS) or any(NORM_NAME.search(kind.__name__) for kind in type(module).__mro__)


def _is_matrix(parameter: Tensor, holder: nn.Module) -> bool:
    """Whether a parameter decays and adapts: what is multiplied by does, unless it is a vector."""
    if isinstance(holder, MULTIPLIES):
        return parameter.dim() > 1
    if is_norm(holder) or isinstance(holder, nn.Embedding | nn.EmbeddingBag):
        return False
    # Bare parameters. One that is more than 1 in a single dimension scales channels; one whose first dimension is 1 is
    # added to every sample of a batch: a position, a class token.
    return parameter.dim() > 1 and parameter.shape[0] > 1 and parameter.numel() > max(parameter.shape)


def _list_spared(model: nn.Module) -> set[str]:
    """What the modules themselves ask not to decay, by a method that timm's networks have."""
    return set(_name_spared(model))


def _name_spared(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        ask = getattr(module, "no_weight_decay", None)
        if not callable(ask):
            continue
        try:
            names = list(ask())
        except Exception:  # somebody else's method of that name
            continue
        for name in names:
            if isinstance(name, str):
                yield f"{path}.{name}".lstrip(".")
