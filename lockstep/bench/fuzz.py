"""Thousands of damaged files, read and used as a run would: a sentence or a right result, in bounded time and memory.

Files are tried in processes of their own, a few hundred in each, under a limit of memory and with a clock for every
file: a crash, a hang and a file that takes all the memory are seen, named, and do not stop the rest. What a file holds
depends on the seed, its kind and its number alone, so that each can be made again (`--case`).
"""

import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lockstep.bench.results import check_files, write_rows
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.bench.fuzz_kinds import Kind

# How many of a hundred files are of which kind.
SHARES = {
    "recipe": 13,
    "cluster": 4,
    "checkpoint": 11,
    "plan": 8,
    "profile": 6,
    "device profile": 4,
    "event log": 8,
    "index": 10,
    "tar member": 7,
    "unfinished pack": 4,
    "JPEG": 6,
    "progressive JPEG": 5,
    "PNG": 6,
    "WebP": 2,
    "BMP": 2,
    "GIF": 2,
    "TIFF": 2,
}
PROGRAM = (sys.executable, "-m", "lockstep.bench.fuzz")  # that tries files
BATCH = 250  # files of one process
LIMIT_S = 20.0  # for one file, on a machine that others use too
START_S = 120.0  # for a process to begin
MAX_BYTES = 1 << 30  # that a file may make a process ask for
PRINT_ERRORS = "backslashreplace"  # as `cli.py` has it for what the program prints
MEMORY = Path("/dev/shm")  # where this is a folder, files need not reach a disk
SHOWN = 20  # problems that are printed in full

Case = tuple[str, int]  # kind and number


@dataclass(frozen=True)
class Outcome:
    """What came of one file."""

    kind: str
    number: int
    result: str  # accepted, refused, traceback, crash or hang
    seconds: float  # of the processor: others use the machine too
    num_bytes: int  # of memory that it took, beyond what the process held before
    detail: str = ""


GOOD = ("accepted", "refused")


def run(*, files: int, seed: int, case: str | None, workers: int, json_file: Path | None, console: Console) -> bool:
    """Try so many files, in so many processes at a time; True if every one was a sentence or could be used."""
    check_files(json_file, None)
    cases = [parse_case(case)] if case else plan_cases(files)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        for batch in try_batches(cases, seed, Path(folder), workers or len(os.sched_getaffinity(0))):
            for outcome in batch:
                outcomes.append(outcome)
                if outcome.result not in GOOD and _count_bad(outcomes) <= SHOWN:
                    _say(outcome, seed, console)
            if len(cases) > BATCH:
                console.print(f"{len(outcomes)}/{len(cases)}: {_count_bad(outcomes)} problems", highlight=False)
            if json_file is not None:
                write_rows(json_file, [asdict(row) for row in summarize(outcomes)] + _list_problems(outcomes))
        if case:
            _keep(cases[0], seed, console)
    console.print(build_table(summarize(outcomes)))
    console.print(f"{len(outcomes)} files, seed {seed}: {_count_bad(outcomes)} problems.", highlight=False)
    return not _count_bad(outcomes)


def plan_cases(count: int) -> list[Case]:
    """So many files, of each kind its share, numbered from 0."""
    order = [kind for kind, share in SHARES.items() for _ in range(share)]
    random.Random(0).shuffle(order)  # so that a few hundred have some of every kind
    numbers: Counter[str] = Counter()
    cases = []
    for index in range(count):
        kind = order[index % len(order)]
        cases.append((kind, numbers[kind]))
        numbers[kind] += 1
    return cases


def parse_case(text: str) -> Case:
    """`index:17` -> the index numbered 17."""
    kind, _, number = text.rpartition(":")
    if kind not in SHARES or not number.isdecimal():
        raise LockstepError(f"--case {text} is not KIND:NUMBER; the kinds are {', '.join(SHARES)}.")
    return kind, int(number)


