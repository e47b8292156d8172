"""Images per second into a training loop that does nothing else: stage by stage, then as a whole, beside the peers.

Everybody gets the same photos, as many threads or worker processes, and the same distribution of crops. They take
turns, several rounds in one run, so that the machine's noise falls on all; what counts is the median.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lockstep.bench.input_peers import Contestant, Setting, build_contestants
from lockstep.bench.photos import build_photos
from lockstep.bench.results import check_files, write_rows
from lockstep.comm.world import count_cores
from lockstep.data.generated import default_cache
from lockstep.data.shards import is_packed, open_shards
from lockstep.data.sources import Source, scan_folder
from lockstep.errors import LockstepError
from lockstep.report.display import progress

STAGES = ("read", "decode", "crop", "copy", "all")
NUM_PHOTOS = 200
# Samples whose stages are measured one by one: their decoded images are all held in memory.
STAGE_SAMPLES = 200
TASK_SAMPLES = 8
STAGE_S = 0.5
DEPTHS = (2, 4, 8)  # batches prepared ahead: by each worker of a DataLoader, by all of Lockstep's threads together

Measure = Callable[[], float]  # images per second
Say = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One contestant at one stage: the median over the rounds, and the distance of the quartiles."""

    name: str
    stage: str
    images_per_second: float
    threads: int
    spread: float
    rounds: int


def open_photos(path: Path | None, console: Console) -> Source:
    """All images under a folder, or of its train/ or its packed shards where there are; generated ones without one."""
    if path is None:
        path = build_photos(default_cache(), NUM_PHOTOS, progress("Rendering photos", console))
    folder = path.expanduser().resolve()
    if is_packed(folder):
        return open_shards(folder)[0]
    if (folder / "train").is_dir():
        folder /= "train"
    if not folder.is_dir():
        raise LockstepError(f"{path} is not a folder; name one that holds photos, or none to have some generated.")
    # Labels do not matter here, so a folder of photos is one class, whatever lies below it.
    return scan_folder(folder.parent, (folder.name,))


def measure_input(setting: Setting, *, rounds: int, round_s: float, say: Say = lambda done, total: None) -> list[Row]:
    """Every stage and every whole pipeline in turns; rows in the order of the walk, Lockstep first."""
    with ThreadPoolExecutor(setting.threads) as pool:
        measures: dict[tuple[str, str], Measure] = {}
        for index, contestant in enumerate(build_contestants(setting)):
            measures |= _build_stages(contestant, setting, pool, is_first=index == 0, stage_s=min(STAGE_S, round_s))
            measures[contestant.name, "all"] = _build_whole(contestant, setting, round_s)
        # By stage, so that what is compared is measured back to back; there and back, so that nobody always leads.
        turns = sorted(measures, key=lambda key: STAGES.index(key[1]))
        rates: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
        for number in range(rounds + 1):
            for done, key in enumerate(turns if number % 2 else reversed(turns), start=1):
                rate = measures[key]()
                if number:  # the first round is warm-up
                    rates[key].append(rate)
                say(number * len(turns) + done, (rounds + 1) * len(turns))
    return [_build_row(name, stage, rates[name, stage], setting.threads) for name, stage in turns]


def _build_row(name: str, stage: str, rates: Sequence[float], threads: int) -> Row:
    quartiles = statistics.quantiles(rates, n=4, method="inclusive")
    return Row(name, stage, statistics.median(rates), threads, quartiles[2] - quartiles[0], len(rates))


def _build_stages(
    contestant: Contestant, setting: Setting, pool: ThreadPoolExecutor, *, is_first: bool, stage_s: float
) -> dict[tuple[str, str], Measure]:
    """The stages by themselves on a pool of threads; reading and copying are the same for all and measured once."""
    samples = range(min(STAGE_SAMPLES, setting.source.num_samples))
    encoded = [setting.source.read(sample) for sample in samples]
    images = [contestant.decode(data) for data in encoded]
    stages: dict[str, Callable[[slice], object]] = {
        "decode": lambda part: [contestant.decode(data) for data in encoded[part]],
        "crop": lambda part: contestant.crop(images[part]),
    }
    if is_first:
        stages["read"] = lambda part: [setting.source.read(sample) for sample in samples[part]]
    tasks = [slice(start, start + TASK_SAMPLES) for start in range(0, len(samples), TASK_SAMPLES)]

    def build(stage: Callable[[slice], object]) -> Measure:
        return lambda: len(samples) * _count_per_second(lambda: list(pool.map(stage, tasks)), stage_s)

    measures = {(contestant.name, name): build(stage) for name, stage in stages.items()}
    if is_first and setting.device.type == "cuda":
        measures[contestant.name, "copy"] = _build_copy(setting, stage_s)
    return measures


