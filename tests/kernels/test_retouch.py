"""The kernels of augmentation against Pillow, level by level, and against their plain version, bit by bit."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from lockstep.data import retouch
from lockstep.data.device_batch import DevicePath
from lockstep.data.order import Cursor, plan_step
from lockstep.data.policy import NUM_OPERATIONS, Operations, apply_operation, plan_amounts
from lockstep.data.retouch import LEVELS, Augmentation, Retouch, draw_retouch
from lockstep.engine.recorded import refuse_waits
from lockstep.kernels import retouch_kernel
from lockstep.kernels.retouch_kernel import change_squares
from tests.data.test_pipeline import MEAN, STD, take, train_pipeline
from tests.data.test_policy import ORACLE, squares_of
from tests.data.test_retouch import EVERY, ONLY, WHOLE, _no_teams, squares  # noqa: F401  (a fixture for all)

SIGNED = range(1, 10)
STRONG = range(1, 12)  # operations that have a strength
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def by_kernel(pixels: np.ndarray, operations: Operations) -> np.ndarray:
    """The levels that the kernel makes of N × size × size × RGB."""
    drawn = Retouch(None, operations, None, None, slice(None))
    levels = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().contiguous(memory_format=torch.channels_last)
    out = torch.full_like(levels, torch.nan)
    change_squares(levels, drawn.write_plan(*pixels.shape[:2]), out, *LEVELS, has_levels=True)
    return out.permute(0, 2, 3, 1).numpy()


def list_cases(strengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Kind, strength and sign of every operation; once for what it has not."""
    return [
        (kind, strength, sign)
        for kind in range(NUM_OPERATIONS)
        for strength in (strengths if kind in STRONG else (0,))
        for sign in ((-1, 1) if kind in SIGNED else (1,))
    ]


def check_against_pillow(pixels: np.ndarray, cases: list[tuple[int, int, int]]) -> None:
    kinds, strengths, signs = map(np.array, zip(*cases, strict=True))
    found = by_kernel(pixels, Operations(kinds, plan_amounts(kinds, strengths, signs < 0)))
    for square, (kind, strength, sign), levels in zip(pixels, cases, found, strict=True):
        expected = np.asarray(ORACLE[kind](Image.fromarray(square), strength / 30, sign))
        assert np.array_equal(levels, expected), (kind, strength, sign)


