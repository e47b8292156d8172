"""Fused updates against the equations in FP64 and against the plain version, with half gradients and a loss scale."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.kernels import flat_update
from lockstep.kernels.flat_update import Tiling, cut_tiles
from lockstep.layout import ALIGNMENT, Layout, ParameterSpec, align, plan_layout
from lockstep.optim.adamw import AdamW
from lockstep.optim.lamb import Lamb
from lockstep.optim.lars import Lars
from lockstep.optim.loss_scale import SCALE, LossScale
from lockstep.optim.rule import Rule
from lockstep.optim.sgd import Sgd
from lockstep.optim.storage import load_named, named_arrays
from tests.optim.equations import clip, run_adamw, run_lamb, run_lars, run_sgd

BLOCK = 256  # small, so that slots have several tiles
RATES = [
    0.5,
    0.8,
    0.25,
]  # not 1: LAMB's step would take a slot of one element to zero, and its rounding decides the next
SPECS = [
    ParameterSpec("conv", (9, 7, 3, 3), decay=True, adapt=True, half=True),
    ParameterSpec("gamma", (9,), decay=False, adapt=False),
    ParameterSpec("one", (1, 1), decay=True, adapt=True, half=True),
    ParameterSpec("zero_weight", (40, 3), decay=True, adapt=True, half=True),
    ParameterSpec("zero_gradient", (5, 5), decay=True, adapt=True, half=True),
    ParameterSpec("exact", (8, 64), decay=False, adapt=True, half=True),  # two tiles without a rest
    ParameterSpec("beta", (300,), decay=True, adapt=True),
    ParameterSpec("fc_bias", (5,), decay=False, adapt=False, half=True),
]
Reference = Callable[..., Any]
LARS = {"momentum": 0.8, "weight_decay": 0.05, "trust_coefficient": 0.02}
LAMB = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-4, "weight_decay": 0.05}
SGD = {"momentum": 0.8, "weight_decay": 0.05}
RULES: dict[str, tuple[type[Rule], Reference, dict[str, Any]]] = {
    "sgd": (Sgd, run_sgd, SGD),
    "nesterov": (Sgd, run_sgd, SGD | {"nesterov": True}),
    "lars": (Lars, run_lars, LARS),
    "lamb": (Lamb, run_lamb, LAMB),
    "adamw": (AdamW, run_adamw, LAMB),
}
CLIP_NORM = 1.5  # half of what the gradients of a step have
every_rule = pytest.mark.parametrize("name", RULES)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass
class Run:
    """A rule, its arrays, and a few steps of gradients."""

    layout: Layout
    rule: Rule
    weights: Tensor
    half_weights: Tensor
    scale: LossScale | None

    def step(self, gradients: dict[str, Tensor], lr: float) -> tuple[Tensor, Tensor]:
        """One step; gives the flat gradients it was given."""
        dtype, device = self.half_weights.dtype, self.weights.device
        flat = torch.zeros(self.layout.numel)
        load_named(flat, self.layout, gradients)
        if self.scale:
            flat *= float(self.scale.state[SCALE])
        split = self.layout.split
        halves, full = flat[:split].to(device, dtype), flat[split:].to(device)
        self.rule.step(self.weights, (halves, full), torch.tensor(lr, device=device), self.half_weights, self.scale)
        return halves, full

    def arrays(self) -> list[Tensor]:
        return [self.weights, self.half_weights, *self.rule.state().values()]


def build_run(
    name: str, dtype: torch.dtype, *, fused: bool, scaled: bool, device: str = "cpu", clip_norm: float = 0.0
) -> Run:
    layout = plan_layout([spec._replace(half=spec.half and dtype != torch.float32) for spec in SPECS])
    kind, _, settings = RULES[name]
    rule = kind(layout, device, fused=fused, clip_norm=clip_norm, **settings)  # type: ignore[call-arg]
    if fused:
        rule.fuse(Tiling(block=BLOCK))
    weights = torch.zeros(layout.numel)
    load_named(weights, layout, draw_weights())
    weights = weights.to(device)
    half = weights[: layout.split].to(dtype)
    scale = LossScale(layout, device, initial=1024.0) if scaled else None
    return Run(layout, rule, weights, half, scale)


def draw_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = {spec.name: 0.3 * torch.randn(spec.shape, generator=generator) for spec in SPECS}
    drawn["zero_weight"].zero_()
    return drawn


def draw_gradients(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers that `dtype` holds, also times a power of two, so that rule and reference see the same."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = {spec.name: (0.1 * torch.randn(spec.shape, generator=generator)).to(dtype).float() for spec in SPECS}
    drawn["zero_gradient"].zero_()
    return drawn


@every_device
@pytest.mark.parametrize(
    ("dtype", "scaled", "clip_norm"),
    [
        (torch.float16, True, 0.0),
        (torch.bfloat16, False, 0.0),
        (torch.float32, False, 0.0),
        (torch.float16, True, CLIP_NORM),
        (torch.float32, False, CLIP_NORM),
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@every_rule
def test_they_follow_the_equations(
    name: str, fused: bool, dtype: torch.dtype, scaled: bool, clip_norm: float, device: str
) -> None:
    run = build_run(name, dtype, fused=fused, scaled=scaled, device=device, clip_norm=clip_norm)
    steps = [draw_gradients(step, dtype) for step in range(len(RATES))]
    for gradients, lr in zip(steps, RATES, strict=True):
        run.step(gradients, lr)
    assert run.rule.count == len(RATES)
    found, start = named_arrays(run.weights.cpu(), run.layout), draw_weights()
    _, reference, settings = RULES[name]
    exact = [clip_all(gradients, clip_norm or float("inf")) for gradients in steps]
    for spec in SPECS:
        own = [gradients[spec.name] for gradients in exact]
        expected = reference(start[spec.name].double().numpy(), own, RATES, spec, **settings)
        loose = 5 if device == "cuda" else 1  # sums of products there are rounded once instead of twice
        np.testing.assert_allclose(
            found[spec.name].numpy(), expected, rtol=loose * 2e-5, atol=loose * 1e-6, err_msg=spec.name
        )
        assert np.abs(expected - start[spec.name].numpy()).max() > 1e-4 or spec.name == "zero_gradient"
    rounded = run.weights[: run.layout.split].to(dtype)
    if dtype == torch.bfloat16 and device == "cpu":  # Triton's interpreter cuts digits off instead of rounding
        torch.testing.assert_close(run.half_weights, rounded, rtol=2**-7, atol=0)
    else:
        assert torch.equal(run.half_weights, rounded)


def clip_all(gradients: dict[str, Tensor], norm: float) -> dict[str, Any]:
    """A step's gradients in FP64, clipped by the oracle."""
    clipped = clip([gradient.double().numpy() for gradient in gradients.values()], norm)
    return dict(zip(gradients, clipped, strict=True))


