"""Images → logits: the networks, by name."""

from typing import Any

from torch import nn

from lockstep.models.initialize import initialize, seeded
from lockstep.models.outside import build_outside, is_outside
from lockstep.models.registry import check_settings, find_network
from lockstep.models.resnet import RESNET_DEPTHS
from lockstep.models.vetting import vet_network

__all__ = ["RESNET_DEPTHS", "build_model", "build_started", "find_own", "has_own_kernels", "initialize", "set_fused"]


def build_model(name: str, num_classes: int, *, image_size: int, **settings: Any) -> nn.Module:
    """Build one of this package's networks for square images of `image_size`; call `initialize` for its weights."""
    network = find_network(name)
    check_settings(network, settings)
    return network.build(num_classes, image_size=image_size, **settings)


def build_started(
    name: str, num_classes: int, seed: int, image_sizes: tuple[int, ...], settings: dict[str, Any]
) -> nn.Module:
    """Any network with its starting weights, which follow from the seed; one from elsewhere is vetted first."""
    if is_outside(name):
        network = build_outside(name, num_classes, seed, settings)
        vet_network(name, network, num_classes, image_sizes)
        return network
    with seeded(seed):
        network = build_model(name, num_classes, image_size=min(image_sizes), **settings)
    if find_network(name).initialize:
        initialize(network, seed)
    return network


def find_own(module: nn.Module, name: str, usual: Any) -> Any:
    """An attribute that this package gave the module's class; others may mean something else by the same name."""
    has_own = any(name in vars(kind) and kind.__module__.startswith(__name__) for kind in type(module).__mro__)
    return getattr(module, name) if has_own else usual


def has_own_kernels(model: nn.Module) -> bool:
    """Whether any part of the network can run by this package's kernels."""
    return any(find_own(module, "fused", None) is not None for module in model.modules())


def set_fused(model: nn.Module, fused: bool) -> None:
    """Train with the fused kernels, wherever the network has any, or with PyTorch's own operations."""
    for module in model.modules():
        if find_own(module, "fused", None) is not None:
            module.fused = fused  # type: ignore[assignment]
