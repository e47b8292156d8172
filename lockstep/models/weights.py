"""Weights from elsewhere -> a network's own names (before step 0 on the walk).

Files are safetensors or PyTorch's `.pth`, of which only tensors are read; libraries give theirs by name. Whatever the
source, every array must be finite and of the shape that the network has, but for the classifier: with another number of
classes it stays as it was drawn.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.files import read_small
from lockstep.models.outside import require
from lockstep.named import phrase_error

MAX_BYTES = 1 << 36  # no forged file shall take all the memory
TORCH_FILES = (".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model", "module")  # under which others keep a network among other things
PREFIXES = ("module.", "_orig_mod.")  # of what DistributedDataParallel and torch.compile have wrapped
NOT_NEEDED = "num_batches_tracked"  # which older files lack, and nothing is computed from
FORBIDDEN = re.compile(r"(?i)unsupported (?:global|class)[: ]+(?:global )?([\w.]+)")  # in what torch.load says
MOST_NAMED = 3
LONGEST = 100


@dataclass(frozen=True)
class Fit:
    """Arrays by the network's names, and what there is to say about them."""

    arrays: dict[str, Tensor]
    notes: list[str]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; nothing in it is run."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".safetensors":
            return load(read_small(path, MAX_BYTES))
        if suffix in TORCH_FILES:
            return _read_torch(path)
    except OSError as error:
        raise LockstepError(f"The weights {path} cannot be read ({error.strerror}); check model.weights.") from error
    except (SafetensorError, ValueError, RuntimeError, RecursionError, MemoryError) as error:
        raise LockstepError(f"The weights {path} are damaged ({phrase_error(error)}); get the file anew.") from error
    raise LockstepError(f"The weights {path} are neither .safetensors nor .pth; save the state_dict as one of them.")


def _read_torch(path: Path) -> dict[str, Tensor]:
    read_small(path, 0) if not path.is_file() else None  # a pipe or a device would hold up whoever opens it
    if path.stat().st_size > MAX_BYTES:
        raise LockstepError(f"The weights {path} are larger than any network; check model.weights.")
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickles and archives that are broken, or hold more than tensors
        if forbidden := FORBIDDEN.search(str(error)):
            raise LockstepError(
                f"The weights {path} hold a whole pickled module, or another object ({forbidden[1][:LONGEST]}), which "
                "is not unpickled; save model.state_dict()."
            ) from error
        raise LockstepError(
            f"The weights {path} are damaged or no weights file (neither safetensors nor a state_dict); get the file "
            "anew, or save model.state_dict()."
        ) from error
    for wrapper in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
            break
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)} if _is_table(found) else {}
    if not tensors:
        raise LockstepError(f"The weights {path} hold no tensors by name; save the network's state_dict.")
    return tensors


def _is_table(found: Any) -> bool:
    return isinstance(found, Mapping) and all(isinstance(name, str) for name in found)


def fetch_weights(name: str) -> dict[str, Tensor]:
    """The published weights that a library has for `torchvision:NAME` or `timm:NAME`, which it downloads and keeps."""
    library, _, own = name.partition(":")
    module = require(library, f"model.weights = {name}")
    try:
        if library == "timm":
            return dict(module.create_model(own, pretrained=True).state_dict())
        chosen = module.models.get_weight(own) if "." in own else module.models.get_model_weights(own).DEFAULT
        return dict(chosen.get_state_dict(progress=False, check_hash=True))
    except (Exception, SystemExit) as error:
        raise LockstepError(
            f"{library} has no weights to give for model.weights = {name} ({phrase_error(error)}); check the "
            "name and the network, or give a file."
        ) from error


def fit_weights(source: str, found: Mapping[str, Tensor], model: nn.Module, num_classes: int) -> Fit:
    """Match arrays to a network; those of a classifier for other classes are left out, and said."""
    found = _strip(found)
    wanted = list_kept(model)
    aliases = _list_aliases(model)
    found = {aliases.get(name, name): values for name, values in found.items()}
    arrays: dict[str, Tensor] = {}
    missing: list[str] = []
    misfits: list[str] = []
    fresh: dict[str, int] = {}  # parts of the classifier, and how many classes the arrays are for
    for name, own in wanted.items():
        part = name.rpartition(".")[0]
        values = found.get(name)
        if values is None:
            if name.rpartition(".")[2] != NOT_NEEDED:
                missing.append(name)
        elif values.shape == own.shape:
            arrays[name] = values
        elif own.dim() and own.shape[0] == num_classes and values.dim() and values.shape[1:] == own.shape[1:]:
            fresh[part] = values.shape[0]
        else:
            misfits.append(f"{name} is {_shape(values)} there and {_shape(own)} here")
    head = _find_head(model, num_classes)
    if missing and all(name.rpartition(".")[0] == head for name in missing):
        fresh, missing = fresh | {head: 0}, []
    if misfits:
        raise LockstepError(
            f"{source} does not fit the network: {_first(misfits)}; use the model they were saved from."
        )
    if missing:
        raise LockstepError(
            f"{source} lacks {_first(missing)}, which the network has; use the model they were saved from."
        )
    arrays = {name: values for name, values in arrays.items() if name.rpartition(".")[0] not in fresh}
    _check_values(source, arrays)
    notes = [
        f"{source}: the classifier {part} is fresh, for {num_classes} classes"
        + (f", as the weights are for {count}." if count else ", as the weights have none.")
        for part, count in fresh.items()
    ]
    if extra := sorted(found.keys() - wanted.keys()):
        notes.append(f"{source} also holds {_first(extra)}, for which the network has no place; left out.")
    return Fit(arrays, notes)


def _strip(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): values for name, values in found.items()}
    return dict(found)


def list_kept(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that are kept, by name; one that several modules share has its first name alone."""
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {**dict(model.named_parameters()), **buffers}


def _list_aliases(model: nn.Module) -> dict[str, str]:
    """Other names of parameters that several modules share -> the first one, which is ours."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in everywhere if first[id(parameter)] != name}


def _find_head(model: nn.Module, num_classes: int) -> str:
    """The last module with an output for each class; empty if there is none."""
    heads = [name for name, module in model.named_modules() if getattr(module, "out_features", None) == num_classes]
    return heads[-1] if heads else ""


def _check_values(source: str, arrays: Mapping[str, Tensor]) -> None:
    for name, values in arrays.items():
        if values.is_complex() or values.is_sparse or values.is_quantized:
            raise LockstepError(f"{source} holds {name} as {values.dtype}, and plain real numbers are wanted.")
        if values.is_floating_point() and not values.isfinite().all():
            raise LockstepError(f"{source} holds numbers that are not finite, in {name}; get other weights.")


def _shape(values: Tensor) -> str:
    return " × ".join(map(str, values.shape)) or "one number"


def _first(names: list[str]) -> str:
    shown = ", ".join(name[:LONGEST] for name in names[:MOST_NAMED])
    return f"{shown} and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else shown
