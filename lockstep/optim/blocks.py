"""Blocks of a network from its modules, and the learning-rate factor of each (`optim.layer_decay`); before `layout.py`.

A block is what a network repeats: a ResNet's bottleneck, a transformer's layer. It is a child of an `nn.Sequential` or
`nn.ModuleList` that has children itself. What stands before the first block is the stem, what stands behind the last
one the head, and what stands between two belongs to the one that follows. A network without blocks has layers in their
place: each convolution or linear layer with what follows it.
"""

from torch import nn
from torch.nn.modules.conv import _ConvNd

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_rates(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """By parameter's name its factor: 1 in the head, `layer_decay` less for every block nearer to the images."""
    names = [name for name, _ in model.named_parameters()]
    if layer_decay == 1.0:
        return dict.fromkeys(names, 1.0)
    depths = find_depths(model)
    last = max(depths.values(), default=0)
    return {name: layer_decay ** (last - depths[name]) for name in names}


def find_depths(model: nn.Module) -> dict[str, int]:
    """By parameter's name the number of its block from the images on: 0 is the stem, the highest the head."""
    blocks = list_blocks(model)
    if not blocks:
        return _number_layers(model)
    names = [name for name, _ in model.named_parameters()]
    numbers = {path: number for number, path in enumerate(blocks, start=1)}
    own = {name: number for name in names if (number := _find_block(name, numbers))}
    places = [place for place, name in enumerate(names) if name in own]
    if not places:
        return dict.fromkeys(names, 0)
    depths: dict[str, int] = {}
    following = len(blocks) + 1
    for place in reversed(range(len(names))):
        name = names[place]
        if place < places[0]:
            following = 0
        following = own.get(name, following)
        depths[name] = following
    return depths


def list_blocks(model: nn.Module) -> list[str]:
    """Paths of the blocks, in forward order."""
    found: list[str] = []

    def walk(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}".lstrip(".")
            if isinstance(child, CONTAINERS) or _repeats(child):
                walk(child_path, child)
            elif isinstance(module, CONTAINERS) and _is_composite(child):
                found.append(child_path)

    walk("", model)
    return found


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a stage: somewhere in it stand two blocks of one class."""
    for container in module.modules():
        if not isinstance(container, CONTAINERS):
            continue
        kinds = [
            type(child) for child in container.children() if _is_composite(child) and not isinstance(child, CONTAINERS)
        ]
        if len(kinds) > len(set(kinds)):
            return True
    return False


def _find_block(name: str, numbers: dict[str, int]) -> int:
    """The number of the block that a parameter is in; 0 for none."""
    parts = name.split(".")
    return next((n for end in range(1, len(parts)) if (n := numbers.get(".".join(parts[:end]), 0))), 0)


def _number_layers(model: nn.Module) -> dict[str, int]:
    """The same by layers, where nothing is repeated."""
    depths: dict[str, int] = {}
    number = -1
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [(name, p) for name, p in module.named_parameters(recurse=False) if id(p) not in seen]
        if isinstance(module, _ConvNd | nn.Linear) and own:
            number += 1
        for name, parameter in own:
            seen.add(id(parameter))
            depths[f"{path}.{name}".lstrip(".")] = max(0, number)
    return depths
