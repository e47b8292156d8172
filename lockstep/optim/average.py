"""A moving average of the weights, beside the master weights; behind step 9 of the walk.

After every `every` good steps the average takes a share of the weights:  a ← a + share · (w − a). The share is
1 − decay, but never less than 9 / (9 + u) at update u = 1, 2, …: a young average would otherwise be made of the first
weights (the usual warm-up, decay ≤ (1 + t) / (10 + t) after t updates). Batch norm's running statistics are averaged
alike: they then belong to the averaged weights as nearly as an average can, and no pass over the data is needed.

Everything is decided on the device from the rule's count of good steps, so that a recorded step can hold it: a step
that the loss scale skipped moves nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels import has_triton
from lockstep.optim.loss_scale import ROW, LossScale

YOUNG = 9.0  # the warm-up: update u takes at least YOUNG / (YOUNG + u) of the weights


class Average:
    """The average of a flat array of weights, and of statistics that lie apart."""

    def __init__(
        self,
        weights: Tensor,
        statistics: Sequence[Tensor] = (),
        *,
        decay: float,
        every: int = 1,
        fused: bool | None = None,
    ) -> None:
        """`weights` and `statistics` are the arrays that steps change; they stay where they are.

        `fused`: by a kernel or by the plain version; None lets the device decide.
        """
        self.least_share = 1.0 - decay
        self.every = every
        self._live = weights
        self._live_statistics = [array.detach() for array in statistics]
        self.weights = torch.zeros_like(weights)
        numel = sum(array.numel() for array in self._live_statistics)
        self.statistics = torch.zeros(numel, device=weights.device)
        self._gathered = torch.zeros_like(self.statistics)
        self.is_fused = weights.is_cuda and has_triton() if fused is None else fused
        self._no_skip = torch.zeros((), device=weights.device)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Start from the weights as they are now."""
        self.weights.copy_(self._live)
        self.statistics.copy_(self._gather())

    @torch.no_grad()
    def follow(self, count: Tensor, scale: LossScale | None = None) -> None:
        """Take a share of the weights if it is due; `count` is that of the rule's good steps, this one among them."""
        skipped = scale.state[ROW] if scale else self._no_skip
        if self.is_fused:
            from lockstep.kernels.average_kernel import move_average

            for average, live in ((self.weights, self._live), (self.statistics, self._gather())):
                move_average(average, live, count, skipped, self.every, self.least_share, YOUNG)
            return
        share = self.find_share(count, skipped)
        if not share.is_cuda and not share:  # where a look costs nothing
            return
        self.weights.lerp_(self._live, share)
        self.statistics.lerp_(self._gather(), share)

    def find_share(self, count: Tensor, skipped: Tensor) -> Tensor:
        """What an update takes of the weights after `count` good steps; 0 where none is due."""
        is_due = (count % self.every == 0) & (count > 0) & (skipped == 0)
        share = (YOUNG / (YOUNG + count / self.every)).clamp(min=self.least_share)
        return torch.where(is_due, share, 0.0)

    def _gather(self) -> Tensor:
        """The running statistics as they are now, in one array."""
        if self._live_statistics:
            torch.cat([array.flatten() for array in self._live_statistics], out=self._gathered)
        return self._gathered
