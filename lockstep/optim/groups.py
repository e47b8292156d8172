"""Which parameters decay, which get a trust ratio, which are computed in half precision; before `layout.py`.

At very large batch decay and trust ratio do not belong on biases and batch norm (Jia et al. 2018, section 3.2): their
decay costs accuracy, and the ratio ‖w‖/‖g‖ of a few values that start at zero or one says nothing about a good rate.
Batch norm stays in FP32. A layer's bias goes with its weight, because PyTorch multiplies and adds in one format; its
master copy is FP32 like every other.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.layout import ParameterSpec


def describe_parameters(
    model: nn.Module,
    *,
    decay_norm_and_bias: bool = False,
    adapt_norm_and_bias: bool = False,
    half: bool = False,
) -> list[ParameterSpec]:
    """The trainable parameters in forward order; those of one dimension are the biases and the norms' γ and β."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for parameter in module.parameters()
    }
    return [
        ParameterSpec(
            name,
            tuple(parameter.shape),
            decay=decay_norm_and_bias or parameter.dim() > 1,
            adapt=adapt_norm_and_bias or parameter.dim() > 1,
            half=half and id(parameter) not in norms,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
