"""Networks from the user's code, torchvision and timm: found, built alike on every rank, or refused in one sentence."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.models import build_started
from lockstep.models.vetting import vet_network
from tests.anew import imported_anew

CODE = """
import torch
from torch import nn

table = nn.Linear(2, 2)
number = 3

class Net(nn.Module):
    def __init__(self, num_classes, width=4, kinds=()):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.GELU())
        self.head = nn.Linear(width, num_classes)
    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))

class Outer:
    Inner = Net

def build_nothing(num_classes):
    return [num_classes]

def build_double(num_classes):
    return Net(num_classes).double()

def leave(num_classes):
    raise SystemExit("no")
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of networks in the current directory, and made-up libraries beside it."""
    (tmp_path / "mynets").mkdir()
    (tmp_path / "mynets" / "__init__.py").write_text("")
    (tmp_path / "mynets" / "small.py").write_text(CODE)
    (tmp_path / "mynets" / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    with imported_anew("mynets", "timm", "torchvision"):
        yield tmp_path
    sys.path[:] = path


def build(name: str, seed: int = 1, sizes: tuple[int, ...] = (8,), **settings: Any) -> nn.Module:
    return build_started(name, 5, seed, sizes, settings)


@pytest.mark.parametrize("name", ["mynets.small:Net", "mynets.small:Outer.Inner", "mynets.small:build_double"])
def test_a_network_is_found_from_the_current_directory(name: str) -> None:
    model = build(name)
    assert model(torch.randn(3, 3, 8, 8)).shape == (3, 5)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_settings_are_passed_on() -> None:
    model = build("mynets.small:Net", width=7, kinds=[1, 2])
    assert model.get_parameter("head.weight").shape == (5, 7)


def test_the_seed_alone_decides_the_weights_and_disturbs_no_other_draw() -> None:
    torch.manual_seed(4)
    random.seed(4)
    before = torch.get_rng_state(), random.getstate()
    first = build("mynets.small:Net")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.rand(3)
    second, other = build("mynets.small:Net"), build("mynets.small:Net", seed=2)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.get_parameter("head.weight"), other.get_parameter("head.weight"))


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("mynets.none:Net", {}, r"cannot be imported .*mynets\.none.*start from the folder that holds mynets"),
        ("mynets.broken:Net", {}, "cannot be imported .*nothing_of_that_name"),
        ("mynets.small:Nett", {}, r"mynets\.small has no Nett; check the name"),
        ("mynets.small:number", {}, "is an int, which cannot be called"),
        ("mynets.small:table", {}, "is a Linear, which cannot be called"),
        ("mynets.small:build_nothing", {}, r"gave a list and no torch\.nn\.Module"),
        ("mynets.small:leave", {}, r"failed when called with num_classes = 5 \(SystemExit: no\)"),
        ("mynets.small:Net", {"depth": 3}, "failed when called with num_classes = 5, depth = 3 .*unexpected keyword"),
        ("mynets.small:Net", {"num_classes": 3}, "must not hold num_classes"),
        ("mynets.small:", {}, r"write package\.module:name"),
        ("os:system", {}, "in Python's own library"),
        ("subprocess:run", {"args": "true"}, "in Python's own library"),
        ("timm:vit", {}, "needs timm, which is not installed; install it with `pip install timm`"),
        ("torchvision:vit", {}, "needs torchvision, which is not installed; install it with `pip install torchvision`"),
    ],
)
def test_a_mistake_is_one_sentence(
    name: str, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "not installed" in sentence:
        monkeypatch.setattr("lockstep.models.outside.find_spec", lambda library: None)
    with pytest.raises(LockstepError, match=sentence) as caught:
        build(name, **settings)
    assert str(caught.value).count("\n") == 0


def write_library(folder: Path, name: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / name / path).parent.mkdir(exist_ok=True)
        (folder / name / path).write_text(text)


def test_timms_networks_go_by_name(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = "from mynets.small import Net\ndef create_model(name, pretrained=True, num_classes=1000, **more):\n"
    create += "    assert not pretrained and name == 'tiny.in1k'\n    return Net(num_classes, **more)\n"
    write_library(code, "timm", {"__init__.py": create})
    monkeypatch.syspath_prepend(str(code))
    assert build("timm:tiny.in1k", width=6).get_parameter("head.weight").shape == (5, 6)
    with pytest.raises(LockstepError, match="timm:other failed when called with pretrained = False, num_classes = 5"):
        build("timm:other")


def test_a_name_that_is_nearly_one_of_timms_is_answered_with_it(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "def list_models(): return ['convnext_tiny', 'vit_small']"
    write_library(code, "timm", {"__init__.py": f"{listed}\ndef create_model(name, **given): raise KeyError(name)"})
    monkeypatch.syspath_prepend(str(code))
    for name, end in (("convnext_tinyy", r" The nearest is timm:convnext_tiny\.$"), ("vit_small.x", r"settings\.$")):
        with pytest.raises(LockstepError, match=end):
            build(f"timm:{name}")


def test_torchvisions_networks_go_by_name(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = "from mynets.small import Net\ndef get_model(name, weights='DEFAULT', num_classes=1000, **more):\n"
    models += "    assert weights is None and name == 'tiny'\n    return Net(num_classes, **more)\n"
    write_library(code, "torchvision", {"__init__.py": "", "models.py": models})
    monkeypatch.syspath_prepend(str(code))
    assert build("torchvision:tiny", width=6).get_parameter("head.weight").shape == (5, 6)


def test_a_library_that_does_not_import_is_a_sentence(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_library(code, "timm", {"__init__.py": "raise OSError('built for another torch')"})
    monkeypatch.syspath_prepend(str(code))
    with pytest.raises(LockstepError, match=r"timm cannot be imported .*another torch.*install one that fits"):
        build("timm:tiny")


class Odd(nn.Module):
    """A network with something wrong, or unusual, about it."""

    def __init__(self, num_classes: int, what: str = "") -> None:
        super().__init__()
        self.what = what
        self.conv = nn.Conv2d(3, 4, 4, 4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.LazyLinear(num_classes) if what == "lazy" else nn.Linear(4, num_classes)
        if what == "complex":
            self.bad = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        if what in ("infinite", "passing"):
            self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=what == "infinite")
        if what == "complex buffer":
            self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        if what == "lazy norm":
            self.norm = nn.LazyBatchNorm2d(affine=False)  # type: ignore[assignment]
        if what == "eight bits":
            self.register_buffer("scale", torch.ones(4).to(torch.float8_e4m3fn))
        if what == "sparse":
            self.words = nn.Embedding(4, num_classes, sparse=True)
        if what == "unused":
            self.unused = nn.Linear(4, 4)
        if what == "frozen":
            self.requires_grad_(False)
        if what == "integers":
            self.register_buffer("order", torch.arange(4))
            self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, images: Tensor) -> Any:
        logits = self.head(self.norm(self.conv(images)).mean((2, 3)))
        if self.what == "sparse":
            logits = logits + self.words(torch.zeros(len(images), dtype=torch.int64))
        if self.what == "detached":
            return logits.detach()
        if self.what == "aux" and self.training:
            return logits, logits
        if self.what == "wide":
            return logits[:, :, None]
        return logits.argmax(1) if self.what == "answers" else logits


HERE = f"{__name__}:Odd"


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("lazy", r"a layer without a size, head\.weight"),
        ("lazy norm", r"a layer without a size, norm\.running_mean"),
        ("complex", "complex weights, bad"),
        ("infinite", "numbers that are not finite, mask.*persistent=False"),
        ("complex buffer", "no checkpoint can hold, turn"),
        ("sparse", r"sparse gradients, of words\.weight"),
        ("frozen", "no weights to train"),
        ("detached", "has no gradients"),
        ("aux", r"gives a tuple in training where logits of shape \(2, 5\)"),
        ("wide", r"of shape \(2, 5, 1\) in validation for 2 images and 5 classes"),
        ("answers", r"gives torch\.int64 in validation where floating-point logits are wanted"),
    ],
)
def test_what_cannot_be_trained_is_said_before_it_starts(what: str, sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        build(HERE, what=what)


class Remembering(nn.Module):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None: ...


def test_a_state_that_no_checkpoint_holds_is_refused() -> None:
    model = Odd(5)
    model.norm.add_module("memory", Remembering())
    with pytest.raises(LockstepError, match=r"no checkpoint holds, norm\.memory\._extra_state; keep it in buffers"):
        vet_network("it", model, 5, (8,))


def test_images_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        LockstepError, match=r"failed on images of 2 × 2 pixels \(RuntimeError.*change data\.image_size"
    ):
        build(HERE, sizes=(8, 2))


@pytest.mark.parametrize("what", ["", "unused", "integers", "passing", "eight bits"])
def test_looking_leaves_no_trace(what: str) -> None:
    model, own = build(HERE, what=what), Odd(5, what)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, buffer in own.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer.to(model.get_buffer(name).dtype)), name