def try_batches(cases: Sequence[Case], seed: int, folder: Path, workers: int) -> Iterator[list[Outcome]]:
    """The outcomes of all files, some hundred at a time and in order."""
    is_over = threading.Event()

    def try_batch(start: int) -> list[Outcome]:
        place = folder / str(start)
        found = list(try_cases(cases[start : start + BATCH], seed, place, is_over))
        shutil.rmtree(place, ignore_errors=True)
        return found

    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(try_batch, range(0, len(cases), BATCH))
    finally:
        is_over.set()
        pool.shutdown(cancel_futures=True)


def try_cases(
    cases: Sequence[Case], seed: int, folder: Path, is_over: threading.Event | None = None
) -> Iterator[Outcome]:
    """The outcome of each file; a process that crashes or hangs is followed by another for the rest."""
    left = list(cases)
    while left and not (is_over and is_over.is_set()):
        for outcome in _try_until_lost(tuple(left), seed, folder):
            left.pop(0)
            yield outcome


def _try_until_lost(cases: Sequence[Case], seed: int, folder: Path) -> Iterator[Outcome]:
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            [*PROGRAM, str(seed), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Threads that each have a heap of their own would use up the room for addresses.
            env=os.environ | {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},
        )
        stack.callback(_end, process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(cases).encode())
        process.stdin.close()
        lines = _Lines(process.stdout)
        if lines.read(START_S) != "ready":
            raise LockstepError(f"The process that tries files does not start: {_read_end(errors)}")
        for kind, number in cases:
            begun = time.monotonic()
            line = lines.read(LIMIT_S)
            if line:
                yield Outcome(**json.loads(line))
                continue
            is_hung = line is None
            if is_hung:
                process.send_signal(signal.SIGABRT)  # which leaves the place where it hangs
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            else:
                process.wait(LIMIT_S)
            detail = f"exit status {process.returncode}: {_read_end(errors)}"
            yield Outcome(kind, number, "hang" if is_hung else "crash", time.monotonic() - begun, 0, detail)
            return


class _Lines:
    """Lines from a process, each within a limit."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._buffer = pipe, b""

    def read(self, limit_s: float) -> str | None:
        """The next line; "" at the end, None when nothing comes."""
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            if not select.select([self._pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            data = os.read(self._pipe.fileno(), 1 << 16)
            if not data:
                return ""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _read_end(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-1500:].decode(errors="replace")


def _list_problems(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(outcome) for outcome in outcomes if outcome.result not in GOOD]


def _count_bad(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.result not in GOOD for outcome in outcomes)


def _say(outcome: Outcome, seed: int, console: Console) -> None:
    again = f"lockstep bench fuzz --seed {seed} --case '{outcome.kind}:{outcome.number}'"
    text = f"{outcome.result} by {outcome.kind} {outcome.number}; again: {again}\n{outcome.detail}"
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _keep(case: Case, seed: int, console: Console) -> None:
    """Leave the files of a single case for people to look at."""
    place = Path(tempfile.mkdtemp(prefix=f"lockstep-fuzz-{case[0].replace(' ', '-')}-{case[1]}-"))
    write_files(place, build_kind(case[0]).forge(seed_case(seed, case)))
    console.print(f"The files are in {place}", highlight=False)


@dataclass(frozen=True)
class Row:
    """The files of one kind."""

    kind: str
    files: int
    refused: int
    accepted: int
    tracebacks: int
    crashes: int
    hangs: int
    slowest_s: float
    most_mb: float
    slowest: str  # the case


def summarize(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each kind, and one for all."""
    rows = []
    for kind in [*SHARES, None]:
        own = [outcome for outcome in outcomes if kind in (outcome.kind, None)]
        if not own:
            continue
        counts = Counter(outcome.result for outcome in own)
        slowest = max(own, key=lambda outcome: outcome.seconds)
        rows.append(
            Row(
                kind or "all",
                len(own),
                counts["refused"],
                counts["accepted"],
                counts["traceback"],
                counts["crash"],
                counts["hang"],
                slowest.seconds,
                max(outcome.num_bytes for outcome in own) / 1e6,
                f"{slowest.kind}:{slowest.number}",
            )
        )
    return rows


