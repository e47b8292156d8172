"""The loss scale (Micikevicius et al. 2018): lifts FP16 gradients out of underflow; steps 6 and 9 of the walk.

The loss is multiplied by it before backward and the update rule divides by it again. A step whose summed gradients
overflowed is skipped and halves the scale; many good steps in a row double it. All of this is a few numbers on the
device: the host reads them when it logs, never during a step. All ranks see the same sums and so decide alike.
"""

import torch
from torch import Tensor

from lockstep.layout import Layout

# Places in the state: the factor, good steps since it last changed, steps skipped in a row, steps skipped in all.
SCALE, GOOD, ROW, SKIPPED = range(4)


class LossScale:
    """A dynamic loss scale between `floor` and `ceiling`; a static one has both where it starts."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        initial: float = 2.0**16,
        growth_steps: int = 2000,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
    ) -> None:
        self.growth_steps = growth_steps
        self.floor = floor
        self.ceiling = ceiling
        self.state = torch.tensor([initial, 0.0, 0.0, 0.0], device=device)
        num_slots = len(layout.slots)
        self.overflows = torch.zeros(num_slots, dtype=torch.int32, device=device)  # times each slot was not finite
        self.firsts = torch.zeros(num_slots, dtype=torch.int32, device=device)  # times it was the nearest to the loss
        self.depths = torch.tensor([slot.depth for slot in layout.slots], dtype=torch.int32, device=device)

    @property
    def factor(self) -> Tensor:
        """What the loss is multiplied by."""
        return self.state[SCALE]

    def settle(self, is_finite: Tensor) -> Tensor:
        """Take note of which slots are finite after a step; returns whether the step counts.

        The plain version of what the fused kernels do on their way.
        """
        counts = is_finite.all()
        scale, good, row, skipped = self.state.unbind()
        grows = good + 1 >= self.growth_steps
        after_good = [
            torch.where(grows, (2 * scale).clamp(max=self.ceiling), scale),
            torch.where(grows, 0.0, good + 1),
            torch.zeros_like(row),
            skipped,
        ]
        after_bad = [(scale / 2).clamp(min=self.floor), torch.zeros_like(good), row + 1, skipped + 1]
        self.state.copy_(torch.where(counts, torch.stack(after_good), torch.stack(after_bad)))
        self.overflows += ~is_finite
        bad_depths = torch.where(is_finite, len(self.depths), self.depths)
        self.firsts += ~is_finite & (bad_depths == bad_depths.min())
        return counts

    def drop_skipped(self, numbers: Tensor) -> Tensor:
        """The numbers of the last step, or zeros if it was skipped."""
        return torch.where(self.state[ROW] > 0, 0.0, numbers)

    def arrays(self) -> dict[str, Tensor]:
        """All that steps change of it."""
        return {"loss_scale": self.state, "overflows": self.overflows, "firsts": self.firsts}
