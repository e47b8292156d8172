"""A trained network for use: loaded from its run, asked about images (what comes after step 10 on the walk).

    trained = load_run("runs/quickstart-20261116-120000")
    for prediction in predict(trained, ["a.jpeg", "b.png"]):
        print(prediction.name, prediction.guesses[0].name, prediction.guesses[0].probability)

Images pass through evaluation's own pipeline, with the run's own sizes, mean and std, so that a network is used as it
was measured.
"""

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.comm.world import World, count_cores
from lockstep.config import RunConfig
from lockstep.data.given import GivenImage, GivenImages, list_given, open_folders
from lockstep.engine.brought import NOTHING, Brought
from lockstep.engine.build import HALF, build_eval_pipeline, build_layout, build_network, set_number_formats
from lockstep.engine.checkpoint import (
    NAME,
    Checkpoint,
    DamagedCheckpoint,
    list_checkpoints,
    load_checkpoint,
    read_checkpoint,
)
from lockstep.engine.counters import CLASSES, are_names
from lockstep.engine.evaluate import answer
from lockstep.engine.number_format import find_format
from lockstep.engine.state_files import AVERAGE, MODEL
from lockstep.errors import LockstepError
from lockstep.events import RunStarted, read_events
from lockstep.files import read_small
from lockstep.models import set_fused
from lockstep.models.mixed import compute_in
from lockstep.models.weights import list_kept
from lockstep.optim.groups import find_half
from lockstep.optim.storage import build_weights, hold_constants
from lockstep.plan.folder import MAX_BYTES, PLAN_FILE
from lockstep.recipe_values import show
from lockstep.recipes.read import load_recipe

