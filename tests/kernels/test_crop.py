"""Crop, resize, flip and normalise in one pass, against PyTorch's own resize in FP64, Pillow and a plain sum."""

import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from lockstep.data.augment import central_crops
from lockstep.kernels.crop import crop_resize, crop_resize_plain, crop_table, interleaved, planar

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEVELS = (0.0, 0.0, 0.0), (1 / 255,) * 3  # mean and std that leave levels as they are
EXACT_LEVELS, PILLOW_LEVELS = 0.01, 1.5  # as the module's docstring says
Box = tuple[float, float, float, float]
Crop = Callable[[Tensor, Tensor, tuple[float, ...], tuple[float, ...]], None]
BOTH = pytest.mark.parametrize("crop", [crop_resize, crop_resize_plain])


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def empty(count: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count, 3, size, size), math.nan, dtype=dtype).to(memory_format=torch.channels_last)


def crop_one(crop: Crop, image: np.ndarray, box: Box, size: int, *, flip: bool = False, confined: bool) -> np.ndarray:
    """One interleaved image's levels, size × size × 3."""
    sides = np.array([image.shape[:2]])
    table = crop_table([image.ctypes.data], interleaved(sides[:, 1]), sides, [box], [flip], confined=confined)
    out = empty(1, size)
    crop(table, out, *LEVELS)
    return out[0].permute(1, 2, 0).numpy()


def resize_exactly(image: np.ndarray, size: int) -> np.ndarray:
    """A whole image by PyTorch's own anti-aliased resize in FP64, size × size × 3."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].double()
    resized = torch.nn.functional.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[np.ndarray, tuple[int, int, int, int], bool]]:
    """Up to three images of different sizes, each with a whole box in it and a flip."""
    batch = []
    for seed in range(draw(st.integers(1, 3))):
        height, width = draw(st.integers(1, 24)), draw(st.integers(1, 24))
        box_height, box_width = draw(st.integers(1, height)), draw(st.integers(1, width))
        top, left = draw(st.integers(0, height - box_height)), draw(st.integers(0, width - box_width))
        batch.append((noise(height, width, seed), (top, left, box_height, box_width), draw(st.booleans())))
    return batch


@given(batches(), st.integers(2, 12), st.sampled_from(["interleaved", "planar", "grey"]))
@settings(max_examples=30, deadline=None)
def test_a_training_crop_is_cut_out_and_then_resized(batch: list, size: int, layout: str) -> None:
    sides = np.array([image.shape[:2] for image, _, _ in batch])
    strides = {
        "interleaved": interleaved(sides[:, 1]),
        "planar": planar(sides[:, 0], sides[:, 1]),
        "grey": planar(sides[:, 0], sides[:, 1], channels=1),
    }[layout]
    if layout == "grey":
        batch = [(np.repeat(image[..., :1], 3, axis=2), box, flip) for image, box, flip in batch]
    memory = [
        image if layout == "interleaved" else np.ascontiguousarray(image.transpose(2, 0, 1)) for image, _, _ in batch
    ]
    boxes, flips = [box for _, box, _ in batch], [flip for _, _, flip in batch]
    table = crop_table([pixels.ctypes.data for pixels in memory], strides, sides, boxes, flips, confined=True)
    for crop in (crop_resize, crop_resize_plain):
        out = empty(len(batch), size)
        crop(table, out, *LEVELS)
        for (image, (top, left, height, width), flip), found in zip(batch, out, strict=True):
            expected = resize_exactly(image[top : top + height, left : left + width], size)
            expected = expected[:, ::-1] if flip else expected
            assert np.abs(found.permute(1, 2, 0).numpy() - expected).max() < EXACT_LEVELS


def sum_by_hand(image: np.ndarray, box: Box, size: int, row: int, column: int) -> np.ndarray:
    """One output pixel of a box, each pixel of the image weighed one by one: the resize's definition."""
    top, left, height, width = box
    reach_y, reach_x = max(1.0, height / size), max(1.0, width / size)
    center_y, center_x = top + (row + 0.5) * height / size, left + (column + 0.5) * width / size
    total, weights = np.zeros(3), 0.0
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            weight_y = max(0.0, 1 - abs(y + 0.5 - center_y) / reach_y)
            weight_x = max(0.0, 1 - abs(x + 0.5 - center_x) / reach_x)
            total += weight_y * weight_x * image[y, x]
            weights += weight_y * weight_x
    return total / weights


@BOTH
@pytest.mark.parametrize(
    ("shape", "box"), [((11, 17), (1.3, 2.7, 7.9, 12.2)), ((9, 9), (3.5, 3.25, 1.5, 2)), ((1, 1), (0, 0, 1, 1))]
)
@pytest.mark.parametrize("flip", [False, True])
def test_a_fractional_box_is_the_sum_over_the_whole_image(
    crop: Crop, shape: tuple[int, int], box: Box, flip: bool
) -> None:
    image, size = noise(*shape), 5
    found = crop_one(crop, image, box, size, flip=flip, confined=False)
    expected = np.array([[sum_by_hand(image, box, size, row, column) for column in range(size)] for row in range(size)])
    assert np.abs(found - (expected[:, ::-1] if flip else expected)).max() < EXACT_LEVELS


