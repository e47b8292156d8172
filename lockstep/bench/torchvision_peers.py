"""The loop everyone writes around torchvision's networks, in the settings people use: the peers of `one_gpu.py`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.engine.compiler import guard_compiled
from lockstep.errors import LockstepError
from lockstep.models.outside import require

CLASSES = 1000
IMAGE_SIZE = 224
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 5e-5
# By name: number format, channels-last, how torch.compile is called.
PEERS: dict[str, tuple[str, bool, str]] = {
    "fp32": ("fp32", False, ""),
    "tf32": ("tf32", False, ""),
    "fp16": ("fp16", True, ""),
    "fp16-compiled": ("fp16", True, "default"),
    "bf16-compiled": ("bf16", True, "default"),
    "fp16-compiled-graphs": ("fp16", True, "reduce-overhead"),
}


def pick_peers(text: str) -> list[str]:
    """Peers by name, with commas; all if nothing is said, none for "none"."""
    names = [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        raise LockstepError(f"--peers knows no {unknown[0]}; choose from {', '.join(PEERS)}, or none.")
    return names if text else list(PEERS)


def build_network(model: str) -> nn.Module:
    """torchvision's network of that name, untrained."""
    torchvision = require("torchvision", "A benchmark beside torchvision")
    network: nn.Module = getattr(torchvision.models, model)(weights=None, num_classes=CLASSES)
    return network


def build_peer(
    model: str, batch: int, precision: str, channels_last: bool, compiled: str
) -> tuple[str, Callable[[], object]]:
    """A step with fused SGD, and autocast with a loss scaler where the precision is half."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = build_network(model).to("cuda").to(memory_format=layout).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(network.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    # In the precision ours get them in: autocast would cast them in every step.
    images = torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE, device="cuda").to(
        half or torch.float32, memory_format=layout
    )
    labels = torch.randint(0, CLASSES, (batch,), device="cuda")
    guard_compiled()
    forward: Any = torch.compile(network, mode=compiled) if compiled else network

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", half) if half else nullcontext():
            loss = nn.functional.cross_entropy(forward(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return "", step