Compute = Literal["fp32", "tf32", "fp16", "bf16"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainedNetwork:
    """A run's network as it was at one checkpoint, ready to be asked."""

    network: nn.Module  # in evaluation mode, on `device`
    classes: tuple[str, ...]  # by the place of their logit
    config: RunConfig  # the run's own
    compute: Compute  # the number format it computes in here
    run: Path  # the run's folder
    checkpoint: Path
    step: int
    device: torch.device
    is_average: bool = False  # whether its weights are the average of the run's
    brought: Brought = field(default=NOTHING, repr=False)  # what the program gave, to load it once more

    def __repr__(self) -> str:
        average = ", averaged weights" if self.is_average else ""
        what = f"{self.config.model.name}, step {self.step:,}{average}, {len(self.classes):,} classes, on {self.device}"
        return f"TrainedNetwork({str(self.run)!r}, {what})"

    @property
    def dtype(self) -> torch.dtype:
        """Of images and activations."""
        return HALF.get(self.compute, torch.float32)

    def configure(self, **data: Any) -> RunConfig:
        """The run's configuration in this number format, with other settings of `data`."""
        return _with_compute(self.config, self.compute).model_copy(
            update={"data": self.config.data.model_copy(update=data)}
        )


@dataclass(frozen=True)
class Guess:
    """A class, and how sure the network is of it."""

    label: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a network says of one image: its best guesses, or why there are none."""

    name: str  # the file, as it was given
    guesses: tuple[Guess, ...]  # the surest first
    failure: str = ""  # why the image could not be read


def load_run(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    compute: Compute | None = None,
    average: bool | None = None,
    warn: Callable[[str], None] = lambda text: None,
    brought: Brought = NOTHING,
) -> TrainedNetwork:
    """The network of a run's folder, from its newest good checkpoint, or of one checkpoint's folder.

    If not given, `device` is a GPU where there is one, and `compute` the number format of the run; but FP16 on a CPU,
    which is slow there, becomes FP32. `average`: the averaged weights or those of the last step; if not given, the
    averaged ones where there are some (`optim.average`). `warn` hears of damaged checkpoints. `brought` is what a
    program gave to the run.
    """
    run, only = find_run(Path(path).expanduser())
    _, config = load_recipe(str(run / "config.toml"))
    device = choose_device(device)
    compute = compute or choose_compute(config, device)
    computed = _with_compute(config, compute)
    checkpoint = _read_weights(run, only, (MODEL,) if average is False else (AVERAGE, MODEL), warn)
    ((kind, arrays),) = checkpoint.files.items()
    if average and kind != AVERAGE:
        raise LockstepError(
            f"{checkpoint.path} holds no averaged weights: optim.average was not set; do not ask for them (average)."
        )
    classes = read_classes(run, checkpoint.state)
    network = _build(computed, len(classes), arrays, checkpoint.path, brought)
    set_number_formats(computed.precision)
    # Over flat arrays as in training: the same memory formats, so the same sums.
    layout, dtype = build_layout(computed, network), HALF.get(compute, torch.float32)
    build_weights(network, layout, device, dtype)
    hold_constants(network, layout, find_half(network), dtype)
    compute_in(network, dtype, device.type)
    set_fused(network, _had_own_kernels(run))
    return TrainedNetwork(
        network=network.eval(),
        classes=classes,
        config=config,
        compute=compute,
        run=run,
        checkpoint=checkpoint.path,
        step=int(checkpoint.path.name.rpartition("-")[2]),
        device=device,
        is_average=kind == AVERAGE,
        brought=brought,
    )


def _had_own_kernels(run: Path) -> bool:
    """Whether the run computed with the fused kernels, which take the last mean in another order, at evaluation too."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        table = tomllib.loads(read_small(run / PLAN_FILE, MAX_BYTES).decode())
        return bool(table["execution"]["kernels"] == "own")
    return False


def find_run(path: Path) -> tuple[Path, Path | None]:
    """The run's folder, absolute, and the checkpoint's where that was named."""
    path = Path(os.path.abspath(path))
    if (path / "config.toml").is_file():
        return path, None
    if NAME.fullmatch(path.name) and path.is_dir():
        if not (path.parents[1] / "config.toml").is_file():
            raise LockstepError(
                f"The checkpoint {path} lies in no run's folder: the config.toml two folders above it is missing; copy "
                "the whole run."
            )
        return path.parents[1], path
    if not os.path.lexists(path):
        raise LockstepError(f"{path} does not exist; name a run's folder, such as runs/quickstart-….")
    raise LockstepError(f"{path} is not a run's folder: it holds no config.toml; name one such as runs/quickstart-….")


def choose_device(asked: str | torch.device | None) -> torch.device:
    """The device asked for, or a GPU if there is one."""
    if asked is None:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise LockstepError(f"There is no device {str(asked)[:40]!r}; use cpu, cuda or such as cuda:1.") from None
    if device.type not in ("cpu", "cuda"):
        raise LockstepError(f"Networks run on cpu and cuda, not on {device.type}; choose one of the two.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LockstepError(f"{device} is not there: this machine has {torch.cuda.device_count()} GPUs; use cpu.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def choose_compute(config: RunConfig, device: torch.device, *, keeps: bool = False) -> Compute:
    """The run's number format, but FP16 on a CPU is FP32 unless the run's own counts are to be repeated (`keeps`)."""
    asked = config.precision.compute
    compute: Compute = find_format(device) if asked == "auto" else asked  # which no run leaves behind
    return "fp32" if compute == "fp16" and device.type == "cpu" and not keeps else compute


def _with_compute(config: RunConfig, compute: Compute) -> RunConfig:
    precision = config.precision.model_copy(update={"compute": compute})
    return config.model_copy(update={"precision": precision})


def _read_weights(run: Path, only: Path | None, wanted: Sequence[str], warn: Callable[[str], None]) -> Checkpoint:
    """The newest good checkpoint of a run, or the one named; of its files the network alone, the first of `wanted`."""
    if only:
        try:
            checkpoint = read_checkpoint(only, wanted)
            _check_usable(checkpoint)
            return checkpoint
        except DamagedCheckpoint as damage:
            raise LockstepError(
                f"The checkpoint {only} is damaged ({damage}); name another, or the run's folder."
            ) from None
    folder = run / "checkpoints"
    if not list_checkpoints(folder):
        raise LockstepError(f"{run} has no checkpoint yet, so there is no network to use; train it further first.")
    return load_checkpoint(folder, warn, _check_usable, only=wanted)


def _check_usable(checkpoint: Checkpoint) -> None:
    if not checkpoint.files or not isinstance(checkpoint.state, dict):
        raise DamagedCheckpoint("it holds no network")
    if not are_names(checkpoint.state.get(CLASSES, [])):
        raise DamagedCheckpoint(f"its manifest says nothing possible of {CLASSES}")


def read_classes(run: Path, state: Mapping[str, Any]) -> tuple[str, ...]:
    """The names beside the weights; of a run that left none there, those in its records, or numbers."""
    if names := state.get(CLASSES):
        return tuple(names)
    start = next((event for event in read_events(run) if isinstance(event, RunStarted)), None)
    if start is None or not 1 <= start.num_classes <= 1 << 24:
        raise LockstepError(f"{run} says nowhere which classes its network knows; go on with it for a checkpoint.")
    if len(start.class_names) == start.num_classes and are_names(start.class_names):
        return tuple(start.class_names)
    return tuple(f"class {place}" for place in range(start.num_classes))


def _build(
    config: RunConfig, num_classes: int, arrays: Mapping[str, Tensor], where: Path, brought: Brought
) -> nn.Module:
    """The network with these arrays in it; anything that does not fit is a sentence."""
    misfit = f"The checkpoint {where} does not fit the run's config.toml"
    # Before anything of that size is built, as the number may be forged.
    if not any(num_classes in array.shape for array in arrays.values()):
        raise LockstepError(f"{misfit}: its network does not tell {num_classes:,} classes apart.")
    try:
        network = build_network(config, num_classes, brought)
    except (RuntimeError, MemoryError) as error:
        raise LockstepError(f"The network of {where} cannot be built ({str(error).splitlines()[0][:200]}).") from error
    expected = list_kept(network)  # as a checkpoint has it: what modules share has one name
    for name in expected.keys() | arrays.keys():
        if name not in arrays or name not in expected or arrays[name].shape != expected[name].shape:
            raise LockstepError(f"{misfit}: {name[:200]} is missing, unknown or of another shape.")
    with torch.no_grad():
        for name, values in expected.items():
            values.copy_(arrays[name])
    return network


def world_of(device: torch.device) -> World:
    """This process alone, on a device."""
    return World(0, 1, 0, 1, device, count_cores())


@torch.no_grad()
def predict(
    trained: TrainedNetwork,
    images: GivenImage | Iterable[GivenImage],
    *,
    top: int = 5,
    progress: Progress | None = None,
) -> list[Prediction]:
    """The `top` classes of each image, in the order given: files, folders, encoded images, PIL's; one alone will do.

    An image that cannot be read has no guesses and says why. `progress` hears (done, total).
    """
    given = open_folders(list_given(images))
    if not given:
        return []
    source = GivenImages(given)
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise LockstepError(f"top = {show(top)} is not possible; give a whole number from 1 on.")
    top = min(top, len(trained.classes))
    guesses: dict[int, tuple[Guess, ...]] = {}
    # As evaluation does it, but for damaged images, which are the caller's to judge.
    config = trained.configure(bad_share=1.0, resident="off")
    is_gpu = trained.device.type == "cuda"
    with (
        torch.cuda.device(trained.device) if is_gpu else contextlib.nullcontext(),
        build_eval_pipeline(config, world_of(trained.device), source) as batches,
    ):
        for batch in batches:
            if len(batch.samples):
                logits = answer(trained.network, batch.images.to(trained.dtype), config.data.eval_flip)
                chances = logits.float().softmax(dim=1)
                values, labels = (part.tolist() for part in chances.topk(top, dim=1))
                for sample, of_image, places in zip(batch.samples.tolist(), values, labels, strict=True):
                    pairs = zip(places, of_image, strict=True)
                    guesses[sample] = tuple(Guess(label, trained.classes[label], value) for label, value in pairs)
            if progress:
                progress(batch.cursor.position, len(given))
        reasons = dict(batches.bad)
    names = [source.name(place) for place in range(len(given))]
    return [
        Prediction(name, guesses.get(place, ()), _strip(reasons.get(place, ""), name))
        for place, name in enumerate(names)
    ]


def _strip(reason: str, name: str) -> str:
    """The reason alone, of "name (reason)"."""
    return reason.removeprefix(f"{name} (").removesuffix(")")
