"""nvJPEG: what it is given, and on a GPU, that it shows the same pictures as libjpeg-turbo."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.decode import decode
from lockstep.data.nvjpeg import Nvjpeg, has_nvjpeg, load_decode
from lockstep.data.reader import SampleReader
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


def test_torchvisions_library_is_loaded_and_the_package_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing all of it took each rank of a run four seconds."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "image.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    loaded: list[str] = []
    decode = object()
    ops = SimpleNamespace(load_library=loaded.append, image=SimpleNamespace(decode_jpegs_cuda=decode))
    monkeypatch.setattr("lockstep.data.nvjpeg.torch.ops", ops)
    assert load_decode() is decode
    assert loaded == [str(package / "image.so")]


@pytest.mark.gpu
@pytest.mark.skipif(not has_nvjpeg(), reason="needs a CUDA device and torchvision")
@pytest.mark.parametrize("subsampling", [0, 2])
def test_nvjpeg_shows_the_same_pictures(subsampling: int) -> None:
    encoded = [encode(picture(90 + turn, 120 - turn, turn), subsampling=subsampling) for turn in range(40)]
    planes = Nvjpeg(torch.device("cuda")).decode(list(encoded), torch.cuda.current_stream())
    assert planes is not None
    for data, plane in zip(encoded, planes, strict=True):
        expected = decode(data).astype(float)
        assert plane.shape == (3, *expected.shape[:2])
        # Colour at half the resolution is enlarged by each decoder in its own way.
        limit = 1.5 if subsampling == 0 else 10.0
        assert np.abs(plane.permute(1, 2, 0).cpu().numpy() - expected).mean() < limit


@pytest.mark.gpu
@pytest.mark.skipif(not has_nvjpeg(), reason="needs a CUDA device and torchvision")
def test_a_damaged_image_among_others_is_a_refusal_or_a_picture_never_a_crash() -> None:
    good = encode(Image.fromarray(picture(90, 120)))
    planes = Nvjpeg(torch.device("cuda")).decode([good, b"\xff\xd8 nonsense \xff\xd9", good], None)
    assert planes is None or len(planes) == 3
