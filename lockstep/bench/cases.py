"""What `step.py` trains: networks by the size of their gradients, and the sides that train them."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.bench import ddp
from lockstep.comm.world import World
from lockstep.config import CommConfig, DataConfig, ModelConfig, OptimConfig, PrecisionConfig, RunConfig, TrainConfig
from lockstep.data.order import Cursor
from lockstep.data.pipeline import Batch
from lockstep.engine.apply import apply_plan
from lockstep.engine.build import HALF, Parts, assemble
from lockstep.engine.planning import Chosen, choose_plan
from lockstep.models import RESNET_DEPTHS, build_model
from lockstep.models.initialize import initialize
from lockstep.optim.schedule import Schedule
from lockstep.plan.choose import explain_choice
from lockstep.plan.plan import describe_reduction
from lockstep.report.phrases import describe_trials

Precision = Literal["fp32", "fp16", "bf16"]
Step = Callable[[], None]
Opener = Callable[[], AbstractContextManager[Step]]
LR, MOMENTUM, WEIGHT_DECAY = 1e-3, 0.9, 1e-4
TUNE_S = 20.0  # that each side may spend on choosing how its gradients travel
# A stack of this many linear layers, twice as many tensors: communication with hardly anything to compute.
STACK_LAYERS = 31


Switch = Literal["auto", "on", "off"]


class Pins(NamedTuple):
    """What our side leaves no choice in."""

    cuda_graph: Switch = "auto"
    overlap: Switch = "auto"


AUTO = Pins()
# On a GPU, what a step had to choose between before a recording could overlap.
APART = {"lockstep, launched": Pins("off", "on"), "lockstep, sent after": Pins("on", "off")}


@dataclass(frozen=True)
class Case:
    """What is trained: a network by name or a stack of linear layers, of some width, on `batch` images on each rank."""

    name: str
    width: int
    image_size: int
    batch: int
    model: str = "resnet18"  # or "stack"
    num_classes: int = 10
    precision: Precision = "fp32"

    @property
    def settings(self) -> dict[str, int]:
        """The network's own, of those above."""
        return {"width": self.width} if self.model in RESNET_DEPTHS else {}


USUAL_CASES = (
    Case("quickstart's network, 0.7 M parameters", width=16, image_size=48, batch=64),
    Case("ResNet-18, 11.2 M parameters", width=64, image_size=64, batch=16),
)


def size_case(gradient_mb: float) -> Case:
    """A stack of linear layers with about this many megabytes of gradients."""
    width = max(1, round((gradient_mb * 1e6 / 4 / STACK_LAYERS) ** 0.5))
    name = f"{gradient_mb:g} MB of gradients in {2 * STACK_LAYERS} tensors"
    return Case(name, width=width, image_size=8, batch=2, model="stack")


def model_case(model: str, batch: int | None = None, image_size: int | None = None) -> Case:
    """A real network with all its gradients, unless told as little to compute as batch norm allows: one small image."""
    image_size = image_size or (128 if model == "alexnet" else 64)
    images = "one image" if batch in (None, 1) else f"{batch} images"
    return Case(f"{model}, {images} a rank", 64, image_size, batch or 1, model=model, num_classes=1000)


def gpu_case(model: str, batch: int, image_size: int, precision: Precision) -> Case:
    """A real network with as much to compute as a GPU likes."""
    name = f"{model} in {precision}, {batch} images of {image_size} pixels a rank"
    return Case(name, 64, image_size, batch, model=model, num_classes=1000, precision=precision)


def build_network(case: Case, device: torch.device) -> nn.Module:
    """The network with its starting weights, the same on every rank."""
    if case.model == "stack":
        torch.manual_seed(0)
        return _build_stack(case).to(device)
    model = build_model(case.model, case.num_classes, image_size=case.image_size, **case.settings)
    initialize(model, 0)
    return model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def count_gradient_bytes(case: Case) -> int:
    """Bytes of the network's gradients; nothing is allocated."""
    with torch.device("meta"):
        if case.model == "stack":
            model = _build_stack(case)
        else:
            model = build_model(case.model, case.num_classes, image_size=case.image_size, **case.settings)
    return sum(parameter.nbytes for parameter in model.parameters())


def fake_batch(case: Case, world: World) -> Batch:
    """Noise with labels, another on every rank, in the precision the input gives: autocast would cast in every step."""
    generator = torch.Generator().manual_seed(world.rank)
    images = torch.randn(case.batch, 3, case.image_size, case.image_size, generator=generator)
    return Batch(
        images=images.to(world.device, HALF.get(case.precision), memory_format=torch.channels_last),
        labels=torch.randint(0, case.num_classes, (case.batch,), generator=generator).to(world.device),
        global_size=case.batch * world.size,
        epoch=0,
        samples=np.arange(case.batch),
        cursor=Cursor(0, 0),
    )


@contextmanager
def open_bare(case: Case, world: World, batch: Batch) -> Iterator[Step]:
    """The loop everyone writes for one rank."""
    yield _torch_step(build_network(case, world.device), batch, case.precision)