@BOTH
@pytest.mark.parametrize("shape", [(40, 57), (23, 64), (12, 12)])
def test_the_evaluation_crop_is_that_of_pillow(crop: Crop, shape: tuple[int, int]) -> None:
    image, size = noise(*shape), 16
    (box,) = central_crops(np.array([shape]), resize=18, size=size)
    top, left, height, width = box.tolist()
    edges = (left, top, left + width, top + height)
    expected = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=edges))
    found = crop_one(crop, image, box, size, confined=False)
    assert np.abs(found - expected.astype(float)).max() < PILLOW_LEVELS


@BOTH
@pytest.mark.parametrize("flip", [False, True])
def test_nothing_beside_a_confined_crop_leaks_in(crop: Crop, flip: bool) -> None:
    image = np.full((20, 30, 3), 255, np.uint8)
    image[5:12, 8:19] = 0
    for box in ((5, 8, 7, 11), (5.2, 8.4, 6.5, 10.1), (5 - 1e-9, 8 + 1e-9, 7 + 2e-9, 11)):
        assert np.abs(crop_one(crop, image, box, 6, flip=flip, confined=True)).max() == 0
    assert crop_one(crop, image, (5, 8, 7, 11), 6, flip=flip, confined=False).max() > 0


@BOTH
@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_levels_are_normalised_and_cast(crop: Crop, dtype: torch.dtype, digits: float) -> None:
    image = noise(8, 8)
    table = crop_table([image.ctypes.data], interleaved([8]), [(8, 8)], [(0, 0, 8, 8)], [False], confined=True)
    out = empty(1, 8, dtype)
    crop(table, out, MEAN, STD)
    expected = (image / 255 - np.array(MEAN)) / np.array(STD)
    assert np.abs(out[0].permute(1, 2, 0).double().numpy() - expected).max() < digits


@BOTH
def test_a_block_of_pixels_inside_a_larger_memory_is_enough(crop: Crop) -> None:
    whole = noise(40, 50)
    part = whole[7:30, 9:44]
    strides = [(whole.strides[0], whole.strides[1], whole.strides[2])]
    table = crop_table([part.ctypes.data], strides, [part.shape[:2]], [(0, 0, *part.shape[:2])], [False], confined=True)
    out = empty(1, 7)
    crop(table, out, *LEVELS)
    expected = resize_exactly(np.ascontiguousarray(part), 7)
    assert np.abs(out[0].permute(1, 2, 0).numpy() - expected).max() < EXACT_LEVELS


@BOTH
def test_no_images_are_no_work(crop: Crop) -> None:
    nothing = np.empty((0, 2), np.int64)
    table = crop_table([], interleaved(nothing[:, 1]), nothing, np.empty((0, 4)), [], confined=True)
    assert table.shape == (0, 10)
    crop(table, empty(0, 8), MEAN, STD)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lockstep.kernels.crop_kernel import BLOCK, crop_kernel

names = crop_kernel.arg_names
types = {"table": "*i64", "out": "*fp16", "BLOCK": "constexpr"}
types |= dict.fromkeys(["out_height", "out_width", "blocks"], "i32")
signature = {name: types.get(name, "fp32") for name in names}
aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
source = ASTSource(crop_kernel, signature, constexprs={(names.index("BLOCK"),): BLOCK}, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"])
"""


def test_compiled_for_a_gpu_each_thread_keeps_its_values() -> None:
    # Moving them between threads at every load is what the compiler does if the store's addresses look contiguous.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tt.store" in done.stdout
    assert "convert_layout" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["interleaved", "planar"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("confined", [True, False])
def test_on_a_gpu_the_kernel_equals_the_plain_version(layout: str, dtype: torch.dtype, confined: bool) -> None:
    random = np.random.default_rng(0)
    sides = np.array([(375, 500), (500, 333), (64, 48), (1, 1), (1600, 1200), (30, 900), (8, 7000)])
    images = [torch.from_numpy(noise(*shape)).cuda() for shape in sides]
    strides = interleaved(sides[:, 1])
    if layout == "planar":
        images, strides = [image.permute(2, 0, 1).contiguous() for image in images], planar(sides[:, 0], sides[:, 1])
    shares = random.uniform(0.1, 1, sides.shape)
    extents = sides * shares if not confined else np.ceil(sides * shares)
    corners = (sides - extents) * random.uniform(0, 1, sides.shape)
    boxes = np.concatenate([np.floor(corners) if confined else corners, extents], axis=1)
    flips = random.integers(0, 2, len(sides)).astype(bool)
    table = crop_table([image.data_ptr() for image in images], strides, sides, boxes, flips, confined=confined).cuda()
    found, expected = empty(len(images), 224, dtype).cuda(), empty(len(images), 224, torch.float32).cuda()
    crop_resize(table, found, *LEVELS)
    crop_resize_plain(table, expected, *LEVELS)
    rounding = {torch.float32: 0.0, torch.float16: 0.0625, torch.bfloat16: 0.5}[dtype]  # half a step at 255
    assert (found.float() - expected).abs().max().item() < EXACT_LEVELS + rounding
