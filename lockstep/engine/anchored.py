"""Passes at an anchor, of rules that have one: a step's gradients become differences (steps 6 and 7 of the walk).

The samples of a step are taken twice. First at the anchor w̃, with the sign turned; then, as in every step, at w̃ + z.
The reducer adds the passes of a step, so what it sums over the ranks, once, is ∇fᵢ(w̃ + z) − ∇fᵢ(w̃).

Both see the same function: batch norm takes its statistics of the same samples in the same parts, and crops are made
once. Running statistics are moved by the passes at w̃ + z alone, as evaluation and checkpoints mean those weights.
Dropout, or any other chance, would draw another network for each of the two, and is refused.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lockstep.data.order import split_batch
from lockstep.engine.build import Parts
from lockstep.engine.giving_up import keep_statistics, put_statistics
from lockstep.errors import SharedError
from lockstep.optim.svrg import Svrg

NOT_ONE_FUNCTION = (
    ", and svrg and halp compare gradients of one function at two places; set its dropout to 0 or choose another "
    "optim.name."
)


def subtract_anchor(parts: Parts, images: Tensor, labels: Tensor, global_size: int) -> None:
    """−∇fᵢ(w̃) of this rank's share, on which the passes of the step will add theirs."""
    rule = find_anchored(parts)
    kept = keep_statistics(parts)
    rule.show_anchor(parts.weights)
    for part, _ in split_batch(len(labels), parts.max_batch_per_rank):
        loss = parts.loss(parts.model(images[part].to(parts.dtype)), labels[part]) / global_size
        parts.clock.cut("forward")
        (-loss).backward()
        parts.clock.cut("backward")
    rule.show_iterate(parts.weights)
    put_statistics(parts, kept)


def find_anchored(parts: Parts) -> Svrg:
    """The rule of these parts, which is known to have an anchor."""
    assert isinstance(parts.rule, Svrg)
    return parts.rule


def refuse_chance(model: nn.Module) -> None:
    """Refuse a network whose two passes over the same samples would not be of one function."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise SharedError(f"The network drops a share of {module.p:g} at random in '{name}'{NOT_ONE_FUNCTION}")


def refuse_drawing(parts: Parts, images: Tensor) -> None:
    """Refuse a network that draws random numbers in its forward pass, whatever by; nothing of the pass stays."""
    kept, before = keep_statistics(parts), _read_chance(images.device)
    try:
        parts.model(images.to(parts.dtype))
        drew = any(not torch.equal(*pair) for pair in zip(before, _read_chance(images.device), strict=True))
    finally:
        put_statistics(parts, kept)
        _put_chance(images.device, before)
    if drew:
        raise SharedError(f"The network draws random numbers in its forward pass{NOT_ONE_FUNCTION}")


def _read_chance(device: torch.device) -> list[Tensor]:
    """The states of PyTorch's own generators: the host's, and the device's."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _put_chance(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
