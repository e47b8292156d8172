"""Softmax regression by name: every class as likely at first, and one product after that."""

import torch

from lockstep.models import build_started


def test_it_starts_at_zero_and_multiplies_all_pixels() -> None:
    model = build_started("linear", 5, 0, (6,), {})
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    assert not model(images).any()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    weight, bias = (model.get_parameter(f"fc.{name}").detach() for name in ("weight", "bias"))
    expected = [[(image.flatten() * row).sum() + b for row, b in zip(weight, bias, strict=True)] for image in images]
    torch.testing.assert_close(model(images).detach(), torch.tensor(expected), rtol=1e-4, atol=1e-4)
