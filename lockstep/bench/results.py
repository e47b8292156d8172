"""What a benchmark leaves for people and programs: files checked before minutes of measuring. Torch-free."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

Rows = Sequence[Mapping[str, Any]]  # as in the JSON file


def check_files(json_file: Path | None, html_file: Path | None) -> None:
    """Say what is wrong with the results' files before anything is measured."""
    if html_file is not None and importlib.util.find_spec("plotly") is None:
        raise LockstepError("--html needs plotly; install it with: pip install plotly.")
    for file, option, empty in ((json_file, "--json", "[]\n"), (html_file, "--html", "")):
        if file is not None:
            try:
                file.write_text(empty)
            except OSError as error:
                raise LockstepError(f"{file} cannot be written ({error.strerror}); choose another {option}.") from error


def write_rows(file: Path, rows: Rows) -> None:
    """Leave the rows as a JSON list."""
    file.write_text(json.dumps(rows, indent=2) + "\n")


def describe_ms(seconds: float) -> str:
    """Milliseconds with three digits or so."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2}f}"
