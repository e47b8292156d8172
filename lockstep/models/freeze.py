"""Parts of a network that training leaves as they are: no gradient, no decay, nothing sent (step 0 on the walk).

Batch norm of a frozen part keeps its statistics too, and normalises by them: were they taken from the batch, the part's
output would change under weights that do not.
"""

import difflib
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.errors import LockstepError


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze all parameters whose names begin with one of the prefixes, whole parts between dots."""
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        if not any(_is_within(name, prefix) for name in names):
            raise LockstepError(_no_part(prefix, names))
    for name, parameter in model.named_parameters():
        if any(_is_within(name, prefix) for prefix in prefixes):
            parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and any(_is_within(name, prefix) for prefix in prefixes):
            _hold(module)
            if hasattr(model, "has_frozen_norm"):
                model.has_frozen_norm = True  # type: ignore[assignment]
    if prefixes and not any(parameter.requires_grad for parameter in model.parameters()):
        raise LockstepError(f"model.freeze = {list(prefixes)} leaves nothing to train; freeze fewer parts.")


def _is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _hold(norm: nn.Module) -> None:
    """Keep a norm in evaluation, also when the network around it is told to train."""
    norm.eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]


def _no_part(prefix: str, names: Sequence[str]) -> str:
    parts = list(dict.fromkeys(name.partition(".")[0] for name in names))
    near = difflib.get_close_matches(prefix, [*parts, *names], n=1)
    advice = f"did you mean {near[0]}?" if near else f"its parts are {', '.join(parts[:12])}."
    return f"model.freeze names {prefix[:100]!r}, and the network has no parameter there; {advice}"
