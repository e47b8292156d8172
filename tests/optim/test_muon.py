"""Muon against singular value decompositions in FP64; vectors get a length."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.layout import ParameterSpec, plan_layout
from lockstep.optim.muon import A, B, C, Muon, find_shape, orthogonalize
from lockstep.optim.storage import named_arrays

Array = NDArray[np.float64]


def decompose(d: Array) -> Array:
    """What five steps make of a matrix, by its singular values: each step is a polynomial of every one of them."""
    norm = np.linalg.norm(d)
    if not norm:
        return d
    u, s, v = np.linalg.svd(d / norm, full_matrices=False)
    if len(s) > 1:
        for _ in range(5):
            s = A * s + B * s**3 + C * s**5
    return (u * s) @ v


def run_muon(w: Array, gradients: list[Array], rates: list[float], decays: bool) -> Array:
    v, w = np.zeros_like(w), w.copy()
    for g, lr in zip(gradients, rates, strict=True):
        v = 0.8 * v + g
        d = g + 0.8 * v
        matrix = d.reshape(len(d), -1) if d.ndim > 1 else d[None]
        size = 0.2 * math.sqrt(max(matrix.shape))
        w = w - lr * (size * decompose(matrix).reshape(d.shape) + (0.05 * w if decays else 0))
    return w


def test_it_follows_the_equations(problem: Any, learning_rates: list[float]) -> None:
    found = named_arrays(problem.run(Muon(problem.layout, momentum=0.8, weight_decay=0.05)), problem.layout)
    for slot in problem.layout.slots:
        gradients = [gradient[slot.name] for gradient in problem.gradients]
        expected = run_muon(problem.weights[slot.name], gradients, learning_rates, slot.decay)
        # Small singular values are brought up a hundredfold, and their rounding with them.
        np.testing.assert_allclose(found[slot.name].numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=slot.name)
        assert np.abs(expected - problem.weights[slot.name]).max() > 1e-3 or slot.name == "zero_gradient"


@given(st.integers(2, 24), st.integers(2, 24), st.integers(0, 2**32 - 1), st.floats(-6, 6))
def test_every_direction_gets_about_the_same_length(rows: int, columns: int, seed: int, exponent: float) -> None:
    generator = np.random.default_rng(seed)
    matrices = generator.standard_normal((3, rows, columns)) * 10**exponent
    found = orthogonalize(torch.tensor(matrices, dtype=torch.float32)).double().numpy()
    for before, after in zip(matrices, found, strict=True):
        u, s, v = np.linalg.svd(before, full_matrices=False)
        inside = u.T @ after @ v.T
        clear = s > 0.05 * s.max()  # five steps bring up what is not too far below
        assert (np.abs(np.diag(inside)[clear] - 0.95) < 0.3).all()
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-3  # the directions themselves stay


def test_zeros_stay_zeros_and_a_vector_gets_a_length() -> None:
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()
    vector = torch.tensor([[[3.0, 4.0]]])
    torch.testing.assert_close(orthogonalize(vector), vector / 5)


def test_another_decay_serves_the_next_run() -> None:
    layout = plan_layout([ParameterSpec("w", (3, 3), decay=True, adapt=True)])
    rule, weights = Muon(layout, weight_decay=0.5), torch.ones(layout.numel)
    for decay, left in ((0.5, 0.5), (0.25, 0.375)):
        rule.begin_anew(decay)
        rule.step(weights, (torch.zeros(0), torch.zeros(layout.numel)), torch.tensor(1.0))
        assert (weights[:9] == left).all()


@pytest.mark.parametrize(
    ("shape", "expected"), [((64, 3, 7, 7), (64, 147)), ((10, 5), (10, 5)), ((7,), (1, 7)), ((), (1, 1))]
)
def test_a_slot_is_a_matrix(shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    (slot,) = plan_layout([ParameterSpec("w", shape, decay=True, adapt=True)]).slots
    assert find_shape(slot) == expected
