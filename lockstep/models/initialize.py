"""The starting weights of a network, from a seed alone (Jia et al. 2018, section 3.2; Goyal et al. 2017, section 5.1).

Every rank draws the same numbers whatever its random state, device or memory format, and disturbs no other draw.
"""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.models.resnet import BasicBlock, Bottleneck, ResNet

LINEAR_STD = 0.01


def initialize(model: nn.Module, seed: int) -> None:
    """Set all weights: He normal by fan-in for convolutions, a narrow Gaussian for linear layers, 1 and 0 for norms."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            _draw_normal(module.weight, math.sqrt(2.0 / fan_in), generator)
        elif isinstance(module, nn.Linear):
            _draw_normal(module.weight, LINEAR_STD, generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(model, ResNet) and model.zero_init_residual:
        _zero_residuals(model)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """While inside, a network that draws its own weights draws the same on every rank; others' draws go on after it."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@torch.no_grad()
def _draw_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawn contiguous on the CPU and copied, so that device and strides do not change which element gets which number.
    weight.copy_(torch.randn(weight.shape, generator=generator).mul_(std))


def _zero_residuals(model: ResNet) -> None:
    """Start every block as its shortcut: the network is shallow at first, which large rates need."""
    for block in model.modules():
        if isinstance(block, BasicBlock | Bottleneck):
            nn.init.zeros_(block.last_norm.weight)
