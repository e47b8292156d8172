"""A trained network for other programs: safetensors, ONNX, torch.export; each checked against the network itself.

Exports compute in FP32, take normalised images (N × 3 × H × W) and give logits. Nothing is written before it has been
read back, by the program it is for where that is installed, and has given the network's own logits: a file that exists
is right.
"""

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.export import Dim

from lockstep import __version__
from lockstep.config import RunConfig, to_toml
from lockstep.engine.inference import TrainedNetwork
from lockstep.errors import LockstepError
from lockstep.files import write_whole
from lockstep.models import set_fused

Format = Literal["safetensors", "onnx", "torch-export"]
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}
NEEDED = ("onnx", "onnxscript", "onnxruntime")
INSTALL = "pip install onnx onnxscript onnxruntime"
# How far logits may lie apart, as a share of the largest (or of 1, if that is less): FP32 sums in another order.
TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 3)  # of a dynamic batch; two sizes, so that one that was fixed by mistake is found
MAX_ONNX_BYTES = (1 << 31) - 1  # of one file: its format has no more
EXTRA = "lockstep.json"  # the name of our facts in a torch.export file


@dataclass(frozen=True)
class Exported:
    """What was written."""

    file: Path
    kind: Format
    num_bytes: int
    difference: float  # the largest between its logits and the network's, as a share of the largest logit


def parse_formats(names: str) -> list[Format]:
    """The formats of a list with commas; one that is unknown, or lacks a package, is a sentence."""
    wanted: list[Format] = []
    for name in names.split(","):
        kind = next((known for known in SUFFIXES if known == name.strip()), None)
        if kind is None:
            raise LockstepError(f"There is no format {name.strip()[:40]!r}; choose among {', '.join(SUFFIXES)}.")
        check_needs(kind)
        if kind not in wanted:
            wanted.append(kind)
    return wanted


def check_needs(kind: Format) -> None:
    """Say what has to be installed for a format, before anything is loaded."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None] if kind == "onnx" else []
    if missing:
        raise LockstepError(
            f"ONNX needs {', '.join(missing)}, to write a file and to check it; install with: {INSTALL}"
        )


def export(trained: TrainedNetwork, kind: Format, file: Path, batch: int | None = None) -> Exported:
    """Write the network in a format, for `batch` images at a time or for any number of them.

    `trained` is loaded with `compute="fp32"` on the CPU.
    """
    check_needs(kind)
    assert trained.device.type == "cpu"
    assert trained.dtype == torch.float32
    network = _plain(trained)
    encode: Callable[..., tuple[bytes, float]] = {
        "safetensors": _encode_safetensors,
        "onnx": _encode_onnx,
        "torch-export": _encode_program,
    }[kind]
    try:
        data, difference = encode(network, describe(trained), trained.config.data.image_size, batch)
    except LockstepError:
        raise
    except Exception as error:  # a network of one's own may hold what a format has no word for: they raise anything
        advice = "choose another format" if batch else "give a batch of a fixed size (batch), or choose another format"
        raise LockstepError(f"The network cannot be written as {kind} ({_find_reason(error)}); {advice}.") from error
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, data)
    except OSError as error:
        raise LockstepError(
            f"{file} cannot be written ({error.strerror}); choose another file to write to (out)."
        ) from None
    return Exported(file, kind, len(data), difference)


def _find_reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of it: exporters wrap it in advice on themselves."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def describe(trained: TrainedNetwork) -> dict[str, str]:
    """What a user of the weights has to know, as formats hold it: words, and JSON where they are lists."""
    data = trained.config.data
    return {
        "classes": json.dumps(trained.classes),
        "mean": json.dumps(data.mean),
        "std": json.dumps(data.std),
        "image_size": str(data.image_size),
        "eval_resize": str(data.eval_resize),
        "model": trained.config.model.name,
        "step": str(trained.step),
        "weights": "averaged" if trained.is_average else "of the last step",
        "lockstep": __version__,
        "recipe": to_toml(hide_places(trained.config)),
    }


def hide_places(config: RunConfig) -> RunConfig:
    """The configuration without where things lay: of no use elsewhere, and nobody's business."""
    data = config.data.model_copy(update={"path": Path(config.data.path).name})
    weights = config.model.weights
    model = config.model.model_copy(update={"weights": Path(weights).name if Path(weights).is_absolute() else weights})
    comm = config.comm.model_copy(update={"cluster": ""})
    return config.model_copy(update={"data": data, "model": model, "comm": comm})


