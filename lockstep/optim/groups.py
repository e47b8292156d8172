"""Which parameters decay and which get a trust ratio (Jia et al. 2018, section 3.2); before `layout.py`.

At very large batch neither belongs on biases and batch norm: their decay costs accuracy, and the ratio ‖w‖/‖g‖ of a
few values that start at zero or one says nothing about a good rate.
"""

from torch import nn

from lockstep.layout import ParameterSpec


def describe_parameters(
    model: nn.Module, *, decay_norm_and_bias: bool = False, adapt_norm_and_bias: bool = False
) -> list[ParameterSpec]:
    """The trainable parameters in forward order; those of one dimension are the biases and the norms' γ and β."""
    return [
        ParameterSpec(
            name,
            tuple(parameter.shape),
            decay=decay_norm_and_bias or parameter.dim() > 1,
            adapt=adapt_norm_and_bias or parameter.dim() > 1,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
