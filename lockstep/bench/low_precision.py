"""HALP beside SVRG and low-precision SGD where the optimum is known: softmax regression on real images.

Every curve is the norm of the full gradient, in FP64 by its formula, after so many passes over the data. Three sides
are Lockstep's own steps in FP32, with their passes for anchors. The others are the paper's algorithms in FP64 (De Sa et
al. 2018), so that nothing but the bits of the weights or offsets limits them: LP-SGD and LP-SVRG keep the weights
themselves on a grid of fixed width, HALP the offsets on one that shrinks. The fixed grid just holds the optimum, which
nobody knows beforehand, and its runs have the best of a few learning rates. SGD in FP64 has the best of the same, so
that what its gradients' noise leaves is not taken for the grid's.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from lockstep.bench.low_precision_report import build_table, write_chart
from lockstep.bench.results import check_files, write_rows
from lockstep.comm.world import World, join_world
from lockstep.config import DataConfig, RunConfig
from lockstep.data.order import Cursor, permute, plan_step
from lockstep.data.pipeline import Batch
from lockstep.engine.anchor_pass import Anchors
from lockstep.engine.apply import build_launched
from lockstep.engine.build import Parts, assemble, build_eval_pipeline, build_network, open_sources
from lockstep.errors import LockstepError
from lockstep.optim.rounding import count_levels, draw_uniform, round_sum, split_seed
from lockstep.optim.schedule import Schedule
from lockstep.optim.storage import named_arrays

SEED = 0
RATES = (1.0, 0.1, 0.01)  # of the given learning rate, that SGD and the runs on fixed grids may choose from
GRID_ROOM = 1.25  # a fixed grid reaches beyond the optimum's largest weight by this factor
OPTIMUM_NORM = 1e-13  # of the gradient where the optimum counts as found
MOST_NEWTON_STEPS = 100


@dataclass(frozen=True)
class Problem:
    """Softmax regression: mean cross-entropy over all samples plus weight_decay/2 · ‖w‖², bias included."""

    images: Tensor  # FP32, of mean 0 over all, and of mean squared norm 1
    labels: Tensor
    num_classes: int
    weight_decay: float
    batch: int

    @cached_property
    def features(self) -> Tensor:
        """The pixels in FP64, and a one for the bias."""
        flat = self.images.flatten(1).double()
        return torch.cat([flat, torch.ones(len(flat), 1, dtype=torch.float64)], dim=1)

    @cached_property
    def targets(self) -> Tensor:
        return functional.one_hot(self.labels, self.num_classes).double()

    def start(self) -> Tensor:
        """Weights of zero, a column for each class; the bias is the last row."""
        return torch.zeros(self.features.shape[1], self.num_classes, dtype=torch.float64)

    def loss(self, weights: Tensor) -> float:
        mean = functional.cross_entropy(self.features @ weights, self.labels).item()
        return mean + self.weight_decay / 2 * weights.square().sum().item()

    def gradient(self, weights: Tensor, samples: Tensor | None = None) -> Tensor:
        """∇f over some samples, or all."""
        x, y = self.features, self.targets
        if samples is not None:
            x, y = x[samples], y[samples]
        return x.T @ ((x @ weights).softmax(dim=1) - y) / len(x) + self.weight_decay * weights

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """An epoch's batches, in the order of every run."""
        cursor = Cursor(epoch, 0)
        while cursor.epoch == epoch:
            plan = plan_step(cursor, len(self.labels), self.batch, 0, 1, SEED)
            rows = torch.from_numpy(plan.samples)
            yield Batch(self.images[rows], self.labels[rows], plan.global_size, epoch, plan.samples, plan.next)
            cursor = plan.next

    def orders(self, epoch: int) -> Iterator[Tensor]:
        """The same as sample numbers."""
        cursor = Cursor(epoch, 0)
        while cursor.epoch == epoch:
            plan = plan_step(cursor, len(self.labels), self.batch, 0, 1, SEED)
            yield torch.from_numpy(plan.samples)
            cursor = plan.next


@dataclass
class Curve:
    """One run: the gradient's norm after so many passes over the data."""

    name: str
    arithmetic: str
    lr: float
    passes: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, passes: float, gradient: Tensor) -> None:
        self.passes.append(passes)
        self.norms.append(gradient.norm().item())


@dataclass(frozen=True)
class Case:
    """What is run."""

    data: Path
    image_size: int
    samples: int  # 0: all
    weight_decay: float
    batch: int
    lr: float
    anchors: int
    mu: float  # 0: the weight decay


