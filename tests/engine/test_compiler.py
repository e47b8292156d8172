"""What torch's compiler keeps, nobody else can have put there."""

import os
from pathlib import Path

import pytest

from lockstep.engine.compiler import guard_compiled
from lockstep.errors import LockstepError
from lockstep.private import COMPILED, find_compiled
from tests.engine import commands


def test_the_compilers_folder_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(COMPILED)
    guard_compiled()
    assert os.environ[COMPILED] == str(find_compiled())
    assert find_compiled().stat().st_mode & 0o777 == 0o700
    guard_compiled()  # and is taken again


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(COMPILED, str(find_compiled()))
    if is_link:
        (tmp_path / "theirs").mkdir(mode=0o700)
        find_compiled().symlink_to(tmp_path / "theirs")
    else:
        find_compiled().mkdir()
        find_compiled().chmod(0o777)
    with pytest.raises(LockstepError, match=f"others can write to it.*set {COMPILED} to a folder that only you can"):
        guard_compiled()


def test_a_folder_that_the_user_names_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILED, str(tmp_path / "shared"))
    guard_compiled()
    assert not (tmp_path / "shared").exists()


def test_no_headers_are_kept_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever folder torch is given for its code. The code is not compiled here, all that comes before is done."""
    from torch._inductor import codecache, config

    headers: list[object] = []
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", True)
    monkeypatch.setattr(config.cpp, "simdlen", 1)  # or it compiles a program for every kind of vectors
    monkeypatch.setattr(config.cpp, "cxx", ("true",))  # there need be no compiler for C++
    monkeypatch.setattr(codecache, "_precompile_header", lambda *order, **_: headers.append(order) or "header.h")
    monkeypatch.setenv(COMPILED, str(tmp_path))

    def order_code(answer: int) -> None:
        codecache.CppPythonBindingsCodeCache.load_pybinding_async(
            ["int"], f"int kernel() {{ return {answer}; }}", submit_fn=lambda work: None
        )

    order_code(1)
    assert len(headers) == 1
    guard_compiled()
    order_code(2)  # which is not known yet
    assert len(headers) == 1


def test_a_run_that_compiles_does_not_use_a_strangers_folder(tmp_path: Path) -> None:
    """torch's own choice, among temporary files, could be made by anybody before."""
    theirs = tmp_path / "cache" / "lockstep-compiled"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    (tmp_path / "tmp").mkdir()
    places = {"XDG_CACHE_HOME": str(theirs.parent), COMPILED: str(theirs), "TMPDIR": str(tmp_path / "tmp")}
    settings = ("data.train_images=20", "data.val_images=20", "train.global_batch=10", "train.compile=block")
    run = [f"--set={setting}" for setting in (*settings, "train.duration=1st", "optim.warmup=0st")]
    status, out, err = commands.run("train", "quickstart", "--ranks=1", *run, f"--out={tmp_path / 'run'}", **places)
    assert status == 0, err
    assert "left out     compiled by block" in out  # and the run goes on without
    assert "torch's compiler cannot keep its code in" in out
    assert not list(theirs.iterdir())
    assert not list((tmp_path / "tmp").glob("torchinductor*"))
