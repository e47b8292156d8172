"""One rank's whole run: join the world, build the parts, train, and say in one sentence what went wrong."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from lockstep import __version__
from lockstep.comm.lookout import Lookout
from lockstep.comm.pulse import Lost, end_process
from lockstep.comm.world import Membership, World, has_timed_out, join_world
from lockstep.config import SECTIONS, RunConfig, to_toml
from lockstep.data.sources import IMAGE_SUFFIXES, check_root, hash_labels
from lockstep.engine.account import Startup
from lockstep.engine.brought import NOTHING, Brought, has_own_data
from lockstep.engine.build import Progress, Sources, open_sources
from lockstep.engine.identity import forget_identity
from lockstep.engine.listener import Heard, OnEvent
from lockstep.engine.number_format import settle_format
from lockstep.engine.owner import own_folder
from lockstep.engine.reuse import Kept
from lockstep.engine.scanned import share_scanned
from lockstep.engine.snapshot import has_begun_here
from lockstep.engine.start_weights import load_start
from lockstep.engine.starting import (
    has_finished,
    has_log,
    is_begun,
    list_changes,
    phrase_finished,
    phrase_unconfigured,
    settle_like,
)
from lockstep.engine.trainer import Status, StopRequest, Trainer
from lockstep.errors import Followed, LockstepError, LostContact, SharedError
from lockstep.events import Notice, Sink
from lockstep.files import read_small, write_whole
from lockstep.processes import answer_signals, end_on_second, note_stop, say_last
from lockstep.recipes.read import load_recipe
from lockstep.restarts import count_restarts, leave_outcome

# A closed terminal sends HUP; Slurm can send USR1 ahead of a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
MOST_NAMED = 5  # settings that differ between ranks
NO_MEMORY = "can't allocate memory"  # in the message of PyTorch's allocator for the host
Outcome = Status | Literal["stopped"]  # by the program that listens
# In a run's folder; `lost+found` is in any that is a file system of its own.
OWN_FOLDERS = ("checkpoints", "export", "tensorboard", "wandb", "mlruns", "profile", "lost+found")
DATA_SUFFIXES = (*IMAGE_SUFFIXES, ".tar", ".parquet")
LOST_CONTACT = ("onnection", "imed out", "NCCL", "gloo")  # in the messages of Gloo, NCCL and the store


def run_rank(
    config: RunConfig,
    name: str,
    folder: Path,
    *,
    resume: bool,
    membership: Membership | None,
    open_sink: Callable[[World, Path], Sink],
    progress: Progress | None = None,
    may_be_finished: bool = False,
    brought: Brought = NOTHING,
    on_event: OnEvent | None = None,
    is_guest: bool = False,
    kept: Kept | None = None,
) -> Outcome:
    """Train as one rank of the world; rank 0's word on the run's `folder` counts.

    A run that is finished is a mistake to resume, unless it `may_be_finished`. `on_event` hears rank 0's records. A
    guest in somebody's program never ends the process. `kept` is what the process's runs before this one have left.
    """
    startup = Startup()
    with (
        join_world(membership, backend=config.comm.backend, timeout_s=config.comm.timeout_s) as world,
        # Outermost but for the world: a launcher that stops the survivors must not cut off what they have to say.
        watch_signals(is_guest=is_guest) as stop,
        watch_ranks(world, config.comm.timeout_s),
        noting_failure(world),
        explain_failures(world),
        ExitStack() as held,
    ):
        startup.mark("ranks meet")
        folder = Path(world.broadcast_value(str(folder)))
        config = share_settled(config, world)
        check_alike(config, world)
        # A node that has joined a run that goes on does not know of it; one rank that does is enough.
        resume = bool(world.maximum(torch.tensor([int(resume)])).item())
        owner = held.enter_context(own_folder(folder, world))
        if not resume:
            refuse_lost(folder, world)
        config, said = settle_format(config, world)
        if world.is_first and not resume:
            prepare_folder(folder)
        kept = kept or Kept()
        sources = kept.open_sources(config.data, partial(share_sources, config, world, progress, brought))
        startup.mark("data")
        config, parts, size_said = kept.build_parts(config, world, sources, brought)
        # Before anything is written of the run: what is wrong with them is to be corrected, and begun again.
        notes = [] if resume else load_start(config.model.weights, parts, world, len(sources.train.classes))
        notes += [note for note in (said, size_said) if note and world.is_first]
        startup.mark("network")
        if not resume:
            leave_config(folder, config, world, is_known=False)
        sink = open_sink(world, folder)
        if on_event and world.is_first:
            sink = Heard(sink, on_event, stop.ask)
        try:
            explain = partial(explain_failures, world)
            is_ours = owner.is_in_place
            trainer = Trainer(config, name, world, sources, parts, folder, sink, stop, explain, kept, startup, is_ours)
            if resume:
                is_finished = bool(world.broadcast_value(world.is_first and has_finished(folder)))
                if not trainer.resume(is_finished, may_be_finished):
                    if may_be_finished:
                        sink.emit(Notice(level="info", text=phrase_finished(folder)))
                    return "finished"
                # Not before: overrides that do not fit must leave the run resumable.
                if world.is_first and (changes := describe_changes(folder, config)):
                    sink.emit(Notice(level="info", text=changes))
                if failure := leave_config(folder, config, world, is_known=True):
                    sink.emit(Notice(level="warning", text=failure))
                startup.mark("checkpoint")
            return name_end(trainer.run(notes), stop, world)
        finally:
            sink.close()
            if parts.hybrid:
                parts.hybrid.close()


def name_end(status: Status, stop: StopRequest, world: World) -> Outcome:
    """Whether it was whoever listens to rank 0 that ended an interrupted run."""
    is_asked = status == "interrupted" and world.broadcast_value(stop.is_asked and not stop.signal)
    return "stopped" if is_asked else status


def share_settled(config: RunConfig, world: World) -> RunConfig:
    """What a run has settled on before, on ranks that do not see its folder and so ask again; all must call it."""
    choices = world.gather_values([config.precision.compute, config.train.max_batch_per_rank])
    compute = next((compute for compute, _ in choices if compute != "auto"), "auto")
    size = next((size for _, size in choices if size), 0)
    known = config.model_copy(
        update={
            "precision": config.precision.settle(compute),
            "train": config.train.model_copy(update={"max_batch_per_rank": size}),
        }
    )
    return settle_like(config, known)


def check_alike(config: RunConfig, world: World) -> None:
    """Refuse ranks that were started with other settings: they would wait for each other, or train on nonsense."""
    own = {"Lockstep's version": __version__}
    for section, table in config.model_dump(mode="json", include={*SECTIONS}).items():
        own |= {f"{section}.{key}": json.dumps(value) for key, value in table.items()}
    first = world.broadcast_value(own)
    differing = [key for key in sorted(own.keys() | first.keys()) if own.get(key) != first.get(key)]
    for rank, keys in enumerate(world.gather_values(differing[:MOST_NAMED])):
        if keys:
            raise SharedError(
                f"Rank {rank} was started with other settings than rank 0 ({', '.join(keys)}); start all ranks with "
                "the same command."
            )


def prepare_folder(folder: Path) -> None:
    """See that the folder holds no other run."""
    if has_log(folder):
        raise LockstepError(
            f"{folder} already holds a run; add --resume to go on with it, or choose another --out."
            if is_begun(folder)
            else phrase_unconfigured(folder)
        )
    if foreign := find_foreign(folder):
        raise LockstepError(f"{folder} holds no run but other things, such as {foreign}; choose another --out.")


def find_foreign(folder: Path) -> str:
    """Something in a folder that neither a run leaves there nor whoever starts one, such as its log; else empty."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name not in OWN_FOLDERS if entry.is_dir() else entry.name.lower().endswith(DATA_SUFFIXES):
                    return entry.name
    except OSError:  # it is not there yet, or cannot be read: said by whoever writes there
        return ""
    return ""