# By rule, loss scale and clipping: sums of squares, the factor of clipping, rates, the update.
SUM, CLIP, SETTLE, UPDATE = "sum_tiles", "settle_clip", "settle_slots", "update_tiles"
LAUNCHES = {
    ("sgd", False, False): [UPDATE],
    ("sgd", True, False): [SUM, SETTLE, UPDATE],
    ("sgd", False, True): [SUM, CLIP, UPDATE],
    ("sgd", True, True): [SUM, CLIP, SETTLE, UPDATE],
    ("lars", False, False): [SUM, SETTLE, UPDATE],
    ("lars", True, True): [SUM, CLIP, SETTLE, UPDATE],
    ("lamb", True, False): [SUM, SETTLE, UPDATE],
    ("lamb", False, True): [SUM, CLIP, SUM, SETTLE, UPDATE],
    ("adamw", False, False): [SETTLE, UPDATE],
    ("adamw", True, False): [SUM, SETTLE, UPDATE],
    ("adamw", False, True): [SUM, CLIP, SETTLE, UPDATE],
}


@pytest.mark.parametrize(("case", "launches"), LAUNCHES.items(), ids=str)
def test_nothing_is_launched_that_a_step_does_not_need(
    case: tuple[str, bool, bool], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scaled, clipped = case
    seen: list[str] = []
    for kernel in (SUM, CLIP, SETTLE, UPDATE):
        launch = Launch(kernel, getattr(flat_update, kernel), seen)
        monkeypatch.setattr(flat_update, kernel, launch)
    run = build_run(name, torch.float16, fused=True, scaled=scaled, clip_norm=CLIP_NORM if clipped else 0.0)
    run.step(draw_gradients(0, torch.float16), 0.5)
    assert seen == launches


@dataclass
class Launch:
    """A kernel that takes note of its launches."""

    name: str
    kernel: Any
    seen: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(self.name)
        return self.kernel[grid]


@every_device
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, which the interpreter computes with
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(
    ("name", "clip_norm"), [*((name, 0.0) for name in RULES), ("lars", CLIP_NORM), ("lamb", CLIP_NORM)]
)
def test_a_step_that_overflows_changes_nothing_but_the_scale(
    name: str, fused: bool, clip_norm: float, device: str
) -> None:
    run = build_run(name, torch.float16, fused=fused, scaled=True, device=device, clip_norm=clip_norm)
    assert run.scale is not None
    run.step(draw_gradients(0, torch.float16), 0.5)
    before = [array.clone() for array in run.arrays()]
    bad = draw_gradients(1, torch.float16)
    bad["exact"][7, 63] = float("inf")
    bad["conv"][3] = float("nan")
    run.step(bad, 1.0)
    assert all(torch.equal(array, old) for array, old in zip(run.arrays(), before, strict=True))
    assert run.rule.count == 1
    assert run.scale.state.tolist() == [512.0, 0.0, 1.0, 1.0]
    named = [slot.name for slot in run.layout.slots]
    assert {name for name, times in zip(named, run.scale.overflows.tolist(), strict=True) if times} == {"exact", "conv"}
    assert {name for name, times in zip(named, run.scale.firsts.tolist(), strict=True) if times} == {"exact"}
    run.step(draw_gradients(2, torch.float16), 1.0)  # and training goes on
    assert not torch.equal(run.weights, before[0])
    assert run.weights.isfinite().all()
    assert run.scale.state.tolist() == [512.0, 1.0, 0.0, 1.0]


def test_the_scale_grows_to_its_ceiling_and_falls_to_its_floor_as_in_the_plain_version() -> None:
    states = []
    for fused in (True, False):
        run = build_run("sgd", torch.float16, fused=fused, scaled=False)
        run.scale = LossScale(run.layout, initial=8.0, growth_steps=2, floor=8.0, ceiling=16.0)
        seen = []
        for step, overflows in enumerate([0, 0, 0, 0, 1, 1, 0, 0]):
            gradients = draw_gradients(step, torch.float16)
            if overflows:
                gradients["one"].fill_(float("inf"))
            run.step(gradients, 0.1)
            seen.append(run.scale.state.tolist())
        states.append(seen)
    assert states[0] == states[1]
    assert [state[SCALE] for state in states[0]] == [8, 16, 16, 16, 8, 8, 8, 16]


@every_device
@pytest.mark.parametrize("name", ["lars", "lamb", "adamw"])
def test_the_same_steps_give_the_same_bits_and_padding_stays_zero(name: str, device: str) -> None:
    clip_norm = CLIP_NORM if name == "adamw" else 0.0
    runs = [
        build_run(name, torch.float16, fused=True, scaled=True, device=device, clip_norm=clip_norm) for _ in range(2)
    ]
    for run in runs:
        for step, lr in enumerate(RATES[:2]):
            run.step(draw_gradients(step, torch.float16), lr)
    assert all(torch.equal(a, b) for a, b in zip(*(run.arrays() for run in runs), strict=True))
    padding = torch.ones(runs[0].layout.numel, dtype=torch.bool)
    for slot in runs[0].layout.slots:
        padding[slot.offset : slot.end] = False
    assert padding.any()
    for array in runs[0].arrays():
        assert not array.cpu()[padding[: array.numel()]].any()


def test_tiles_cover_every_slot_once_and_never_cross_one() -> None:
    layout = plan_layout(SPECS)
    tiles, slots = cut_tiles(layout, BLOCK)
    for index, slot in enumerate(layout.slots):
        begin, end, adapts = slots[index]
        own = tiles[begin:end]
        assert [row[0] for row in own] == [index] * len(own)
        starts = [row[1] * ALIGNMENT for row in own]
        lengths = [row[2] * ALIGNMENT for row in own]
        assert starts[0] == slot.offset
        assert [start + length for start, length in zip(starts, lengths, strict=True)] == [*starts[1:], align(slot.end)]
        assert max(lengths) <= BLOCK
        assert adapts == slot.adapt


@pytest.mark.gpu
@pytest.mark.parametrize("clip_norm", [0.0, 100.0], ids=["", "clipped"])
@every_rule
def test_millions_of_parameters_in_many_slots_agree_with_the_plain_version_on_a_gpu(
    name: str, clip_norm: float
) -> None:
    sizes = [(512, 512, 3, 3), (2048, 1000), *[(64,), (256, 64, 1, 1)] * 40]
    specs = [ParameterSpec(f"p{i}", s, len(s) > 1, len(s) > 1, half=len(s) > 1) for i, s in enumerate(sizes)]
    layout = plan_layout(specs)
    kind, _, settings = RULES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    results = []
    drawn = torch.randn(layout.numel, device="cuda", generator=generator)
    for slot in layout.slots:
        drawn[slot.end : align(slot.end)] = 0
    for fused in (True, False):
        rule = kind(layout, "cuda", fused=fused, clip_norm=clip_norm, **settings)  # type: ignore[call-arg]
        weights, scale = 0.1 * drawn, LossScale(layout, "cuda", initial=256.0)
        half = weights[: layout.split].half()
        for _ in range(3):
            gradients = (drawn[: layout.split].half(), drawn[layout.split :].clone())
            rule.step(weights, gradients, torch.tensor(0.1, device="cuda"), half, scale)
        results.append((weights, half))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-6)
    assert torch.equal(results[0][1], results[0][0][: layout.split].half())


