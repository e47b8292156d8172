"""Blocks of a network, and the learning-rate factors that follow from them."""

import pytest
import torch
from torch import nn

from lockstep.models import build_model
from lockstep.optim.blocks import find_depths, find_rates, list_blocks


class Block(nn.Module):
    """A transformer's layer, as far as blocks are concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Gate(nn.Module):
    """One part of a block that has parts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)


class Mixed(nn.Module):
    """A block in whose own list stands a single part of several."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), Gate(), nn.Conv2d(4, 4, 1))


class Stage(nn.Module):
    """Blocks behind a layer that makes images smaller."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(4, 4, 2))
        self.blocks = nn.Sequential(kind(), kind())


class Network(nn.Module):
    """A stem, two stages, a norm and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.stem = nn.Conv2d(3, 4, 4)
        self.stages = nn.Sequential(Stage(kind), Stage(kind))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)


@pytest.mark.parametrize("kind", [Block, Mixed])
def test_blocks_are_found_inside_stages(kind: type[nn.Module]) -> None:
    model = Network(kind)
    assert list_blocks(model) == [f"stages.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1)]
    depths = find_depths(model)
    assert depths.keys() == dict(model.named_parameters()).keys()
    assert {depths["pos_embed"], depths["stem.weight"], depths["stages.0.downsample.1.weight"]} == {0}
    assert depths["stages.1.downsample.1.weight"] == 3  # goes with the block that follows
    assert depths["stages.1.blocks.1." + ("norm.weight" if kind is Block else "block.1.fc.weight")] == 4
    assert {depths["norm.weight"], depths["head.bias"]} == {5}


def test_a_resnet_has_a_block_for_each_shortcut() -> None:
    with torch.device("meta"):
        model = build_model("resnet50", 10, image_size=224)
    depths = find_depths(model)
    assert len(list_blocks(model)) == 3 + 4 + 6 + 3
    assert (depths["conv1.weight"], depths["bn1.bias"]) == (0, 0)
    assert (depths["layer1.0.downsample.0.weight"], depths["layer4.2.bn3.weight"], depths["fc.weight"]) == (1, 16, 17)


def test_a_network_without_blocks_has_layers() -> None:
    with torch.device("meta"):
        model = build_model("alexnet", 10, image_size=224)
    depths = find_depths(model)
    assert [depths[name] for name, p in model.named_parameters() if p.dim() > 1] == list(range(8))
    assert depths["features.1.weight"] == depths["features.0.weight"]


def test_rates_fall_from_one_in_the_head_by_the_factor_for_each_block() -> None:
    rates = find_rates(Network(Block), 0.5)
    assert rates["head.weight"] == 1.0
    assert rates["stages.1.blocks.1.norm.weight"] == 0.5
    assert rates["stages.0.blocks.0.norm.weight"] == 0.5**4
    assert rates["stem.weight"] == rates["pos_embed"] == 0.5**5
    assert set(find_rates(Network(Block), 1.0).values()) == {1.0}