@pytest.mark.parametrize(
    ("size", "strengths"),
    [(1, (30,)), (2, (30,)), (5, (0, 1, 17, 30)), (32, (2, 11, 30)), (33, (4, 18, 29)), (64, (8, 15, 30))],
)
def test_every_operation_gives_pillows_levels(
    size: int, strengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if size > 33:
        monkeypatch.setattr(retouch_kernel, "BLOCK", 4096)  # the interpreter's time is a program's, whatever its size
    cases = list_cases(strengths)
    pictures = squares_of(size)[: 1 if size == 1 else 3]  # the others are below
    pixels = np.stack([pictures[number % len(pictures)] for number in range(len(cases))])
    check_against_pillow(pixels, cases)


@pytest.mark.parametrize("size", [128, 224])
def test_large_squares_are_counted_block_by_block(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retouch_kernel, "BLOCK", 16384)
    cases = [case for case in list_cases((19,)) if case[0] in ((3, 5, 8, 9, 12, 13) if size == 128 else (8, 12, 13))]
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3))
    # Few levels and many of each: equalize takes wide steps, autocontrast has something to stretch.
    pixels = np.stack([(noise // (3 + number % 2) + 20).astype(np.uint8) for number in range(len(cases))])
    check_against_pillow(pixels, cases)


def test_flat_and_extreme_squares_are_pillows_too() -> None:
    size = 8
    halves = np.zeros((size, size, 3), np.uint8)
    halves[:, size // 2 :] = 255
    spot = np.full_like(halves, 77)
    spot[0, -1] = 200
    pictures = [np.full_like(halves, level) for level in (0, 31, 255)] + [halves, spot]
    # Those that look at a whole square, or go beyond its levels.
    cases = [case for case in list_cases((30,)) if case[0] in (0, 6, 7, 8, 9, 10, 11, 12, 13)]
    check_against_pillow(np.concatenate([np.stack(pictures)] * len(cases)), [c for c in cases for _ in pictures])


def crop_from(levels: Tensor) -> Callable[..., None]:
    """A stand-in for the crop: the rows of its table are numbers of squares, whose levels need not be whole."""

    def crop(table: Tensor, out: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        scale, shift = (
            torch.tensor(values, device=out.device)[:, None, None]
            for values in ([1 / (255 * s) for s in std], [m / s for m, s in zip(mean, std, strict=True)])
        )
        out.copy_(levels[table[:, 0]] * scale - shift)

    return crop


def keep(array: Tensor) -> Tensor:
    return array


def call(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    function(*arguments, **options)


def draw(count: int, size: int, wanted: Augmentation) -> Retouch:
    drawn = draw_retouch(1, plan_step(Cursor(), count, count, 0, 1, 0, paired=wanted.mixes), size, wanted)
    assert drawn is not None
    return drawn


def make_both(
    count: int, size: int, wanted: Augmentation, dtype: torch.dtype, device: str = "cpu", send: retouch.Send = keep
) -> list[Tensor]:
    """One batch by kernels and one by their plain version."""
    levels = (torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0)) * 255).to(device)
    levels[::3] = levels[::3].round()  # as of images that need no resizing
    table = torch.arange(count, device=device)[:, None]
    made = []
    for launch in (call, None):
        images = torch.full((count, 3, size, size), torch.nan, dtype=dtype, device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        made.append(draw(count, size, wanted).make_batch(table, images, crop_from(levels), MEAN, STD, send, launch))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*ONLY, "every"])
def test_a_batch_is_that_of_the_plain_version(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retouch, "MAX_ELEMENTS", 10 * 3 * 13**2)  # so that a batch goes in parts
    found, expected = make_both(21, 13, ONLY.get(name, EVERY), dtype)
    assert found.dtype == dtype
    # The interpreter cuts off what BF16 has no place for, and a GPU rounds.
    allowed = 4 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
    assert (found.float() - expected.float()).abs().max() <= allowed
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("wanted", [Augmentation(pad=4, erase=1.0), Augmentation(pad=1, policy="trivial")])
def test_sides_of_no_particular_size(wanted: Augmentation) -> None:
    for size in (5, 25):  # a part of a block, and a block with a part of another
        found, expected = make_both(4, size, wanted, torch.float16)
        assert torch.equal(found, expected)


def test_no_squares_are_no_work() -> None:
    nothing = np.zeros(0, np.int64)
    drawn = Retouch(None, Operations(nothing, np.zeros(0)), None, None, slice(None))
    images = torch.empty(0, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    change_squares(images, drawn.write_plan(0, 8), images, *LEVELS, has_levels=True)


class Calls(TorchDispatchMode):
    """Names of what PyTorch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_batch_is_one_array_for_the_device_and_three_launches_behind_its_crop() -> None:
    sent, launched = [], []
    images = torch.empty(4, 3, 8, 8, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    table, drawn = torch.zeros(4, 10), draw(4, 8, EVERY)

    def crop(table: Tensor, out: Tensor, *_: object) -> None:
        launched.append("crop")

    def launch(function: Callable[..., None], *_: object, **__: object) -> None:
        launched.append(function.__name__)

    with Calls() as calls:
        drawn.make_batch(table, images, crop, MEAN, STD, lambda array: sent.append(array) or array, launch)
    assert launched == ["crop", "change_squares", "mix_squares"]  # of which the second has two
    assert len(sent) == 1
    assert calls.names <= {"empty_like", "slice", "select", "lift_fresh"}  # nothing that a device would have to do


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_pipeline_with_kernels_gives_what_it_gives_without(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"augmentation": EVERY, "global_batch": 9, "on_device": True, "world_size": world_size, **WHOLE}
    plain = take(2, train_pipeline(squares(21), **options))
    launched, launch = [], DevicePath.launch

    def watch(path: DevicePath, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        def call_watched(*arguments: Any, **options: Any) -> None:
            launched.append((function.__name__, path._launch_lock.locked()))
            function(*arguments, **options)

        launch(path, call_watched, *arguments, **options)

    monkeypatch.setattr(DevicePath, "has_kernels", True)
    monkeypatch.setattr(DevicePath, "launch", watch)
    for one, other in zip(take(2, train_pipeline(squares(21), **options)), plain, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    # Two threads must not be the first to launch a kernel at once.
    assert set(launched) == {(name, True) for name in ("crop_resize_plain", "change_squares", "mix_squares")}


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels import retouch_kernel as kernels

SIZES = {"plan": "*i64", "tables": "*u8", "size": "i32"}

def compile(kernel, types, **constants):
    names = kernel.arg_names
    types = dict.fromkeys(names, "fp32") | SIZES | types | dict.fromkeys(constants, "constexpr")
    given = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(kernel, {name: types[name] for name in names}, constexprs=given, attrs=aligned)
    options = {"enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"]
    assert "fma.rn" not in made.asm["ptx"], kernel
    assert made.metadata.shared <= 16384, made.metadata.shared
    return made.asm["ttgir"]

assert "histogram" in compile(kernels._tables, {"squares": "*fp32"}, BLOCK=kernels.COUNT_BLOCK)
for half in ("*fp32", "*fp16", "*bf16"):
    for levels, squares in ((True, "*fp32"), (False, half)):
        text = compile(kernels._change, {"squares": squares, "out": half}, LEVELS=levels, BLOCK=kernels.BLOCK)
        assert "convert_layout" not in text  # each thread keeps its values
    compile(kernels._mix, {"images": half}, BLOCK=kernels.COUNT_BLOCK)
"""


def test_the_compiler_takes_what_the_interpreter_does() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def send_pinned(array: Tensor) -> Tensor:
    return array.pin_memory().to("cuda", non_blocking=True)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize(("count", "size"), [(512, 32), (64, 128), (33, 224)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_a_batch_is_that_of_the_plain_version(count: int, size: int, dtype: torch.dtype) -> None:
    for wanted in (Augmentation(policy="trivial"), Augmentation(pad=4, erase=0.5), EVERY):
        found, expected = make_both(count, size, wanted, dtype, "cuda", send_pinned)
        different = (found != expected).flatten(1).any(1).nonzero().flatten().tolist()
        assert not different, (wanted, different)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize(("count", "size"), [(512, 32), (64, 128)])
def test_on_a_gpu_every_operation_gives_pillows_levels(count: int, size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    pixels[::2] //= 3  # dark ones: something to stretch, and wide steps to take
    operations = draw(count, size, Augmentation(policy="trivial")).operations
    assert operations is not None
    assert set(operations.kinds) == set(range(NUM_OPERATIONS))
    drawn = Retouch(None, operations, None, None, slice(None))
    levels = torch.from_numpy(pixels).cuda().permute(0, 3, 1, 2).float().contiguous(memory_format=torch.channels_last)
    out = torch.full_like(levels, torch.nan)
    change_squares(levels, send_pinned(drawn.write_plan(count, size)), out, *LEVELS, has_levels=True)
    found = out.permute(0, 2, 3, 1).cpu().numpy()
    for square, kind, amount, changed in zip(pixels, operations.kinds, operations.amounts, found, strict=True):
        assert np.array_equal(changed, apply_operation(square, int(kind), float(amount))), (kind, amount)


@pytest.mark.gpu
@ON_GPU
def test_the_host_waits_for_no_kernel() -> None:
    drawn = draw(64, 32, EVERY)
    images = torch.empty(64, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)

    def crop(table: Tensor, out: Tensor, *_: object) -> None:
        out.fill_(100)

    for _ in range(2):  # the first compiles and allocates
        with refuse_waits():
            drawn.make_batch(torch.zeros(64, 10), images, crop, MEAN, STD, send_pinned, call)
