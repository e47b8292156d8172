"""The precision gradients travel in (step 7 on the walk), and what keeps half-precision sums in range.

A buffer arrives already divided by the global batch. Half gradients, which carry the loss scale, travel as they are.
FP32 ones may be cast: as they are, small gradients may underflow; scaled up before the cast, their sum may overflow.
The three divisions place that scale differently.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from lockstep.comm.allreduce import Algorithm, Groups, all_gather, own_spans, reach, reduce_scatter, wait

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Wire:
    """Sums buffers over all ranks, FP32 ones in a chosen precision."""

    def __init__(
        self, dtype: Literal["fp32", "fp16", "bf16"] = "fp32", division: Literal["before", "split", "fp32"] = "before"
    ) -> None:
        """`before`: cast as it is; no sum overflows that would not in the end, but small gradients underflow.

        `split`: times √N before the cast and divided by √N after the sum, half-way between the two dangers.
        `fp32`: times N before the cast, but added in FP32 and divided by N before the sum travels back in halves: the
        least is lost, and only a single rank's gradient above 65504 / N overflows FP16. It has an all-reduce of its
        own, whatever algorithm is given.
        """
        self.dtype = DTYPES[dtype]
        self.division = division

    @property
    def is_plain(self) -> bool:
        """Whether all buffers travel as they are."""
        return self.dtype == torch.float32

    @property
    def bytes_per_element(self) -> int:
        """What an element of a buffer weighs on its way."""
        return self.dtype.itemsize

    def sum(self, buffer: Tensor, algorithm: Algorithm, groups: Groups, num_exact: int = 0) -> None:
        """Sum a buffer over all ranks in place; its last `num_exact` elements always travel as they are.

        Counts and votes are among them: a count over 256 ranks is beyond what FP16 can hold.
        """
        if self.is_plain or buffer.dtype != torch.float32 or groups.num_ranks == 1:
            algorithm(buffer, groups)
            return
        if num_exact:
            algorithm(buffer[-num_exact:], groups)
            buffer = buffer[:-num_exact]
        if not buffer.numel():
            return
        if self.division == "fp32":
            self._sum_in_fp32(buffer, groups)
        else:
            factor = math.sqrt(groups.num_ranks) if self.division == "split" else 1.0
            half = self._take(buffer, groups)
            half.copy_(buffer.mul_(factor))
            algorithm(half, groups)
            buffer.copy_(half).div_(factor)

    def _sum_in_fp32(self, buffer: Tensor, groups: Groups) -> None:
        """Every rank adds up its piece of the buffer in FP32 from everyone's halves, then all exchange their pieces."""
        num_ranks = groups.num_ranks
        ranks = range(num_ranks)
        with reach(buffer, groups) as reachable:
            half = self._take(reachable, groups)
            half.copy_(reachable.mul_(num_ranks))
            halves = own_spans(half, ranks, num_ranks)
            # This rank's own share is rounded like the others', or the result would depend on who owns the piece.
            total = own_spans(reachable, ranks, num_ranks)[groups.rank].copy_(halves[groups.rank])
            works = reduce_scatter(halves, total, ranks, groups)
            halves[groups.rank].copy_(total.div_(num_ranks))
            wait([*works, *all_gather(halves, ranks, groups)])
            reachable.copy_(half)

    def _take(self, buffer: Tensor, groups: Groups) -> Tensor:
        return groups.scratch.take("wire", buffer.numel(), self.dtype, buffer.device)