def describe_changes(folder: Path, config: RunConfig) -> str:
    """What is asked for now and was not before, in one sentence; empty if nothing is."""
    try:
        _, before = load_recipe(str(folder))
    except LockstepError:  # of another version, or damaged: there is nothing to compare with
        return ""
    changes = list_changes(before, config)
    return f"Going on with other settings: {'; '.join(changes)}." if changes else ""


def refuse_lost(folder: Path, world: World) -> None:
    """See that ranks that were started again do not begin anew what had begun; every rank must call it."""
    has_begun = world.local_rank == 0 and has_begun_here(folder)
    if world.maximum(torch.tensor([int(has_begun)])).item():
        raise SharedError(
            f"The run's folder {folder} was moved or deleted while the run went on, so its ranks did not begin it "
            "anew; put the folder back, and go on with --resume."
        )


def leave_config(folder: Path, config: RunConfig, world: World, *, is_known: bool) -> str:
    """Write the configuration, on every rank; a failure that costs a run nothing is returned, on rank 0.

    One whose folder `is_known` to hold it, and whose ranks were started again, was told of its settings before.
    """
    failure, is_harmless = "", False
    if world.is_first:
        try:
            if not is_known:
                forget_identity(folder)
            write_config(folder, config)
        except LockstepError as error:
            failure, is_harmless = str(error), is_known and count_restarts(os.environ) > 0
    told, is_harmless = world.broadcast_value([failure, is_harmless])
    if told and not is_harmless:
        raise SharedError(told)  # a disk that is full is full when ranks are started again
    return failure


