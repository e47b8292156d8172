"""docs/api.md: every block of Python on the page runs, in the page's order, as one program."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+)\.py\n")


def test_every_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "birds", raising=False)
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        if file := FILE.match(block[1]):
            (tmp_path / f"{file[1]}.py").write_text(block[1])
        else:
            exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    assert len(blocks) == 9
    # What the page says of them.
    assert names["result"].summary["N"] == 2
    assert names["result"].summary["status"] in ("interrupted", "finished")  # it may end before it hears the word
    assert names["score"].accuracy.total == 40
    assert (tmp_path / "birds.pt2").stat().st_size == names["file"].num_bytes
    assert (tmp_path / "birds.md").is_file()
    assert names["prediction"].guesses[0].name == "robin"
    assert names["trained"].classes == ("robin", "bluetit")
    assert (tmp_path / "runs" / "two" / "report.html").is_file()
    assert 'name = "birds:build_net"' in (tmp_path / "runs" / "function" / "config.toml").read_text()
    assert 'name = "given"' in (tmp_path / "runs" / "module" / "config.toml").read_text()
