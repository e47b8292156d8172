"""Step → learning rate, a pure function, so that a run resumed at any step goes on as if never stopped. Torch-free.

Linear warm-up, then a decay over the remaining steps: warm-up starts at `warmup_lr` at step 0 and reaches `lr` at step
`warmup_steps`; poly and cosine reach `end_lr` at the last step, `total_steps - 1`.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import SharedError


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step of a run."""

    kind: Literal["constant", "poly", "cosine", "step"]
    lr: float
    total_steps: int
    warmup_steps: int = 0
    warmup_lr: float = 0.0
    end_lr: float = 0.0
    power: float = 2.0
    milestones: tuple[int, ...] = ()  # steps, ascending
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps > self.total_steps:
            raise SharedError(
                f"The warm-up of {self.warmup_steps} steps is longer than the run of {self.total_steps} steps: "
                "shorten optim.warmup or lengthen train.duration."
            )
        if list(self.milestones) != sorted(self.milestones):
            raise SharedError(f"optim.milestones must ascend, but come to steps {list(self.milestones)}: sort them.")

    def lr_at(self, step: int) -> float:
        """The learning rate of the update numbered `step`, from 0 to total_steps - 1."""
        if step < self.warmup_steps:
            return self.warmup_lr + (self.lr - self.warmup_lr) * step / self.warmup_steps
        match self.kind:
            case "constant":
                return self.lr
            case "poly":
                return self.end_lr + (self.lr - self.end_lr) * math.pow(1.0 - self._progress(step), self.power)
            case "cosine":
                return self.end_lr + (self.lr - self.end_lr) * 0.5 * (1.0 + math.cos(math.pi * self._progress(step)))
            case "step":
                return self.lr * self.gamma ** bisect_right(self.milestones, step)

    def _progress(self, step: int) -> float:
        """How much of the decay is done: 0 at the end of warm-up, 1 at the last step."""
        decay_steps = self.total_steps - 1 - self.warmup_steps
        return (step - self.warmup_steps) / decay_steps if decay_steps > 0 else 0.0