def write_config(folder: Path, config: RunConfig) -> None:
    """Leave the resolved configuration in the run's folder; what is there already is not written again."""
    file, text = folder / "config.toml", to_toml(config)
    if has_text(file, text):
        with suppress(OSError):
            os.utime(file)  # its age is when the run was last gone on with
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    except OSError as error:
        raise LockstepError(
            f"The run's folder {folder} cannot be written ({error.strerror}); choose another --out."
        ) from error


def has_text(file: Path, text: str) -> bool:
    """Whether a file holds this and nothing else."""
    data = text.encode(errors="backslashreplace")  # as `write_whole` has it
    try:
        return read_small(file, len(data)) == data
    except OSError:
        return False


def share_sources(config: RunConfig, world: World, progress: Progress | None, brought: Brought = NOTHING) -> Sources:
    """The data on every rank; one rank of each node goes first, because it may have images to render.

    An image folder is scanned by rank 0 alone: thousands of ranks that ask a file server for a million names each would
    wait for it longer than they train.
    """
    if has_own_data(config.data.source):
        own = open_sources(config.data, progress, brought)
        check_same_data(own, world)
        return own
    if config.data.source == "generated":
        sources = open_sources(config.data, progress) if world.local_rank == 0 else None
        world.barrier()
        return sources or open_sources(config.data)
    sources = open_sources(config.data, progress) if world.is_first else None
    root = Path(config.data.path).expanduser()
    scanned = share_scanned(world, sources, root)
    if scanned is None:
        if world.local_rank == 0 and sources is None:  # it may have files to look through, or to pack
            sources = open_sources(config.data)
        world.barrier()
        return sources or open_sources(config.data)
    if world.local_rank == 0:
        check_root(root, config.data.read_timeout_s)  # there it must be on every node
    return scanned


def check_same_data(sources: Sources, world: World) -> None:
    """Refuse ranks whose programs opened other data: each must have all of it, and takes its share of every batch."""
    own = [[split.num_samples, hash_labels(split.classes, split.labels)] for split in (sources.train, sources.val)]
    first, *others = world.gather_values(own)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise SharedError(
                f"Rank {rank} has other data than rank 0 ({theirs[0][0]} and {first[0][0]} training samples, or other "
                "labels); give every rank all of the data, and Lockstep shares it out."
            )


