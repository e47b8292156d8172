"""Weights from files, matched to a network by name and shape."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.models import build_model, initialize
from lockstep.models.weights import fetch_weights, fit_weights, read_weights
from tests.anew import imported_anew


def small(num_classes: int = 5, **settings: Any) -> nn.Module:
    model = build_model("resnet18", num_classes, image_size=32, **{"width": 8} | settings)
    initialize(model, seed=num_classes)
    return model


def arrays(model: nn.Module) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in model.state_dict().items()}


def write_pth(found: Any, path: Path) -> None:
    torch.save(found, path)


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".safetensors", save_file),
        (".pth", write_pth),
        (".pt", lambda found, path: write_pth({"epoch": 3, "state_dict": found}, path)),
        (".pth", lambda found, path: write_pth({"model": {f"module.{n}": v for n, v in found.items()}}, path)),
    ],
    ids=["safetensors", "pth", "among others", "wrapped"],
)
def test_all_arrays_come_back(suffix: str, write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    found = arrays(small())
    write(found, path := tmp_path / f"weights{suffix}")
    fit = fit_weights("w", read_weights(path), small(), 5)
    assert fit.notes == []
    assert fit.arrays.keys() == found.keys()
    assert all(torch.equal(fit.arrays[name], values) for name, values in found.items())


def test_another_number_of_classes_leaves_the_classifier_and_says_so() -> None:
    fit = fit_weights("w", arrays(small(7)), small(5), 5)
    assert fit.notes == ["w: the classifier fc is fresh, for 5 classes, as the weights are for 7."]
    assert arrays(small()).keys() - fit.arrays.keys() == {"fc.weight", "fc.bias"}


def test_weights_without_a_classifier_serve_too() -> None:
    found = {name: values for name, values in arrays(small()).items() if not name.startswith("fc.")}
    fit = fit_weights("w", found, small(), 5)
    assert fit.notes == ["w: the classifier fc is fresh, for 5 classes, as the weights have none."]


def test_counters_may_be_missing_and_more_is_said() -> None:
    found = {name: values for name, values in arrays(small()).items() if "num_batches" not in name}
    fit = fit_weights("w", found | {"aux.weight": torch.zeros(3)}, small(), 5)
    assert fit.notes == ["w also holds aux.weight, for which the network has no place; left out."]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight


def test_shared_weights_may_stand_under_any_of_their_names() -> None:
    found = arrays(Tied())
    del found["one.weight"]
    assert fit_weights("w", found, Tied(), 10).arrays.keys() == {"one.weight", "one.bias"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda a: a | {"conv1.weight": torch.zeros(8, 3, 3, 3)},
            "conv1.weight is 8 × 3 × 3 × 3 there and 8 × 3 × 7 × 7",
        ),
        (
            lambda a: {n: v for n, v in a.items() if not n.startswith("layer3")},
            r"lacks layer3\.0\.conv1\.weight, .* more",
        ),
        (lambda a: a | {"bn1.bias": torch.full((8,), torch.nan)}, r"not finite, in bn1\.bias"),
        (lambda a: {}, "lacks conv1"),
        (lambda a: a | {"bn1.bias": torch.zeros(8, dtype=torch.complex64)}, r"bn1\.bias as torch\.complex64"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change: Any, sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        fit_weights("w", change(arrays(small())), small(), 5)


def test_a_wider_network_is_told_by_its_first_few_shapes() -> None:
    with pytest.raises(LockstepError, match=r"^w does not fit the network: conv1\.weight is 16 .* and \d+ more; use"):
        fit_weights("w", arrays(small(width=16)), small(), 5)


def test_a_whole_module_and_junk_are_sentences_without_torchs_own(tmp_path: Path) -> None:
    torch.save(small(), tmp_path / "module.pth")
    (tmp_path / "junk.pth").write_bytes(b"e junk")
    for name, words in (
        ("module.pth", r"whole pickled module, .* which is not unpickled; save model\.state_dict\(\)\.$"),
        ("junk.pth", r"no weights file \(neither safetensors nor a state_dict\); .*\.$"),
    ):
        with pytest.raises(LockstepError, match=words) as caught:
            read_weights(tmp_path / name)
        assert "\x1b" not in str(caught.value)


class Trap:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("sprung"),))


def test_nothing_but_tensors_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"a": torch.zeros(2)}, "trap": Trap()}, "trap.pth")
    with pytest.raises(LockstepError, match=r"trap\.pth hold a whole pickled module, or another object"):
        read_weights(Path("trap.pth"))
    assert not Path("sprung").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@given(data=st.binary(max_size=200), cut=st.integers(0, 400))
def test_damaged_files_are_sentences(suffix: str, data: bytes, cut: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("files") / f"damaged{suffix}"
    (save_file if suffix == ".safetensors" else write_pth)({"a": torch.zeros(9)}, path)
    path.write_bytes(path.read_bytes()[:cut] + data)
    # What was added may do no harm.
    with contextlib.suppress(LockstepError):
        assert isinstance(read_weights(path), dict)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("none.pth", "cannot be read"), ("none.safetensors", "cannot be read"), ("a.onnx", "neither")],
)
def test_other_files_are_sentences(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=sentence):
        read_weights(tmp_path / name)


def test_libraries_give_published_weights_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up torchvision with its way to name weights."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    (tmp_path / "torchvision" / "models.py").write_text(
        "import torch\n"
        "class Weights:\n"
        "    def __init__(self, value): self.value = value\n"
        "    def get_state_dict(self, progress, check_hash): return {'a': torch.full((2,), self.value)}\n"
        "class Tiny_Weights:\n"
        "    V1, DEFAULT = Weights(1.0), Weights(2.0)\n"
        "def get_weight(name): return getattr({'Tiny_Weights': Tiny_Weights}[name.split('.')[0]], name.split('.')[1])\n"
        "def get_model_weights(name): return {'tiny': Tiny_Weights}[name]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with imported_anew("torchvision"):
        assert fetch_weights("torchvision:tiny")["a"].tolist() == [2.0, 2.0]
        assert fetch_weights("torchvision:Tiny_Weights.V1")["a"].tolist() == [1.0, 1.0]
        with pytest.raises(LockstepError, match=r"no weights to give for model\.weights = torchvision:other"):
            fetch_weights("torchvision:other")
