"""Sample number → decoded image: source and decoder in one, with an account of the samples that cannot be read.

A large data set holds a few damaged files, and they must not end a run; many of them are a broken disk, and must.
"""

import math

from lockstep.data.decode import DecodeError, Decoder, Pixels, decode
from lockstep.data.sources import Source
from lockstep.errors import LockstepError


class SampleReader:
    """Reads and decodes samples, and keeps account of those that cannot be."""

    def __init__(self, source: Source, bad_share: float, decoder: Decoder = decode) -> None:
        self._source = source
        self._decoder = decoder
        self._max_bad = math.ceil(bad_share * source.num_samples)
        self.bad: dict[int, str] = {}

    def read(self, sample: int) -> Pixels | None:
        """The image, or None when it is bad; raises once there are too many bad ones."""
        if sample in self.bad:
            return None
        try:
            return self._decoder(self._source.read(sample))
        except (OSError, DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self.bad[sample] = f"{self._source.name(sample)} ({reason})"
        if len(self.bad) > self._max_bad:
            raise LockstepError(
                f"{len(self.bad)} of {self._source.num_samples} samples cannot be read, and data.bad_share allows "
                f"{self._max_bad}: {', '.join(list(self.bad.values())[:5])}. "
                "Repair or remove these files, or raise data.bad_share."
            )
        return None

    def read_or_next(self, sample: int) -> tuple[Pixels, int]:
        """The first readable image from this sample on, and its number: the same replacement on any rank."""
        for step in range(self._source.num_samples):
            candidate = (sample + step) % self._source.num_samples
            image = self.read(candidate)
            if image is not None:
                return image, candidate
        raise LockstepError(f"None of the {self._source.num_samples} samples can be read; check data.path.")