@contextmanager
def watch_signals(*, is_guest: bool = False) -> Iterator[StopRequest]:
    """While inside, a stop signal is only noted, and the trainer acts on it between two steps; a second one ends it.

    In a guest the second Ctrl-C is an exception instead; signals reach the main thread alone.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, frame: FrameType | None) -> None:
        if is_guest and request.signal == number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        request.signal = number
        note_stop(number)

    with answer_signals(STOP_SIGNALS, note):
        if is_guest:
            yield request
            return
        # Whoever asks twice does not want the rank started again.
        with end_on_second((signal.SIGINT, signal.SIGTERM), partial(leave_outcome, environment=os.environ)):
            yield request


@contextmanager
def noting_failure(world: World) -> Iterator[None]:
    """Let the other ranks know why this one ends, as far as it can say."""
    try:
        yield
    except BaseException as error:
        world.note_failure(error)
        raise


@contextmanager
def explain_failures(world: World) -> Iterator[None]:
    """Turn what the engines below raise for outside causes into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LockstepError(
            f"Rank {world.rank} is out of device memory; lower train.max_batch_per_rank, or raise train.accumulate "
            "where that is given."
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise LockstepError(
            "A pass of a rank's share is one sample, too few for batch norm; change train.global_batch, or lower "
            "train.accumulate where that is given."
        ) from error
    except MemoryError as error:
        raise LockstepError(_describe_want(world)) from error
    except RuntimeError as error:
        if NO_MEMORY in str(error):
            raise LockstepError(_describe_want(world)) from error
        if not isinstance(error, torch.distributed.DistError) and not any(word in str(error) for word in LOST_CONTACT):
            raise
        raise explain_loss(world) from error


def _describe_want(world: World) -> str:
    """The sentence for a host whose memory is too small for what is asked for."""
    return f"Rank {world.rank} is out of memory; lower train.global_batch, data.image_size or model.width."


@contextmanager
def watch_ranks(world: World, timeout_s: float) -> Iterator[None]:
    """While inside, a GPU's rank ends when another is lost; on a CPU the all-reduce itself fails, or times out."""
    if world.pulse is None or world.device.type != "cuda":
        yield
        return
    followed = (world.rank + 1) % world.size
    lookout = Lookout(
        world.pulse,
        followed,
        timeout_s=timeout_s,
        end=partial(end_rank, world),
        has_given_up=has_timed_out,
        is_stuck=torch.distributed.get_backend() == "nccl",
    )
    try:
        yield
    finally:
        lookout.close()


def end_rank(world: World, lost: Lost | None) -> None:
    """Say who is lost and end this process at once: its main thread may never come back from the device."""
    failed = find_failed(world)
    if failed is None or world.local_rank == 0:
        say_last(f"lockstep: {failed or phrase_loss(world.rank, lost)}")
    os._exit(1)


def explain_loss(world: World) -> LostContact:
    """Who is missing after a failed all-reduce: by its own word, or as far as the pulses tell."""
    failed = find_failed(world)
    return failed or LostContact(phrase_loss(world.rank, world.pulse.find_lost() if world.pulse else None))


def find_failed(world: World) -> Followed | None:
    """The sentence on a rank that could say why it did not go on, if there is one."""
    failed = world.pulse.find_failed() if world.pulse else None
    if failed is None:
        return None
    return Followed(f"Rank {failed.rank} could not go on, and rank {world.rank} stopped with it: {failed.why}")


def phrase_loss(rank: int, lost: Lost | None) -> str:
    """The sentence on a rank that is lost; one that is stopped on this host is ended."""
    if lost is None:
        return f"Rank {rank} lost contact with the other ranks and stopped."
    if lost.is_dead:
        end_process(lost.process)
    what = "stopped answering" if lost.is_dead else "is behind the others"
    return f"Rank {lost.rank} {what} and never sent buffer {lost.buffer + 1} of step {lost.step}; rank {rank} stopped."
