"""SVRG and HALP against their equations in FP64, and the fused update against the plain one."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.kernels.flat_update import Tiling
from lockstep.kernels.offset_update import OffsetUpdate
from lockstep.layout import align
from lockstep.optim.full_gradient import FullGradient
from lockstep.optim.halp import Halp
from lockstep.optim.svrg import Svrg
from tests.optim.conftest import LEARNING_RATES, SPECS, Problem
from tests.optim.test_rounding import draw_by_hand

DECAY, MU, SEED = 0.05, 3.0, 7
BITS = [0, 8, 16]
every_width = pytest.mark.parametrize("bits", BITS)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def build(problem: Problem, bits: int, device: str = "cpu", fused: bool = False) -> tuple[Svrg, torch.Tensor]:
    """A rule at an anchor whose full gradient is the problem's first."""
    common: dict[str, Any] = {"weight_decay": DECAY, "fused": fused}
    rule = Svrg(problem.layout, device, **common)
    if bits:
        rule = Halp(problem.layout, device, bits=bits, mu=MU, seed=SEED, **common)
    weights = problem.flat(problem.weights).to(device)
    rule.recentre(weights, problem.flat(problem.gradients[0]).to(device).double())
    return rule, weights


def differences(problem: Problem, step: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(0), problem.flat(problem.gradients[step]).to(device)


def run_by_hand(problem: Problem, bits: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The paper's algorithm in FP64, element by element: the last weights and z in units of s."""
    decays = {spec.name: DECAY * spec.decay for spec in SPECS}
    anchor = problem.weights
    full = {name: problem.gradients[0][name] + decays[name] * anchor[name] for name in anchor}
    most = 2 ** (bits - 1) - 1 if bits else 1
    s = np.sqrt(sum((g**2).sum() for g in full.values())) / (MU * most) if bits else 1.0
    places = {slot.name: slot for slot in problem.layout.slots}
    z = {name: np.zeros_like(values) for name, values in anchor.items()}
    for step, lr in enumerate(LEARNING_RATES):
        for name in z:
            v = problem.gradients[step][name] + decays[name] * s * z[name] + full[name]
            x = z[name] - lr * v / s
            if bits:
                uniform = [draw_by_hand(SEED, step, places[name].offset + i) for i in range(places[name].numel)]
                low = np.floor(x)
                x = np.clip(low + (lay_out(uniform, x.shape) < x - low), -most - 1, most)
            z[name] = x
    return {name: anchor[name] + s * z[name] for name in z}, z


def lay_out(flat: list[float], shape: tuple[int, ...]) -> Any:
    """A slot's elements in its parameter's shape: convolutions lie channels-last."""
    if len(shape) != 4:
        return np.reshape(flat, shape)
    out, channels, height, width = shape
    return np.reshape(flat, (out, height, width, channels)).transpose(0, 3, 1, 2)


@every_device
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@every_width
def test_inner_steps_follow_the_paper(problem: Problem, bits: int, fused: bool, device: str) -> None:
    rule, weights = build(problem, bits, device, fused)
    for step, lr in enumerate(LEARNING_RATES):
        rule.step(weights, differences(problem, step, device), torch.tensor(lr, device=device))
    assert rule.count == len(LEARNING_RATES)
    expected, z = run_by_hand(problem, bits)
    for spec in SPECS:
        slot = next(slot for slot in problem.layout.slots if slot.name == spec.name)
        found = rule.offset[slot.offset : slot.end].cpu()
        if bits:
            assert found.dtype == {8: torch.int8, 16: torch.int16}[bits]
            off = np.abs(lay_out(found.tolist(), spec.shape) - z[spec.name])
            # A step here is thousands of the finest grid's units, and FP32 knows it to a thousandth of one.
            assert off.max() <= (1 if bits == 16 else 0), spec.name
            assert (off > 0).mean() <= 0.02, spec.name
        moved = weights[slot.offset : slot.end].cpu()
        grid = rule.scale.item() if isinstance(rule, Halp) and bits == 16 else 0.0
        np.testing.assert_allclose(
            lay_out(moved.tolist(), spec.shape), expected[spec.name], rtol=1e-5, atol=1e-6 + 1.01 * grid
        )
    if bits:
        assert any(np.abs(values).max() > 20 for values in z.values())  # and not all rounded to nothing


def test_the_scale_is_the_papers(problem: Problem) -> None:
    for bits in (8, 16):
        rule, _ = build(problem, bits)
        assert isinstance(rule, Halp)
        norm = rule.full_gradient.double().norm().item()
        assert rule.scale.item() == pytest.approx(norm / (MU * (2 ** (bits - 1) - 1)), rel=1e-7)


@every_device
@every_width
def test_the_fused_update_gives_the_bits_of_the_plain_one(problem: Problem, bits: int, device: str) -> None:
    """On awkward numbers: some saturate, some move by less than the grid."""
    generator = torch.Generator().manual_seed(1)
    (plain, by_hand), (fused, weights) = build(problem, bits, device), build(problem, bits, device, fused=True)
    fused._offset_kernel = OffsetUpdate(problem.layout, torch.device(device), tiling=Tiling(64), **fused.constants())
    for lr in (0.3, 1e-3, 30.0, 1e-9, 0.7):
        drawn = torch.randn(problem.layout.numel, generator=generator).exp() - 1
        for slot in problem.layout.slots:
            drawn[slot.end : align(slot.end)] = 0
        for rule, array in ((plain, by_hand), (fused, weights)):
            rule.step(array, (torch.zeros(0), drawn.to(device, copy=True)), torch.tensor(lr, device=device))
        assert torch.equal(plain.offset, fused.offset)
        assert torch.equal(by_hand, weights)
    padding = torch.ones(problem.layout.numel, dtype=torch.bool)
    for slot in problem.layout.slots:
        padding[slot.offset : slot.end] = False
    assert padding.any()
    assert not weights.cpu()[padding].any()
    if bits:
        assert fused.offset.abs().max() >= 2 ** (bits - 1) - 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, which is NumPy
@every_device
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_no_number_becomes_zero_and_what_is_infinite_the_end_of_the_grid(
    problem: Problem, bits: int, fused: bool, device: str
) -> None:
    rule, weights = build(problem, bits, device, fused)
    gradients = differences(problem, 1, device)
    rule.step(weights, gradients, torch.tensor(0.5, device=device))
    first = problem.layout.slots[0].offset
    for place, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        gradients[1][first + place] = value
    rule.step(weights, gradients, torch.tensor(0.5, device=device))
    assert rule.offset[first : first + 3].tolist() == [0, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1]
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_the_reach_of_offsets_is_the_share_at_either_end_and_at_zero(problem: Problem, bits: int) -> None:
    rule, _ = build(problem, bits)
    assert isinstance(rule, Halp)
    most, numel = 2 ** (bits - 1) - 1, sum(slot.numel for slot in problem.layout.slots)
    assert rule.measure_reach().tolist() == [0, 1]  # padding between slots is no offset
    slot = problem.layout.slots[0]
    rule.offset[slot.offset : slot.offset + 5] = torch.tensor([most, -most - 1, -most, 1, 0], dtype=rule.offset.dtype)
    assert rule.measure_reach().tolist() == pytest.approx([2 / numel, (numel - 4) / numel])


@every_width
def test_the_next_anchor_is_where_the_offset_led(problem: Problem, bits: int) -> None:
    rule, weights = build(problem, bits)
    rule.step(weights, differences(problem, 1), torch.tensor(0.5))
    reached = weights.clone()
    rule.show_anchor(weights)
    assert torch.equal(weights, problem.flat(problem.weights))
    rule.show_iterate(weights)
    assert torch.equal(weights, reached)
    rule.recentre(weights, torch.zeros(problem.layout.numel, dtype=torch.float64))
    rule.show_iterate(weights)
    assert torch.equal(weights, reached)
    assert torch.equal(rule.anchor, reached)
    assert not rule.offset.any()


def test_without_any_gradient_nothing_moves(problem: Problem) -> None:
    """s would be zero, and 0 / 0 no number."""
    rule = Halp(problem.layout, mu=1.0, weight_decay=0.0)
    weights = problem.flat(problem.weights)
    rule.recentre(weights, torch.zeros(problem.layout.numel, dtype=torch.float64))
    rule.step(weights, (torch.zeros(0), torch.zeros(problem.layout.numel)), torch.tensor(1.0))
    assert torch.equal(weights, problem.flat(problem.weights))


@every_width
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_norms_are_those_of_the_corrected_gradient(problem: Problem, bits: int, fused: bool) -> None:
    rule, weights = build(problem, bits, fused=fused)
    rule.measures = True
    gradients = differences(problem, 1)
    rule.step(weights, gradients, torch.tensor(0.0))  # z stays at zero
    norms = rule.read_norms(weights, gradients)
    assert norms is not None
    for slot, found in zip(problem.layout.slots, norms.gradients.tolist(), strict=True):
        full = problem.gradients[0][slot.name] + DECAY * slot.decay * problem.weights[slot.name]
        assert found == pytest.approx(np.linalg.norm(problem.gradients[1][slot.name] + full), rel=1e-5)
    assert norms.trust is None


def test_a_full_gradient_is_a_sum_over_samples_in_fp64(problem: Problem) -> None:
    """A hundred small ones beside a large one are not lost, as they would be in FP32."""
    rules = [FullGradient(problem.layout) for _ in range(2)]
    for gradient, size in ((problem.gradients[0], 2.0**30), *[(problem.gradients[1], 1.0)] * 100):
        flat = problem.flat(gradient)
        apart = [flat[slot.offset : slot.end].clone() for slot in problem.layout.slots]
        rules[0].step(torch.zeros(0), (torch.zeros(0), flat), torch.tensor(size))
        rules[1].step(flat, apart, torch.tensor(size))
    assert torch.equal(rules[0].total, rules[1].total)
    large, small = (problem.flat(gradient).double() for gradient in problem.gradients[:2])
    torch.testing.assert_close(rules[0].total, large * 2.0**30 + small * 100, rtol=1e-12, atol=1e-6)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels.offset_update import update_offsets

names = update_offsets.arg_names
for bits, offset, seed in ((0, "*fp32", "*fp32"), (8, "*i8", "*i64"), (16, "*i16", "*i64")):
    given = {"BITS": bits, "BLOCK": 4096}
    types = dict.fromkeys(names, "*fp32") | {"tiles": "*i32", "offset": offset, "seed": seed, "count": "*i64"}
    types |= dict.fromkeys(given, "constexpr")
    constants = {(names.index(name),): value for name, value in given.items()}
    source = ASTSource(update_offsets, types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    assert "fma.rn" not in made.asm["ptx"], bits
"""


def test_the_compiler_takes_what_the_interpreter_does() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