def run_bench(case: Case, json_file: Path | None, html_file: Path | None, console: Console) -> list[dict[str, Any]]:
    """Run every side, print what became of it; a row for each."""
    check_files(json_file, html_file)
    with join_world(None) as world:
        problem = read_problem(case, world)
        torch.set_num_threads(1)  # a step's products are too small to be shared
        optimum = find_optimum(problem)
        title = (
            f"Softmax regression on {len(problem.labels):,} images of {case.image_size} × {case.image_size} from "
            f"{case.data.name}, {problem.start().numel():,} weights, weight decay {case.weight_decay:g}"
        )
        console.print(f"{title}.", highlight=False)
        console.print(
            f"Newton in FP64: loss {problem.loss(optimum):.10f}, gradient {problem.gradient(optimum).norm():.1e}, "
            f"largest weight {optimum.abs().max():.3f}; at the start {problem.gradient(problem.start()).norm():.3g}.",
            highlight=False,
        )
        curves = []
        for side in list_sides(problem, world, case, optimum):
            begun = time.perf_counter()
            curve = side()
            curve.seconds = time.perf_counter() - begun
            console.print(f"  {curve.name}, {curve.arithmetic}: {curve.norms[-1]:.2e}", highlight=False)
            curves.append(curve)
    rows = [asdict(curve) for curve in curves]
    console.print(build_table(rows))
    if json_file is not None:
        write_rows(json_file, rows)
    if html_file is not None:
        write_chart(html_file, rows, title)
    return rows


def read_problem(case: Case, world: World) -> Problem:
    """All training images of a folder, or some, scaled down and decoded once."""
    config = RunConfig(
        data=DataConfig(
            source="folder",
            path=str(case.data),
            image_size=case.image_size,
            eval_resize=case.image_size,
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
        ),
        optim={"lr": 1.0},  # type: ignore[arg-type]
        train={"global_batch": case.batch, "duration": "1ep"},  # type: ignore[arg-type]
    )
    source = open_sources(config.data).train
    with build_eval_pipeline(config, world, source) as pipeline:
        batches = list(pipeline)
    images, labels = torch.cat([each.images for each in batches]), torch.cat([each.labels for each in batches])
    if case.samples and case.samples < len(labels):
        kept = permute(np.arange(case.samples), len(labels), SEED, 0)
        images, labels = images[kept], labels[kept]
    if case.batch > len(labels):
        raise LockstepError(f"--batch {case.batch} is more than the {len(labels)} images of {case.data}; lower it.")
    images = (images - images.mean(dim=(0, 2, 3), keepdim=True)).contiguous()
    images /= images.double().square().sum(dim=(1, 2, 3)).mean().sqrt().float()
    return Problem(images, labels, len(source.classes), case.weight_decay, case.batch)


def find_optimum(problem: Problem) -> Tensor:
    """Where the gradient vanishes: Newton's method in FP64, steps by conjugate gradients, halved where need be.

    No line search by the loss: near the optimum its digits end long before those of the gradient.
    """
    weights, gradient = problem.start(), problem.gradient(problem.start())
    for _ in range(MOST_NEWTON_STEPS):
        norm = gradient.norm().item()
        if norm <= OPTIMUM_NORM:
            return weights
        move = solve_newton(problem, weights, gradient)
        for _ in range(30):
            found = problem.gradient(weights - move)
            if found.norm().item() < norm:
                break
            move = move / 2
        weights, gradient = weights - move, found
    raise LockstepError(f"Newton's method ended where the gradient is still {norm:.1e}; raise --weight-decay.")


def solve_newton(problem: Problem, weights: Tensor, gradient: Tensor) -> Tensor:
    """H⁻¹·∇f by conjugate gradients (Hestenes & Stiefel 1952), to a part in a thousand."""
    p = (problem.features @ weights).softmax(dim=1)

    def multiply(direction: Tensor) -> Tensor:
        moved = p * (problem.features @ direction)
        return problem.features.T @ (moved - p * moved.sum(dim=1, keepdim=True)) / len(p) + (
            problem.weight_decay * direction
        )

    solution, rest = torch.zeros_like(gradient), gradient.clone()
    direction, square = rest.clone(), rest.square().sum()
    least = 1e-6 * square
    while square > least:
        product = multiply(direction)
        length = square / (direction * product).sum()
        solution += length * direction
        rest -= length * product
        square, before = rest.square().sum(), square
        direction = rest + square / before * direction
    return solution


def list_sides(problem: Problem, world: World, case: Case, optimum: Tensor) -> Iterator[Callable[[], Curve]]:
    """Every run, in the order of the table."""
    lr, mu, anchors = case.lr, case.mu or case.weight_decay, case.anchors
    reach = GRID_ROOM * optimum.abs().max().item()

    def tuned(name: str, bits: int, has_anchor: bool) -> Callable[[], Curve]:
        grid = reach / count_levels(bits) if bits else 0.0

        def run() -> Curve:
            runs = [run_fixed(problem, name, lr * share, bits, grid, anchors, has_anchor) for share in RATES]
            return min(runs, key=lambda curve: curve.norms[-1])

        return run

    yield tuned("SGD", 0, False)
    for bits in (8, 16):
        yield tuned(f"LP-SGD, {bits} bits", bits, False)
    for bits in (8, 16):
        yield tuned(f"LP-SVRG, {bits} bits", bits, True)
    for bits in (0, 8, 16):
        yield lambda bits=bits: run_centred(problem, lr, bits, mu, anchors)  # type: ignore[misc]
    for bits in (0, 8, 16):
        yield lambda bits=bits: run_engine(problem, world, lr, bits, mu, anchors)  # type: ignore[misc]


