"""Whether a network from elsewhere can be trained here: its parameters, its buffers, and one pass forward and back.

Flat storage, checkpoints and the step ask for little: floating-point weights, finite buffers, images in and logits out.
What does not fit is said in one sentence before anything starts. Comes after `outside.py` on the walk.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy

from lockstep.errors import LockstepError
from lockstep.models.initialize import seeded
from lockstep.named import phrase_error

EXTRA_STATE = "_extra_state"  # what PyTorch calls what a module's get_extra_state gives
NUM_IMAGES = 2  # batch norm over a single pixel needs as many


def vet_network(name: str, model: nn.Module, num_classes: int, image_sizes: tuple[int, ...]) -> None:
    """Refuse what cannot be trained; the network is left in FP32, its weights and buffers as they were."""
    _check_parameters(name, model)
    model.float()
    _check_buffers(name, model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with seeded(0):
            for size in dict.fromkeys(image_sizes):
                _check_passes(name, model, num_classes, size)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        model.zero_grad(set_to_none=True)
        model.train()


def _check_parameters(name: str, model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for key, parameter in parameters.items():
        if is_lazy(parameter):
            raise LockstepError(f"{name} has a layer without a size, {key}; give its size in place of a lazy layer.")
        if parameter.is_complex():
            raise LockstepError(f"{name} has complex weights, {key}; only real ones can be trained.")
    if not any(parameter.requires_grad and parameter.numel() for parameter in parameters.values()):
        raise LockstepError(f"{name} has no weights to train; check what it builds.")


def _check_buffers(name: str, model: nn.Module) -> None:
    kept = model.state_dict(keep_vars=True)
    if own := next((key for key in kept if key.rpartition(".")[2] == EXTRA_STATE), None):
        raise LockstepError(
            f"{name} has a state of its own that no checkpoint holds, {own}; keep it in buffers (register_buffer) in "
            "place of get_extra_state."
        )
    for key, buffer in model.named_buffers():
        if is_lazy(buffer):
            raise LockstepError(f"{name} has a layer without a size, {key}; give its size in place of a lazy layer.")
        if key not in kept:
            continue
        if buffer.is_complex() or buffer.is_sparse or buffer.is_quantized:
            raise LockstepError(
                f"{name} has a buffer that no checkpoint can hold, {key} of {buffer.dtype}; register it with "
                "persistent=False."
            )
        if buffer.is_floating_point() and not buffer.isfinite().all():
            raise LockstepError(
                f"{name} has a buffer with numbers that are not finite, {key}, which would make every checkpoint "
                "count as damaged; register it with persistent=False."
            )


def _check_passes(name: str, model: nn.Module, num_classes: int, size: int) -> None:
    """Both passes in training, and one forward as validation takes it."""
    images = torch.randn(NUM_IMAGES, 3, size, size).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(NUM_IMAGES, dtype=torch.int64)
    for training in (False, True):
        model.train(training)
        try:
            with torch.set_grad_enabled(training):
                logits = model(images)
        except (Exception, SystemExit) as error:
            raise LockstepError(
                f"{name} failed on images of {size} × {size} pixels ({phrase_error(error)}); change data.image_size or "
                "model.settings."
            ) from error
        _check_logits(name, logits, num_classes, training=training)
    try:
        cross_entropy(logits.float(), labels).backward()
    except (Exception, SystemExit) as error:
        raise LockstepError(
            f"{name} has no gradients ({phrase_error(error)}); see that its logits depend on them."
        ) from error
    for key, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise LockstepError(f"{name} has sparse gradients, of {key}; build that layer with sparse=False.")


def _check_logits(name: str, logits: object, num_classes: int, *, training: bool) -> None:
    wanted = f"({NUM_IMAGES}, {num_classes})"
    when = "in training" if training else "in validation"
    if not isinstance(logits, Tensor):
        raise LockstepError(
            f"{name} gives a {type(logits).__name__} {when} where logits of shape {wanted} are wanted; return those."
        )
    if not logits.is_floating_point():
        raise LockstepError(f"{name} gives {logits.dtype} {when} where floating-point logits are wanted; return those.")
    if tuple(logits.shape) != (NUM_IMAGES, num_classes):
        raise LockstepError(
            f"{name} gives {logits.dtype} of shape {tuple(logits.shape)} {when} for {NUM_IMAGES} images and "
            f"{num_classes} classes, where {wanted} is wanted; use num_classes for its last layer."
        )
