"""What every update rule is: state arrays over the layout, and a step in place; step 9 of the walk.

A rule sees weights and gradients as flat FP32 arrays with zeros between the slots. It may use the gradients as scratch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.layout import Layout, align

# On the CPU a norm adds up in FP32, element after element: over the 38 M of AlexNet's fc6 it is off by 2e-3, over
# pieces of this size by less than 1e-6.
PIECE = 1 << 16


class Segments:
    """Flat arrays slot by slot, each slot with the padding behind it, whose zeros change neither norms nor sums."""

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        self._sizes = [align(slot.numel) for slot in layout.slots]
        self._piece_sizes = [min(PIECE, size - start) for size in self._sizes for start in range(0, size, PIECE)]
        self._pieces_per_slot = [-(-size // PIECE) for size in self._sizes]
        self._decay = [slot.decay for slot in layout.slots]
        self.decay = torch.tensor(self._decay, device=device)
        self.adapt = torch.tensor([slot.adapt for slot in layout.slots], device=device)

    def where_decay(self, flat: Tensor, decay: bool) -> list[Tensor]:
        """The slots that get weight decay, or those that do not."""
        return [
            view
            for view, decays in zip(flat.split_with_sizes(self._sizes), self._decay, strict=True)
            if decays == decay
        ]

    def norms(self, flat: Tensor) -> Tensor:
        """The L2 norm of every slot."""
        of_pieces = torch.stack(torch._foreach_norm(flat.split_with_sizes(self._piece_sizes)))
        return torch.stack(torch._foreach_norm(of_pieces.split_with_sizes(self._pieces_per_slot)))

    def add_decay(self, update: Tensor, weights: Tensor, weight_decay: float) -> None:
        """update ← update + weight_decay · weights, in the slots that decay."""
        if weight_decay and any(self._decay):
            torch._foreach_add_(self.where_decay(update, True), self.where_decay(weights, True), alpha=weight_decay)

    def scale(self, flat: Tensor, factors: Tensor) -> None:
        """Multiply every slot by its factor, which stays on the device."""
        torch._foreach_mul_(flat.split_with_sizes(self._sizes), list(factors.unbind()))

    def trust(self, ratios: Tensor, *norms: Tensor) -> Tensor:
        """The trust ratio where a slot adapts and none of its norms is zero; 1 elsewhere."""
        trusted = torch.stack([self.adapt, *(norm > 0 for norm in norms)]).all(dim=0)
        return torch.where(trusted, ratios, 1.0)


class Rule(ABC):
    """An update rule and its state."""

    def __init__(self, layout: Layout, device: torch.device | str, state_names: tuple[str, ...]) -> None:
        self.segments = Segments(layout, device)
        self.step_count = 0
        self._state = {name: torch.zeros(layout.numel, device=device) for name in state_names}

    @abstractmethod
    def step(self, weights: Tensor, gradients: Tensor, lr: float) -> None:
        """Update the weights in place; the gradients are left as scratch."""

    def state(self) -> dict[str, Tensor]:
        """The flat state arrays by name, not copied: with `step_count`, all that a rule remembers."""
        return dict(self._state)

    def load_state(self, arrays: Mapping[str, Tensor], step_count: int) -> None:
        """Go on from a saved state."""
        if arrays.keys() != self._state.keys():
            raise LockstepError(
                f"The saved optimiser state holds {sorted(arrays)} but {type(self).__name__.upper()} needs "
                f"{sorted(self._state)}: resume with the optim.name the run was started with."
            )
        for name, array in self._state.items():
            array.copy_(arrays[name])
        self.step_count = step_count