@contextmanager
def open_ddp(case: Case, world: World, batch: Batch, setting: ddp.Setting, *, compiled: bool = False) -> Iterator[Step]:
    """The same loop around DistributedDataParallel, which may be compiled."""
    wrapped = ddp.wrap(build_network(case, world.device), setting)
    model: nn.Module = ddp.compile_wrapped(wrapped, setting) if compiled else wrapped
    if compiled or world.device.type == "cuda":
        # Compilers and memory fail here, where no other rank waits for a message.
        with wrapped.no_sync():
            compute_loss(model, batch, case.precision).backward()
    yield _torch_step(model, batch, case.precision)


def build_config(case: Case, global_size: int, pins: Pins = AUTO) -> RunConfig:
    """The case as a run would be asked for it; a stack of layers has no name there."""
    return RunConfig(
        data=DataConfig(image_size=case.image_size, eval_resize=max(256, case.image_size)),
        model=ModelConfig()
        if case.model == "stack"
        else ModelConfig.model_validate({"name": case.model, **case.settings}),
        optim=OptimConfig(name="sgd", lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        precision=PrecisionConfig(compute=case.precision),
        comm=CommConfig(tune_s=TUNE_S, overlap=pins.overlap),
        train=TrainConfig(
            global_batch=global_size,
            duration="1ep",  # type: ignore[arg-type]
            max_batch_per_rank=max(256, case.batch),  # a step is one pass, as it is for the others
            cuda_graph=pins.cuda_graph,
        ),
    )


class Lockstep:
    """Our side, as a run would be: tuned when it is first opened, under that plan from then on."""

    def __init__(self, case: Case, world: World, batch: Batch, pins: Pins = AUTO) -> None:
        self._case = case
        self._pins = pins
        self._world = world
        self._batch = batch
        self._chosen: Chosen | None = None

    @property
    def setting(self) -> str:
        if self._world.size == 1 or not self._chosen:
            return "one rank"
        plan = self._chosen.plan
        return f"{plan.execution}; {describe_reduction(plan.reduction)}"

    @property
    def trials(self) -> list[str]:
        """What its plan was chosen from, a line each."""
        trials = self._chosen.profile.trials if self._chosen else ()
        return describe_trials(explain_choice(trials), self._case.batch)

    @contextmanager
    def open(self) -> Iterator[Step]:
        world, batch = self._world, self._batch
        config = build_config(self._case, batch.global_size, self._pins)
        network = build_network(self._case, world.device)
        parts = assemble(config, world, network, Schedule("constant", LR, total_steps=1))
        try:
            chosen = self._chosen or choose_plan(config, parts, world)
            self._chosen = replace(chosen, recording=None)  # a recording is of these parts, and the next have their own
            plan, count, recording = chosen.plan, len(batch.labels), chosen.recording
            step = apply_plan(plan.execution, plan.reduction, parts, count, batch.global_size, recording=recording)
            yield lambda: _run(step(batch, LR, False), parts)
        finally:
            parts.reducer.close()
            if parts.hybrid is not None:
                parts.hybrid.close()


def _run(_: object, __: Parts) -> None:
    """A step's result is of no interest here; whoever looks for the weights finds them in the parts."""


def _build_stack(case: Case) -> nn.Module:
    sizes = [3 * case.image_size**2, *[case.width] * (STACK_LAYERS - 1), case.num_classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return Stack(*layers[:-1])


class Stack(nn.Sequential):
    """Layers whose `forward` is not PyTorch's own: under DDP the compiler passes over code of PyTorch."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self:
            values = layer(values)
        return values


def _torch_step(model: nn.Module, batch: Batch, precision: Precision) -> Step:
    """A step with PyTorch's quickest SGD, and a loss scaler where the precision is FP16."""
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
        lr=LR,
        momentum=MOMENTUM,
        fused=True,
    )
    scaler = torch.amp.GradScaler(batch.images.device.type, enabled=precision == "fp16")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _usual_sums() if precision in HALF else nullcontext():
            scaler.scale(compute_loss(model, batch, precision)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def compute_loss(model: nn.Module, batch: Batch, precision: Precision) -> torch.Tensor:
    """The mean loss, under autocast where the precision is half."""
    half = HALF.get(precision)
    with torch.autocast(batch.images.device.type, half) if half else nullcontext():
        return nn.functional.cross_entropy(model(batch.images), batch.labels)


@contextmanager
def _usual_sums() -> Iterator[None]:
    """Matrix products may add in half precision, as PyTorch lets them by default and Lockstep does not."""
    switches = torch.backends.cuda.matmul
    before = switches.allow_fp16_reduced_precision_reduction, switches.allow_bf16_reduced_precision_reduction
    switches.allow_fp16_reduced_precision_reduction = switches.allow_bf16_reduced_precision_reduction = True
    try:
        yield
    finally:
        switches.allow_fp16_reduced_precision_reduction, switches.allow_bf16_reduced_precision_reduction = before
