"""Generated photos: as large as photographs, the same every time."""

from pathlib import Path

import numpy as np
import simplejpeg

from lockstep.bench.photos import build_photos, render_photo


def test_photos_are_about_as_large_as_photographs_on_the_web(tmp_path: Path) -> None:
    files = sorted(build_photos(tmp_path, 10).iterdir())
    assert len(files) == 10
    headers = [simplejpeg.decode_jpeg_header(file.read_bytes()) for file in files]
    assert {tuple(sorted(header[:2])) for header in headers} == {(375, 500)}
    assert {header[3] for header in headers} == {"420", "444"}
    assert 100_000 < np.mean([file.stat().st_size for file in files]) < 140_000


def test_a_photo_depends_on_its_number_alone(tmp_path: Path) -> None:
    assert np.array_equal(render_photo(3), render_photo(3))
    assert not np.array_equal(render_photo(3), render_photo(5))
    few, more = build_photos(tmp_path, 2), build_photos(tmp_path, 3)
    assert (few / "0001.jpeg").read_bytes() == (more / "0001.jpeg").read_bytes()


def test_photos_are_rendered_once_with_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    build_photos(tmp_path, 2, lambda done, total: calls.append((done, total)))
    build_photos(tmp_path, 2, lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]
