"""Which parameters decay, which adapt, which are half."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.models import build_model
from lockstep.optim.groups import describe_parameters


def small_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_parameters_come_in_forward_order_with_their_shapes() -> None:
    specs = describe_parameters(small_model())
    shapes = {"0.weight": (4, 3, 3, 3), "0.bias": (4,), "1.weight": (4,), "1.bias": (4,)}
    assert [(s.name, s.shape) for s in specs] == list((shapes | {"3.weight": (2, 4), "3.bias": (2,)}).items())


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("adapt", [False, True])
def test_decay_and_trust_ratio_of_norms_and_biases_are_separate_choices(decay: bool, adapt: bool) -> None:
    for spec in describe_parameters(small_model(), decay_norm_and_bias=decay, adapt_norm_and_bias=adapt):
        matrix = spec.name in ("0.weight", "3.weight")
        assert (spec.decay, spec.adapt) == (matrix or decay, matrix or adapt), spec.name


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    model[0].requires_grad_(False)
    assert [s.name for s in describe_parameters(model)] == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_all_but_batch_norm_may_be_half() -> None:
    assert not any(spec.half for spec in describe_parameters(small_model()))
    halves = {spec.name for spec in describe_parameters(small_model(), half=True) if spec.half}
    assert halves == {"0.weight", "0.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize(
    ("name", "settings"), [("resnet18", {}), ("resnet50", {}), ("alexnet", {}), ("alexnet", {"batch_norm": False})]
)
def test_our_networks_decay_what_has_dimensions_and_keep_batch_norm_alone_in_full(
    name: str, settings: dict[str, bool]
) -> None:
    """The rule by shapes and batch norm, which is all that these networks need."""
    with torch.device("meta"):
        model = build_model(name, 10, image_size=224, **settings)
    norms = {id(p) for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
    for spec in describe_parameters(model, half=True):
        parameter = model.get_parameter(spec.name)
        assert spec.decay == spec.adapt == (parameter.dim() > 1), spec.name
        assert spec.half == (id(parameter) not in norms), spec.name


class RmsNorm2d(nn.Module):
    """Somebody's own norm, known by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 2))


class Everything(nn.Module):
    """One of each kind of parameter that vision networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.temperature = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.zeros(9, 2))
        self.mixing = nn.Parameter(torch.zeros(4, 4))
        self.patches = nn.Conv2d(3, 4, 2)
        self.depthwise = nn.Conv2d(4, 4, 1, groups=4)
        self.place = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norms = nn.ModuleList([nn.LayerNorm((4, 2)), nn.GroupNorm(2, 4), nn.RMSNorm(4), RmsNorm2d()])
        self.head = nn.Linear(4, 1)

    def no_weight_decay(self) -> set[str]:
        return {"table"}


def test_what_decays_and_what_is_half_follows_from_the_modules() -> None:
    specs = {spec.name: spec for spec in describe_parameters(Everything(), half=True)}
    multiplied = {"patches", "depthwise", "attention", "attention.out_proj", "head"}
    assert {name for name, spec in specs.items() if spec.half} == {
        name for name in specs if name.rpartition(".")[0] in multiplied
    }
    matrices = {name for name in specs if specs[name].half and not name.endswith("bias")}
    assert {name for name, spec in specs.items() if spec.decay} == {*matrices, "mixing"}
    assert all(spec.adapt == spec.decay for spec in specs.values())


class Tied(nn.Module):
    """An embedding that a linear layer multiplies by as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)  # type: ignore[no-any-return]


def test_a_shared_parameter_is_one_and_goes_by_who_multiplies() -> None:
    (spec,) = describe_parameters(Tied(), half=True)
    assert (spec.name, spec.half, spec.decay) == ("words.weight", True, True)


def test_an_empty_parameter_has_no_place() -> None:
    model = small_model()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    assert "empty" not in {spec.name for spec in describe_parameters(model)}