def _plain(trained: TrainedNetwork) -> nn.Module:
    """The network with arrays of its own in the usual order: an export must not hold the flat array behind views."""
    network = trained.network.eval()
    set_fused(network, False)
    for parameter in network.parameters():
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
        parameter.requires_grad_(False)
    return network


def _encode_safetensors(
    network: nn.Module, facts: dict[str, str], image_size: int, batch: int | None
) -> tuple[bytes, float]:
    # Each by itself: the format has no word for an array that two modules share.
    arrays = {name: array.clone(memory_format=torch.contiguous_format) for name, array in network.state_dict().items()}
    data = save(arrays, metadata=facts)
    back = load(data)
    if back.keys() != arrays.keys() or any(not torch.equal(back[name], arrays[name]) for name in arrays):
        raise LockstepError("The safetensors file does not hold the network's arrays; nothing was written.")
    return data, 0.0


def _encode_program(
    network: nn.Module, facts: dict[str, str], image_size: int, batch: int | None
) -> tuple[bytes, float]:
    with _quiet(), torch.no_grad():
        program = torch.export.export(
            network, (_draw(batch or 2, image_size),), dynamic_shapes=_shapes(batch), strict=False
        )
        written = io.BytesIO()
        torch.export.save(program, written, extra_files={EXTRA: json.dumps(facts)})
        back = torch.export.load(io.BytesIO(written.getvalue())).module()
    return written.getvalue(), _compare(network, back, image_size, batch, "torch.export")


def _encode_onnx(network: nn.Module, facts: dict[str, str], image_size: int, batch: int | None) -> tuple[bytes, float]:
    import onnx
    import onnxruntime

    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            network,
            (_draw(batch or 2, image_size),),
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=_shapes(batch),
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    for name, value in facts.items():
        proto.metadata_props.append(onnx.StringStringEntryProto(key=name, value=value))
    if proto.ByteSize() > MAX_ONNX_BYTES:
        raise LockstepError(f"The network takes {proto.ByteSize():,} bytes and one ONNX file holds {MAX_ONNX_BYTES:,}.")
    data: bytes = proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

    return data, _compare(network, run, image_size, batch, "onnxruntime")


def _shapes(batch: int | None) -> tuple[dict[int, Any]] | None:
    return ({0: Dim("batch", min=1)},) if batch is None else None


def _draw(batch: int, image_size: int, seed: int = 0) -> Tensor:
    """Images of noise, the same every time."""
    return torch.randn(batch, 3, image_size, image_size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _compare(network: nn.Module, back: Callable[[Tensor], Any], image_size: int, batch: int | None, who: str) -> float:
    """The largest difference of logits as a share of the largest; a sentence where that is more than TOLERANCE."""
    worst = 0.0
    for number in CHECKED_BATCHES if batch is None else (batch,):
        images = _draw(number, image_size, seed=number)
        expected, found = network(images), back(images)
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            raise LockstepError(f"{who} gives no logits of {number} images; nothing was written.")
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        if not difference <= TOLERANCE:  # NaN is no agreement
            raise LockstepError(
                f"{who} gives other logits than the network: by {difference:.2g} of the largest, where {TOLERANCE:g} "
                "is allowed; nothing was written."
            )
        worst = max(worst, difference)
    return worst


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While inside, exporters say nothing: their warnings are about their own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