def build_table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("kind", "files", "refused", "accepted", "tracebacks", "crashes", "hangs", "slowest", "memory"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for row in rows:
        *counts, slowest_s, most_mb, _ = asdict(row).values()
        table.add_row(*map(str, counts), f"{slowest_s:.2f} s", f"{most_mb:.0f} MB")
    table.caption = "Refused: by a sentence. Accepted: and used. Slowest, memory: of one file."
    return table


def build_kind(name: str) -> "Kind":
    """What forges and uses files of one kind."""
    from lockstep.bench.fuzz_data import ImageFile, Pack
    from lockstep.bench.fuzz_device import DeviceFile
    from lockstep.bench.fuzz_kinds import Checkpoint, Cluster, Log, PlanFile, Recipe

    kinds: dict[str, Callable[[], Kind]] = {
        "recipe": Recipe,
        "cluster": Cluster,
        "checkpoint": Checkpoint,
        "plan": partial(PlanFile, "plan"),
        "profile": partial(PlanFile, "profile"),
        "device profile": DeviceFile,
        "event log": Log,
        "index": partial(Pack, "index"),
        "tar member": partial(Pack, "tar member"),
        "unfinished pack": partial(Pack, "unfinished pack"),
        "JPEG": partial(ImageFile, "JPEG"),
        "progressive JPEG": partial(ImageFile, "progressive JPEG"),
        **{kind: partial(ImageFile, kind) for kind in ("PNG", "WebP", "BMP", "GIF", "TIFF")},
    }
    return kinds[name]()


def seed_case(seed: int, case: Case) -> random.Random:
    """The chance of one file."""
    return random.Random(f"{seed}/{case[0]}/{case[1]}")


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Lay files out in a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _main(seed: int, folder: Path) -> None:
    """Be the process that tries files: the cases come on stdin, and a line for each goes out."""
    cases: list[Case] = [(kind, number) for kind, number in json.load(sys.stdin)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may come between
    faulthandler.enable()
    kinds = {name: build_kind(name) for name in sorted({kind for kind, _ in cases})}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_read_status("VmSize") + MAX_BYTES,) * 2)
    print("ready", file=answers, flush=True)
    for case in cases:
        outcome = try_case(kinds[case[0]], case, seed, folder)
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


def try_case(kind: "Kind", case: Case, seed: int, folder: Path) -> Outcome:
    """Forge one file and use it."""
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    write_files(place / "files", kind.forge(seed_case(seed, case)))
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=PRINT_ERRORS)
    _forget_peak()
    held, start = _read_status("VmRSS"), time.process_time()
    detail = ""
    try:
        try:
            result = "accepted" if kind.use(place / "files", out) else "refused"
        except LockstepError as error:
            check_sentence(error)
            result = "refused"
        out.flush()
    except BaseException:
        result, detail = "traceback", traceback.format_exc()[-3000:]
    seconds = time.process_time() - start
    return Outcome(*case, result, seconds, max(0, _read_status("VmHWM") - held), detail)


def check_sentence(text: object) -> None:
    """What is said to people is one line of bearable length."""
    words = str(text)
    assert "\n" not in words, f"more than a line: {words[:200]!r}"
    assert len(words) < 2000, f"{len(words)} characters"
    assert words.strip(), "no word"
    for bad in ("Traceback", "MemoryError", "annot allocate", "out of memory"):
        assert bad not in words, words[:200]


def _forget_peak() -> None:
    """Let the most memory that this process ever held be what it holds now, where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _read_status(name: str) -> int:
    """Bytes, as the system counts them for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
