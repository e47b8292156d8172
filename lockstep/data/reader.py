"""Sample number → encoded bytes and header, with an account of the samples that cannot be used (step 2 on the walk).

A large data set holds a few damaged files, and they must not end a run; many of them are a broken disk, and must.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from lockstep.data.decode import DecodeError, Header, read_header
from lockstep.data.jpeg_frame import Encoded
from lockstep.data.order import Samples
from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.sources import Source
from lockstep.data.threads import MAX_HUNG, Watch, disk_hangs, too_late
from lockstep.errors import LockstepError

Result = TypeVar("Result")


class Loaded(NamedTuple):
    """A sample in memory, as a rule not yet decoded."""

    sample: int
    data: Encoded
    header: Header
    is_decoded: bool = False  # the data are the pixels, at full size


Fetch = Callable[[list[int]], list[Loaded | None]]  # None for what the caller has to read himself


class SampleReader:
    """Reads samples, and keeps account of those that cannot be read or decoded.

    The `watch` knows how long each thread has waited for its sample; whoever waits for the thread looks there.
    """

    def __init__(self, source: Source, bad_share: float, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        self.source = source
        self.watch = Watch(read_timeout_s)
        self.max_bad = math.ceil(bad_share * source.num_samples)
        self.bad: dict[int, str] = {}
        self._num_overdue = 0

    def load(self, sample: int) -> Loaded | None:
        """The sample, or None when it is bad; raises once there are too many bad ones."""
        if sample in self.bad:
            return None
        try:
            data = self._watched(sample, self.source.read)
            if sample not in self.bad:  # since it was begun: others have replaced it by now, and so does everybody
                return Loaded(sample, data, read_header(data))
        except (OSError, DecodeError) as error:
            self.count_bad(sample, error)
        return None

    def _watched(self, sample: int, read: Callable[[int], Result]) -> Result:
        """Read something of a sample; GivenUp when it came too late."""
        self.watch.begin(sample)
        try:
            return read(sample)
        finally:
            self.watch.end()

    def load_or_next(self, sample: int) -> Loaded:
        """The first usable sample from this one on: the same replacement on any rank."""
        for step in range(self.source.num_samples):
            loaded = self.load((sample + step) % self.source.num_samples)
            if loaded:
                return loaded
        raise LockstepError(f"None of the {self.source.num_samples} samples can be read; check data.path.")

    def load_all(self, samples: list[int], replaces: bool, fetch: Fetch | None = None) -> list[Loaded | None]:
        """Each sample, or where it is bad the next usable one or None; `fetch` may get some of them more cheaply."""
        load = self.load_or_next if replaces else self.load
        if fetch is None:
            return [load(sample) for sample in samples]
        wanted = [sample for sample in samples if sample not in self.bad]  # one may be bad because it hangs its reader
        fetched = dict(zip(wanted, fetch(wanted), strict=True))
        images = ((sample, fetched.get(sample)) for sample in samples)
        return [image if image and sample not in self.bad else load(sample) for sample, image in images]

    def count_bad(self, sample: int, error: OSError | DecodeError) -> None:
        """Note that a sample cannot be used, and stop the run when there are too many."""
        reason = error.strerror if isinstance(error, OSError) else error
        self._note_bad(sample, f"{self._watched(sample, self.source.name)} ({reason})")

    def count_overdue(self, sample: int) -> None:
        """Note that a sample does not come; stop the run when it seems that none does."""
        # Where it lies, known without reading: what hangs would also hang whoever looks for its name.
        place = getattr(self.source, "where", self.source.name)(sample)
        self._num_overdue += 1
        if self._num_overdue >= MAX_HUNG:
            raise disk_hangs(self.watch.limit_s, place)
        self._note_bad(sample, f"{place} ({too_late(self.watch.limit_s).strerror})")

    def _note_bad(self, sample: int, name: str) -> None:
        self.bad[sample] = name
        if len(self.bad) > self.max_bad:
            raise LockstepError(self.describe_excess(self.bad))

    def describe_excess(self, bad: dict[int, str]) -> str:
        """The sentence that ends a run with too many bad samples, whoever met them."""
        return (
            f"{len(bad)} of {self.source.num_samples} samples cannot be read, and data.bad_share allows "
            f"{self.max_bad}: {', '.join(list(bad.values())[:5])}. "
            "Repair or remove these files, or raise data.bad_share."
        )

    def replace_known_bad(self, samples: Samples) -> Samples:
        """The samples with those known to be bad replaced by their next neighbours not known to be."""
        if not self.bad:
            return samples
        replaced = samples.copy()
        for row in range(len(replaced)):
            while int(replaced[row]) in self.bad and len(self.bad) < self.source.num_samples:
                replaced[row] = (replaced[row] + 1) % self.source.num_samples
        return replaced
