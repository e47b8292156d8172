"""The commands that turn a run's records into what other programs read. Torch-free."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import LockstepError
from lockstep.files import write_whole

exports = typer.Typer()
Run = Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN")]


@exports.command("trace")
def trace_command(
    run: Run,
    file: Annotated[Path | None, typer.Argument(help="RUN/trace.json if not given.", metavar="FILE")] = None,
) -> None:
    """Write a run's timelines, evaluations and checkpoints for Perfetto (ui.perfetto.dev) or Chrome."""
    from lockstep.events import read_events
    from lockstep.report.trace import build_trace

    trace = build_trace(read_events(run))
    file = file or run / "trace.json"
    _write(file, json.dumps(trace, separators=(",", ":")) + "\n")
    spans = sum(entry["ph"] == "X" for entry in trace["traceEvents"])
    print(f"Wrote {spans:,} spans to {file}; open it in ui.perfetto.dev.")


@exports.command("mlperf")
def mlperf_command(
    run: Run,
    file: Annotated[Path | None, typer.Argument(help="RUN/mlperf.log if not given.", metavar="FILE")] = None,
) -> None:
    """Write a run as MLPerf's log lines; MLPERF_SUBMISSION_ORG, _DIVISION and others say whose it is."""
    from lockstep.events import read_events
    from lockstep.report.mlperf import write_mlperf

    file = file or run / "mlperf.log"
    count = write_mlperf(file, read_events(run))
    print(f"Wrote {count:,} lines to {file}.")


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, text)
    except OSError as error:
        raise LockstepError(f"{file} cannot be written ({error.strerror}); choose another file.") from None
