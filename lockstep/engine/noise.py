"""The gradient noise scale (McCandlish et al. 2018, appendix A.1): the batch beyond which more samples pay little.

A rank's own gradient is a mean over few samples and the summed one over many; alone in the world, so are the gradient
of a step's first pass and that of all its passes. Noise adds tr(Σ) / B to the squared norm of a mean over B, so the two
norms give both |G|², without noise, and tr(Σ). Each is averaged over steps by itself, and their ratio tr(Σ) / |G|² is
the noise scale. Asked for at a few steps (step 10 on the walk); one rank that takes a step in one pass cannot know it.
"""

import math

NEWEST = 0.1  # weight of the newest estimate: a single one may be off by its own size


class NoiseScale:
    """Running averages of tr(Σ) and |G|²."""

    def __init__(self) -> None:
        self._noise = self._signal = self._weight = 0.0

    def add(self, *, small_square: float, small_inverse: float, big_square: float, big: int) -> None:
        """Squared norms of gradients over a part of the global batch, a rank's or a pass's, and over all of it.

        `small_square` is averaged over ranks, and so is 1 / batch (`small_inverse`): that is exact for uneven shares.
        """
        spread = small_inverse - 1 / big
        if spread <= 0 or not math.isfinite(small_square + big_square):
            return
        noise = (small_square - big_square) / spread
        signal = big_square - noise / big
        self._noise += NEWEST * (noise - self._noise)
        self._signal += NEWEST * (signal - self._signal)
        self._weight += NEWEST * (1 - self._weight)  # what is not yet in the averages, which began at zero

    @property
    def samples(self) -> float | None:
        """The noise scale; None before the first estimate, and where chance has made one of the two negative."""
        if self._weight == 0 or self._noise <= 0 or self._signal <= 0:
            return None
        return self._noise / self._signal
