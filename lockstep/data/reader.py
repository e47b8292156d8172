"""Sample number → encoded bytes and header, with an account of the samples that cannot be used (step 2 on the walk).

A large data set holds a few damaged files, and they must not end a run; many of them are a broken disk, and must.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from lockstep.data.decode import DecodeError, Encoded, Header, read_header
from lockstep.data.order import Samples
from lockstep.data.sources import Source
from lockstep.errors import LockstepError


class Loaded(NamedTuple):
    """A sample in memory, not yet decoded."""

    sample: int
    data: Encoded
    header: Header


Fetch = Callable[[list[int]], list[Loaded | None]]  # None for what the caller has to read himself


class SampleReader:
    """Reads samples, and keeps account of those that cannot be read or decoded."""

    def __init__(self, source: Source, bad_share: float) -> None:
        self.source = source
        self.max_bad = math.ceil(bad_share * source.num_samples)
        self.bad: dict[int, str] = {}

    def load(self, sample: int) -> Loaded | None:
        """The sample, or None when it is bad; raises once there are too many bad ones."""
        if sample in self.bad:
            return None
        try:
            data = self.source.read(sample)
            return Loaded(sample, data, read_header(data))
        except (OSError, DecodeError) as error:
            self.count_bad(sample, error)
        return None

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
        fetched = zip(samples, fetch(samples), strict=True)
        return [image if image and sample not in self.bad else load(sample) for sample, image in fetched]

    def count_bad(self, sample: int, error: OSError | DecodeError) -> None:
        """Note that a sample cannot be used, and stop the run when there are too many."""
        reason = error.strerror if isinstance(error, OSError) else error
        self.bad[sample] = f"{self.source.name(sample)} ({reason})"
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
