"""A small problem with every kind of slot, which all update rules are run on."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lockstep.layout import Layout, ParameterSpec, plan_layout
from lockstep.optim.rule import Rule
from lockstep.optim.storage import load_named, named_arrays

Array = npt.NDArray[np.float64]
# One parameter's run in FP64, from the equations alone: (weights, gradient of each step, spec) → weights at the end.
Reference = Callable[[Array, list[Array], ParameterSpec], Array]

SPECS = [
    ParameterSpec("conv", (6, 5, 3, 3), decay=True, adapt=True),
    ParameterSpec("gamma", (6,), decay=False, adapt=False),
    ParameterSpec("decay_only", (40,), decay=True, adapt=False),
    ParameterSpec("adapt_only", (33,), decay=False, adapt=True),
    ParameterSpec("zero_weight", (7, 3), decay=True, adapt=True),
    ParameterSpec("zero_gradient", (5, 5), decay=True, adapt=True),
    ParameterSpec("fc", (4, 16), decay=True, adapt=True),
]
LEARNING_RATES = [0.0, 0.5, 1.0, 0.25, 0.125]


@dataclass(frozen=True)
class Problem:
    """Starting weights and the gradients of a few steps, by name, over one layout."""

    layout: Layout
    weights: dict[str, Array]
    gradients: list[dict[str, Array]]

    def flat(self, arrays: dict[str, Array]) -> torch.Tensor:
        flat = torch.zeros(self.layout.numel)
        load_named(flat, self.layout, {name: torch.from_numpy(array) for name, array in arrays.items()})
        return flat

    def run(self, rule: Rule) -> torch.Tensor:
        """The flat weights after all steps."""
        weights = self.flat(self.weights)
        self.advance(rule, weights, range(len(LEARNING_RATES)))
        return weights

    def advance(self, rule: Rule, weights: torch.Tensor, steps: range) -> None:
        for step in steps:
            rule.step(weights, (torch.zeros(0), self.flat(self.gradients[step])), torch.tensor(LEARNING_RATES[step]))

    def assert_follows(self, rule: Rule, reference: Reference) -> None:
        """The rule's weights are the reference's, parameter by parameter."""
        found = named_arrays(self.run(rule), self.layout)
        for spec in SPECS:
            expected = reference(self.weights[spec.name], [g[spec.name] for g in self.gradients], spec)
            np.testing.assert_allclose(found[spec.name].numpy(), expected, rtol=2e-5, atol=1e-7, err_msg=spec.name)
            # The comparison says something only if the steps moved the weights well beyond its tolerance.
            moved = np.abs(expected - self.weights[spec.name]).max()
            assert moved > 1e-4 or spec.name == "zero_gradient", spec.name


@pytest.fixture
def problem() -> Problem:
    rng = np.random.default_rng(0)
    # Rounded to FP32, so that rule and reference start from the same numbers.
    draw = {spec.name: rng.normal(0, 0.3, spec.shape).astype(np.float32).astype(np.float64) for spec in SPECS}
    draw["zero_weight"][:] = 0.0
    gradients = [
        {spec.name: rng.normal(0, 0.1, spec.shape).astype(np.float32).astype(np.float64) for spec in SPECS}
        for _ in LEARNING_RATES
    ]
    for gradient in gradients:
        gradient["zero_gradient"][:] = 0.0
    return Problem(plan_layout(SPECS), draw, gradients)


@pytest.fixture
def learning_rates() -> list[float]:
    return LEARNING_RATES
