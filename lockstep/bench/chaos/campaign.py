"""So many faults: a run without any, then runs that meet some, each judged; in parts that add up to one table."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from lockstep.bench.chaos.disk import open_disk
from lockstep.bench.chaos.faults import TWO_NODES, Way, plan_runs
from lockstep.bench.chaos.judge import Reference, judge, take_reference
from lockstep.bench.chaos.reads import can_block
from lockstep.bench.chaos.report import Report, Row, Verdict, name_source, show
from lockstep.bench.chaos.runs import SETTINGS, Place, Run
from lockstep.bench.chaos.surroundings import Surroundings, seclude
from lockstep.bench.chaos.torment import torment
from lockstep.bench.results import check_files
from lockstep.bench.virtual import VirtualCluster
from lockstep.errors import LockstepError

REFERENCE_S = 300.0


def run(
    *, count: int, seed: int, num_ranks: int, backend: str = "auto", json_file: Path | None, console: Console
) -> bool:
    """Inject so many faults; True if nothing was lost, hung or left behind."""
    check_files(json_file, None)
    begun = time.monotonic()
    is_alone = seclude()
    with open_place() as place:
        left_out = find_left_out(place, num_ranks)
        if backend == "nccl":
            left_out |= TWO_NODES  # namespaces of one machine, whose ranks may have to share a GPU
        settings = (*SETTINGS, f"comm.backend={backend}")
        report = Report(seed, num_ranks, name_source(), backend=backend, left_out=sorted(left_out))
        if not is_alone:
            console.print("Shared memory and mounts left behind are not looked for: that takes a namespace of mounts.")
        if left_out:
            console.print(f"Left out, as this user cannot do them here: {', '.join(sorted(left_out))}.")
        references: dict[bool, Reference] = {}
        for plan in plan_runs(seed, num_ranks, left_out):
            # Several nodes add up in another order, which two numbers do not mind.
            order = plan.way in TWO_NODES and num_ranks > 2
            if order not in references:
                references[order] = make_reference(place, num_ranks, plan.way, settings)
            with Run(plan.number, place, num_ranks, plan.way, settings) as one:
                before = Surroundings(is_alone)
                rows = torment(one, plan.faults[: count - len(report.rows)])
                # On a GPU two runs without faults differ in the last bits, too.
                verdict = judge(one, references[order], before, rows, to_the_bit=backend != "nccl")
                one.remove()
            report.rows += rows
            report.verdicts.append(verdict)
            report.seconds = time.monotonic() - begun
            report.write(json_file)
            _say(rows, verdict, f"{len(report.rows)}/{count}", console)
            if len(report.rows) >= count:
                break
    return show([report], console)


@contextmanager
def open_place() -> Iterator[Place]:
    """A disk and a folder for runs, and their removal."""
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        beside = folder / "beside"
        beside.mkdir()
        with open_disk(folder) as disk:
            yield Place(disk, beside)


def find_left_out(place: Place, num_ranks: int) -> set[str]:
    """Ways and kinds that need rights which this user has not, or a number of ranks that two nodes can share."""
    left_out = place.disk.left_out
    if not can_block(place.beside):
        left_out |= {"blocked read", "late read"}
    if num_ranks % 2 or VirtualCluster.open(1, 1).is_pretended:
        left_out |= TWO_NODES
    return left_out


def make_reference(place: Place, num_ranks: int, way: Way, settings: Sequence[str]) -> Reference:
    """What a run comes to that nobody disturbs."""
    with Run(0, place, num_ranks, way, settings) as one:
        if one.finish(one.start(), REFERENCE_S) != 0:
            raise LockstepError(f"Even a run without faults fails: {one.last_words}")
        reference = take_reference(one)
        one.remove()
    return reference


def _say(rows: list[Row], verdict: Verdict, done: str, console: Console) -> None:
    met = ", ".join(f"{row.kind} to {row.victim} in {row.phase}" for row in rows)
    console.print(f"{done} {rows[0].way if rows else ''}: {met}", highlight=False, soft_wrap=True)
    for problem in verdict.problems:
        console.print(f"  problem: {problem}", highlight=False, soft_wrap=True, markup=False)
