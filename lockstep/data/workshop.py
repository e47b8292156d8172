"""Where batches are made: chooses path, decoders and what stays on the device, and starts the threads accordingly."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal, NotRequired, TypedDict

import torch

from lockstep.data.block import Request, Rows
from lockstep.data.device_batch import DeviceBatch, DevicePath
from lockstep.data.host_batch import HostPath
from lockstep.data.nvjpeg import Nvjpeg, has_nvjpeg
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.prefetch import Making, Pending, Prefetcher
from lockstep.data.probe import probe_headers
from lockstep.data.reader import SampleReader
from lockstep.data.resident import Resident, Shelf, estimate_bytes, free_device_bytes
from lockstep.data.sources import Source
from lockstep.errors import LockstepError

# The share of the free device memory that decoded images may take when they are told to stay there.
ON_SHARE = 0.8
# For what nvJPEG leaves; Python runs one thread at a time, and more that decode hold up those that keep nvJPEG busy.
THREADS_BESIDE_NVJPEG = 4
# That read for nvJPEG; that decode, at most: beyond so many the threads that take their pixels are what holds them up.
READ_PROCESSES, MOST_DECODE_PROCESSES = 2, 8
FORMAT_PROBES = 32  # images whose headers say whether nvJPEG has anything to do
# A thread that comes back from nvJPEG, a process or a file waits for its turn among others, which by default may keep
# it for 5 ms each: as long as nvJPEG takes for a block.
TURN_S = 0.0001

DecoderName = Literal["auto", "cpu", "nvjpeg", "both"]
Residence = Literal["auto", "on", "off"]


class Means(TypedDict):
    """What it takes to make batches, as both pipelines are given it."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    threads: int
    device: torch.device
    dtype: NotRequired[torch.dtype]  # of the images
    decoder: NotRequired[DecoderName]
    resident: NotRequired[Residence]
    shelf: NotRequired[Shelf | None]  # where decoded images stay for the pipelines of later runs
    read_processes: NotRequired[int]  # that read files for nvJPEG, or decode them where Pillow would
    on_device: NotRequired[bool]  # whether the device crops; by default a GPU does


@dataclass(frozen=True)
class Crew:
    """Who makes batches, as things stand."""

    decoder: Literal["cpu", "nvjpeg", "both"]
    threads: int
    read_processes: int
    threads_help: bool  # nvJPEG with what it could do itself
    is_resident: bool  # whether decoded images stay on the device
    images_per_second: float | None  # that all could make if none ever waited for work; None: not known yet


class Workshop:
    """Takes requests and gives batches; images that fit into a `share` of the free device memory stay there."""

    def __init__(
        self,
        reader: SampleReader,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        threads: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        decoder: DecoderName = "auto",
        resident: Residence = "auto",
        read_processes: int = 0,
        on_device: bool | None = None,
        shelf: Shelf | None = None,
        *,
        share: float,
    ) -> None:
        self._device = device
        self._decoder = choose_decoder(decoder, device)
        self._path: DevicePath | HostPath
        num_decoding = 0  # processes
        if device.type == "cuda" if on_device is None else on_device:
            nvjpeg = Nvjpeg(device) if self._decoder in ("nvjpeg", "both") else None
            build = partial(build_resident, resident, reader, device, share)
            kept = shelf.take(reader.source, self._decoder, build) if shelf else build()
            read_processes = 0 if kept and kept.is_whole else read_processes
            if nvjpeg or read_processes:
                sys.setswitchinterval(min(sys.getswitchinterval(), TURN_S))
            self._path = DevicePath(reader, device, mean, std, dtype, kept, nvjpeg, read_processes)
            num_decoding = 0 if nvjpeg else len(self._path.read_pool)
        else:
            self._path = HostPath(reader, mean, std, dtype)
        self._threads = threads
        self._prefetcher = Prefetcher(
            self._path,
            threads,
            fill_by_nvjpeg=_fill_by_nvjpeg if self._decoder in ("nvjpeg", "both") else None,
            host_decodes=self._decoder != "nvjpeg",
            reader=reader,
            processes=num_decoding,
        )

    @property
    def is_idle(self) -> bool:
        """Whether some thread has nothing to do."""
        return self._prefetcher.is_idle

    def start(self, request: Request) -> Pending:
        """Begin a batch."""
        return self._prefetcher.start(request)

    def note(self, ran_dry: bool) -> None:
        """A batch was handed over; whether the device had nothing left to do while it waited for it."""
        self._prefetcher.balance.note(ran_dry)

    def mark_step(self) -> torch.cuda.Event | None:
        """An event behind everything the step has queued so far; None on a CPU, which queues nothing."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def describe(self) -> str:
        """Who decodes, and what stays on the device."""
        threads = f"{self._threads} decode thread{'s' if self._threads > 1 else ''}"
        both = f"nvJPEG and {threads}" + ("" if self._prefetcher.balance.helps else " for what it leaves")
        who = {"cpu": threads, "nvjpeg": "nvJPEG", "both": both}[self._decoder]
        return ", ".join([who, *self._path.describe()])

    def crew(self) -> Crew:
        """Who makes batches now."""
        path = self._path if isinstance(self._path, DevicePath) else None
        return Crew(
            decoder=self._decoder,
            threads=self._threads,
            read_processes=len(path.read_pool) if path else 0,
            threads_help=self._prefetcher.balance.helps,
            is_resident=path is not None and path.resident is not None,
            images_per_second=self._prefetcher.rate(),
        )

    def close(self) -> None:
        """Stop the threads, and let the device finish what they have started."""
        self._path.interrupt()
        self._prefetcher.close()
        self._path.close()


def _fill_by_nvjpeg(making: Making, rows: Rows) -> Rows:
    assert isinstance(making, DeviceBatch)
    return making.fill_by_nvjpeg(rows)


def choose_decoder(wanted: DecoderName, device: torch.device) -> Literal["cpu", "nvjpeg", "both"]:
    """Who decodes: on a GPU everybody who can, unless told otherwise."""
    is_possible = device.type == "cuda" and has_nvjpeg()
    if wanted == "auto":
        return "both" if is_possible else "cpu"
    if wanted != "cpu" and not is_possible:
        raise LockstepError(
            f'data.decoder = "{wanted}" needs a CUDA device and torchvision; install torchvision or set it to "cpu".'
        )
    return wanted


def needs_pillow(source: Source, device: torch.device, read_timeout_s: float = READ_TIMEOUT_S) -> bool:
    """Whether most of a GPU's images are Pillow's to decode: nvJPEG and libjpeg-turbo know one format."""
    if device.type != "cuda":
        return False
    headers = probe_headers(source, FORMAT_PROBES, read_timeout_s)
    return bool(headers) and 2 * sum(not header.colors for header in headers) >= len(headers)


def build_resident(wanted: Residence, reader: SampleReader, device: torch.device, share: float) -> Resident | None:
    """Room for all decoded images, where that takes no more than a share of what is free or is asked for."""
    num_samples = reader.source.num_samples
    if wanted == "off":
        return None
    free = free_device_bytes(device)
    needed = estimate_bytes(reader.source, reader.watch.limit_s)
    if wanted == "on":
        if needed > ON_SHARE * free:
            raise LockstepError(
                f"The decoded images take {needed / 2**30:.1f} GiB and the device has {free / 2**30:.1f} GiB free; "
                'set data.resident to "auto" or "off".'
            )
        return Resident(num_samples, ON_SHARE * free)
    return Resident(num_samples, share * free) if needed <= share * free else None