def name_centred(bits: int) -> str:
    return f"HALP, {bits} bits" if bits else "SVRG"


def round_onto(z: Tensor, move: Tensor, grid: float, bits: int, step: int) -> Tensor:
    """Q(z + move) on a grid; z lies on it."""
    uniform = draw_uniform(split_seed(SEED), torch.tensor(step), torch.arange(z.numel())).view_as(z)
    return round_sum((z / grid).round(), move / grid, uniform, bits).double() * grid


def run_fixed(problem: Problem, name: str, lr: float, bits: int, grid: float, anchors: int, has_anchor: bool) -> Curve:
    """LP-SGD, or LP-SVRG with anchors (algorithms 1 and 2 of the paper): the weights are rounded; without bits SGD."""
    curve, w = Curve(name, "FP64", lr), problem.start()
    step, passes = 0, 0.0
    curve.add(passes, problem.gradient(w))
    for epoch in range(anchors if has_anchor else 3 * anchors):
        anchor, full = w, problem.gradient(w)
        for samples in problem.orders(epoch):
            v = problem.gradient(w, samples)
            if has_anchor:
                v += full - problem.gradient(anchor, samples)
            w = round_onto(w, -lr * v, grid, bits, step) if bits else w - lr * v
            step += 1
        passes += 3 if has_anchor else 1
        curve.add(passes, problem.gradient(w))
    return curve


def run_centred(problem: Problem, lr: float, bits: int, mu: float, anchors: int) -> Curve:
    """SVRG, or HALP with bits (algorithm 3 of the paper), in FP64 but for the offsets."""
    curve, anchor = Curve(name_centred(bits), "FP64", lr), problem.start()
    step = 0
    for epoch in range(anchors):
        full = problem.gradient(anchor)
        curve.add(3.0 * epoch, full)
        z = torch.zeros_like(anchor)
        scale = max(full.norm().item(), 1e-300) / (mu * count_levels(bits)) if bits else 0.0
        for samples in problem.orders(epoch):
            v = problem.gradient(anchor + z, samples) - problem.gradient(anchor, samples) + full
            z = round_onto(z, -lr * v, scale, bits, step) if bits else z - lr * v
            step += 1
        anchor = anchor + z
    curve.add(3.0 * anchors, problem.gradient(anchor))
    return curve


def run_engine(problem: Problem, world: World, lr: float, bits: int, mu: float, anchors: int) -> Curve:
    """The same by Lockstep's own steps, in FP32."""
    curve = Curve(name_centred(bits), "FP32, Lockstep", lr)
    parts = build_engine(problem, world, lr, bits, mu)
    take = build_launched(parts, problem.batch)
    in_epoch = sum(1 for _ in problem.orders(0))
    due = Anchors(parts, world, len(problem.labels), in_epoch, lambda summing: build_launched(summing, problem.batch))
    for epoch in range(anchors):
        curve.add(3.0 * epoch, problem.gradient(read_weights(parts)))
        due.take(problem.epoch(epoch), epoch * in_epoch, epoch, lambda: False)
        for batch in problem.epoch(epoch):
            take(batch, lr)
    curve.add(3.0 * anchors, problem.gradient(read_weights(parts)))
    return curve


def build_engine(problem: Problem, world: World, lr: float, bits: int, mu: float) -> Parts:
    """What a step of this problem works with."""
    rule: dict[str, Any] = {"name": "halp", "bits": bits, "mu": mu} if bits else {"name": "svrg"}
    size = problem.images.shape[-1]
    config = RunConfig.model_validate(
        {
            "data": {"image_size": size, "eval_resize": size},
            "model": {"name": "linear"},
            "optim": {**rule, "lr": lr, "weight_decay": problem.weight_decay, "decay_norm_and_bias": True},
            "train": {"global_batch": problem.batch, "duration": "1ep", "seed": SEED, "max_batch_per_rank": 1 << 20},
        }
    )
    return assemble(config, world, build_network(config, problem.num_classes), Schedule("constant", lr, total_steps=1))


def read_weights(parts: Parts) -> Tensor:
    """The network's weights as the problem has them."""
    named = named_arrays(parts.weights, parts.layout)
    return torch.cat([named["fc.weight"].T, named["fc.bias"][None]]).double()