def _build_copy(setting: Setting, stage_s: float) -> Measure:
    """A batch of squares from pinned memory to the device."""
    side = setting.image_size
    pixels = torch.zeros((setting.batch, side, side, 3), dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        pixels.to(setting.device, non_blocking=True)
        torch.cuda.synchronize(setting.device)

    return lambda: setting.batch * _count_per_second(copy, stage_s)


def _count_per_second(work: Callable[[], object], seconds: float) -> float:
    """How often `work` is done in a second, over at least so many seconds."""
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        work()
        count += 1
    return count / passed


def _build_whole(contestant: Contestant, setting: Setting, round_s: float) -> Measure:
    """A fresh pipeline for each turn, so that nobody works ahead during the others' turns.

    Before its first turn each tries how many batches to prepare ahead, and keeps to what was quickest.
    """
    chosen: int | None = None

    def measure() -> float:
        nonlocal chosen
        chosen = chosen or max(DEPTHS, key=run)
        return run(chosen)

    def run(depth: int) -> float:
        with contestant.open(depth) as batches:
            # A DataLoader's workers each make whole batches at the same time: count whole rounds of them only.
            for _ in range(2 * setting.threads):
                next(batches)
            start, images = time.perf_counter(), 0
            while time.perf_counter() - start < round_s:
                images += sum(next(batches) for _ in range(setting.threads))
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)
            return images / (time.perf_counter() - start)

    return measure


def build_table(rows: Sequence[Row]) -> Table:
    """A line for each stage, a column for each contestant: images per second, and per core."""
    names = list(dict.fromkeys(row.name for row in rows))
    found = {(row.name, row.stage): row for row in rows}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("images/s (per core)")
    for name in names:
        table.add_column(name, justify="right")
    for stage in dict.fromkeys(row.stage for row in rows):
        cells = [found.get((name, stage)) for name in names]
        table.add_row(
            stage,
            *(
                f"{row.images_per_second:,.0f} ({row.images_per_second / row.threads:,.0f})" if row else ""
                for row in cells
            ),
        )
    return table


def describe_ratios(rows: Sequence[Row]) -> list[str]:
    """How many times as quick Lockstep's whole pipeline is as each peer's."""
    own, *peers = (row for row in rows if row.stage == "all")
    return [
        f"lockstep delivers {own.images_per_second / peer.images_per_second:.2f} × what {peer.name} does "
        f"on {own.threads} threads (medians of {own.rounds} rounds)"
        for peer in peers
    ]


def describe_feed(rows: Sequence[Row], wanted: float) -> str:
    """Whether Lockstep would feed a training loop of this speed, and how many cores are missing if not."""
    own = next(row for row in rows if row.stage == "all" and row.name == "lockstep")
    missing = math.ceil(wanted * own.threads / own.images_per_second) - own.threads
    if own.images_per_second >= wanted:
        return f"Training at {wanted:,.0f} images/s would be fed: {own.images_per_second:,.0f} images/s arrive."
    return (
        f"Training at {wanted:,.0f} images/s would wait: {own.images_per_second:,.0f} images/s arrive on "
        f"{own.threads} cores; it needs {missing} more core{'s' if missing > 1 else ''}."
    )


def run_parent(
    *,
    path: Path | None,
    image_size: int,
    batch: int,
    threads: int | None,
    rounds: int,
    round_s: float,
    feed: float | None = None,
    json_file: Path | None = None,
) -> None:
    """Measure on this machine, print the table and write the rows."""
    check_files(json_file, None)
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = Setting(open_photos(path, console), image_size, batch, threads or count_cores(), device)
    rows = measure_input(setting, rounds=rounds, round_s=round_s, say=progress("Measuring", console))
    console.print(build_table(rows))
    for sentence in [*describe_ratios(rows), *([describe_feed(rows, feed)] if feed else [])]:
        console.print(sentence, highlight=False, soft_wrap=True)
    if json_file is not None:
        write_rows(json_file, [asdict(row) for row in rows])
