"""nvJPEG: what it is given, and on a GPU, that it shows the same pictures as libjpeg-turbo."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.augment import Sides
from lockstep.data.decode import decode
from lockstep.data.nvjpeg import Engine, Hardware, Nvjpeg, Torchvision, has_nvjpeg
from lockstep.data.reader import SampleReader
from lockstep.kernels.crop import crop_resize_plain, crop_table
from tests.data.pictures import BAD_AMONG_ODD, Pictures, encode, odd_photos, picture


def test_only_plain_colour_jpegs_go_to_nvjpeg() -> None:
    source = odd_photos(24)
    reader = SampleReader(source, bad_share=1.0)
    loaded = [reader.load(sample) for sample in range(24)]
    fit = [image.sample for image in loaded if image and Nvjpeg.can_decode(image)]
    assert fit == [sample for sample in range(24) if sample % 3 != 1]
    assert not set(fit) & set(BAD_AMONG_ODD)


@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_any_usual_chroma_goes_to_nvjpeg(subsampling: int) -> None:
    image = SampleReader(Pictures([encode(picture(40, 60), subsampling=subsampling)]), 0.0).load(0)
    assert image is not None
    assert Nvjpeg.can_decode(image)


def test_a_frame_header_that_contradicts_the_first_is_not_for_nvjpeg() -> None:
    good = encode(picture(40, 60))
    image = SampleReader(Pictures([good]), 0.0).load(0)
    assert image is not None
    assert Nvjpeg.can_decode(image)
    assert not Nvjpeg.can_decode(image._replace(header=image.header._replace(height=41)))
    at = next(at for at in range(len(good)) if good[at : at + 2] == b"\xff\xc0")
    assert not Nvjpeg.can_decode(image._replace(data=good[:at] + b"\xff\xc2" + good[at + 2 :]))  # progressive
    assert not Nvjpeg.can_decode(image._replace(data=good[:2] + b"\x00" + good[2:]))  # no segment begins there


ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_nvjpeg(), reason="needs a CUDA device and nvJPEG"),
]
ENGINES = pytest.mark.parametrize("kind", [pytest.param(kind, marks=ON_A_GPU) for kind in (Hardware, Torchvision)])


def sides_of(pictures: list[bytes]) -> Sides:
    return np.array([decode(item).shape[:2] for item in pictures], np.int64).reshape(-1, 2)


def decode_on_gpu(engine: Engine, encoded: list[bytes], sides: Sides) -> list[np.ndarray] | None:
    """The images, height × width × RGB, on the host again."""
    found = engine.decode(encoded, sides, torch.cuda.current_stream())
    if found is None:
        return None
    shown = []
    for row, (height, width) in enumerate(sides.tolist()):
        box = [(0, 0, height, width)]
        one = slice(row, row + 1)
        table = crop_table(found.addresses[one], found.strides[one], sides[one], box, [False], confined=True)
        out = torch.empty(1, 3, height, width, device="cuda")
        crop_resize_plain(table, out, mean=(0.0,) * 3, std=(1 / 255,) * 3)
        shown.append(out[0].permute(1, 2, 0).cpu().numpy())
    return shown


@ENGINES
@pytest.mark.parametrize("subsampling", [0, 2])
def test_nvjpeg_shows_the_same_pictures(kind: type, subsampling: int) -> None:
    engine = kind(torch.device("cuda"))
    for count in (40, 40, 7, 1):  # as many as before, and another number
        encoded = [encode(picture(90 + turn, 120 - turn, turn), subsampling=subsampling) for turn in range(count)]
        shown = decode_on_gpu(engine, encoded, sides_of(encoded))
        assert shown is not None
        for data, image in zip(encoded, shown, strict=True):
            expected = decode(data).astype(float)
            assert image.shape == expected.shape
            # Colour at half the resolution is enlarged by each decoder in its own way.
            assert np.abs(image - expected).mean() < (1.5 if subsampling == 0 else 10.0)


@ENGINES
def test_a_damaged_image_among_others_is_a_refusal_or_a_picture_never_a_crash(kind: type) -> None:
    good = encode(Image.fromarray(picture(90, 120)))
    engine = kind(torch.device("cuda"))
    sides = np.array([[90, 120]] * 3)
    for damaged in (b"\xff\xd8 nonsense \xff\xd9", good[: len(good) // 2] + b"\xff\xd9", b""):
        engine.decode([good, damaged, good], sides, None)
        shown = decode_on_gpu(engine, [good] * 3, sides)
        assert shown is not None
        assert all(np.abs(image - decode(good).astype(float)).mean() < 10 for image in shown)


@ENGINES
def test_threads_decode_at_once_without_mixing_their_pictures(kind: type) -> None:
    engine = kind(torch.device("cuda"))
    batches = [[encode(picture(80 + 8 * batch, 100 + turn, turn)) for turn in range(24)] for batch in range(4)]
    expected = [decode_on_gpu(engine, batch, sides_of(batch)) for batch in batches]

    def work(turn: int) -> bool:
        shown = decode_on_gpu(engine, batches[turn % 4], sides_of(batches[turn % 4]))
        truth = expected[turn % 4]
        assert shown is not None
        assert truth is not None
        return all(np.array_equal(one, other) for one, other in zip(shown, truth, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))
