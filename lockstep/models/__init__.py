"""Images → logits: the networks, by name."""

from torch import nn

from lockstep.errors import LockstepError
from lockstep.models.alexnet import build_alexnet
from lockstep.models.initialize import initialize
from lockstep.models.resnet import STRIDE, StemName, build_resnet

__all__ = ["build_model", "initialize", "set_fused"]

RESNET_DEPTHS = {f"resnet{depth}": depth for depth in (18, 34, 50, 101, 152)}


def build_model(
    name: str,
    num_classes: int,
    *,
    image_size: int,
    stem: StemName = "imagenet",
    width: int = 64,
    zero_init_residual: bool = True,
    batch_norm: bool = True,
    pool5_batch_norm: bool = True,
    dropout: float = 0.5,
) -> nn.Module:
    """Build a network that takes square images of `image_size`; call `initialize` for its starting weights."""
    if name == "alexnet":
        return build_alexnet(num_classes, batch_norm, pool5_batch_norm, dropout, image_size)
    if name not in RESNET_DEPTHS:
        raise LockstepError(f"There is no model '{name}': choose alexnet or {', '.join(RESNET_DEPTHS)}.")
    if image_size < STRIDE[stem]:
        raise LockstepError(
            f"{name} with the {stem} stem needs images of at least {STRIDE[stem]} pixels, not {image_size}: "
            "enlarge data.image_size" + (" or set model.stem = 'cifar'." if stem == "imagenet" else ".")
        )
    return build_resnet(RESNET_DEPTHS[name], num_classes, stem, width, zero_init_residual)


def set_fused(model: nn.Module, fused: bool) -> None:
    """Train with the fused kernels, wherever the network has any, or with PyTorch's own operations."""
    for module in model.modules():
        if hasattr(module, "fused"):
            module.fused = fused  # type: ignore[assignment]