@every_device
@pytest.mark.parametrize("clip_norm", [0.0, CLIP_NORM], ids=["", "clipped"])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", ["sgd", "lars", "lamb", "adamw"])
def test_the_norms_of_a_step_can_be_read_afterwards(
    name: str, fused: bool, scaled: bool, clip_norm: float, device: str
) -> None:
    """Those of the gradients as they were before clipping, and the trust ratios that clipping has left."""
    dtype = torch.float16 if scaled else torch.float32
    run = build_run(name, dtype, fused=fused, scaled=scaled, device=device, clip_norm=clip_norm)
    gradients, before = draw_gradients(0, dtype), draw_weights()
    run.rule.measures = True
    flat = run.step(gradients, 0.5)
    norms = run.rule.read_norms(run.weights, flat)
    assert norms is not None
    names = [slot.name for slot in run.layout.slots]
    is_late = fused and name in ("sgd", "adamw")  # no launch had the norms of the weights before the step
    seen_weights = named_arrays(run.weights.cpu(), run.layout) if is_late else before
    for index, slot in enumerate(names):
        w_norm, g_norm = (float(array[slot].double().norm()) for array in (seen_weights, gradients))
        assert float(norms.weights[index]) == pytest.approx(w_norm, rel=1e-4, abs=1e-6), slot
        assert float(norms.gradients[index]) == pytest.approx(g_norm, rel=1e-4, abs=1e-6), slot
    assert float(norms.inverse) == (1 / 1024 if scaled else 1)
    assert (norms.trust is None) == (name in ("sgd", "adamw"))
    if name == "lars":
        assert norms.trust is not None
        adapts = {spec.name: spec.adapt and spec.name not in ("zero_weight", "zero_gradient") for spec in SPECS}
        decays = {spec.name: 0.05 * spec.decay for spec in SPECS}
        clipped = clip_all(gradients, clip_norm or float("inf"))
        for slot, found in zip(names, norms.trust.tolist(), strict=True):
            w, g = float(before[slot].double().norm()), float(np.linalg.norm(clipped[slot]))
            expected = 0.02 * w / (g + decays[slot] * w) if adapts[slot] else 1.0
            assert found == pytest.approx(expected, rel=1e-4), slot
    if name == "lamb":
        plain = build_run(name, dtype, fused=False, scaled=scaled, device=device, clip_norm=clip_norm)
        plain.rule.measures = True
        wanted = plain.rule.read_norms(plain.weights, plain.step(gradients, 0.5))
        assert norms.trust is not None
        assert wanted is not None
        torch.testing.assert_close(norms.trust, wanted.trust, rtol=1e-4, atol=1e-6)
