"""How long a run still takes, from its records: the steps, evaluations and checkpoints that are left."""

from lockstep.config import ANCHORED
from lockstep.events import AnchorTaken, CheckpointSaved, Evaluated, Event, RunStarted, StepDone
from lockstep.recipe_values import Duration

# Weight of the newest record in the running mean of the step time: follows a change within a few records.
NEWEST = 0.3
# Forward is about a third of a training step's work; stands in until the first evaluation was timed.
FORWARD_SHARE = 1 / 3


class TimeLeft:
    """Follows a run's records and predicts the seconds to its end."""

    def __init__(self, start: RunStarted) -> None:
        train = start.config["train"]
        self._start = start
        self._eval_every = Duration.parse(train["eval_every"]).steps(start.steps_per_epoch)
        self._checkpoint_every = Duration.parse(train["checkpoint_every"]).steps(start.steps_per_epoch)
        optim = start.config.get("optim", {})
        has_anchors = optim.get("name") in ANCHORED
        every = Duration.parse(optim["anchor_every"]).steps(start.steps_per_epoch) if has_anchors else 0
        self._anchor_every = max(1, every)
        self._step = start.start_step
        self._step_s = 0.0
        self._eval_s = 0.0
        self._checkpoint_s = 0.0
        self._anchor_s = 0.0

    def emit(self, event: Event) -> None:
        match event:
            case StepDone():
                self._step = event.step
                self._step_s += (event.step_s - self._step_s) * (NEWEST if self._step_s else 1)
                if not self._eval_s and event.images_per_second:
                    self._eval_s = FORWARD_SHARE * self._start.num_val / event.images_per_second
            case Evaluated():
                self._step, self._eval_s = event.step, event.seconds
            case CheckpointSaved():
                self._step, self._checkpoint_s = event.step, event.seconds
            case AnchorTaken():
                self._step, self._anchor_s = event.step, event.seconds

    def seconds(self) -> float:
        """Seconds to the end as of the last record; 0 before the first step told how long a step takes."""
        return (
            (self._start.steps_total - self._step) * self._step_s
            + self._count_left(self._eval_every) * self._eval_s
            + self._count_left(self._checkpoint_every) * self._checkpoint_s
            + (self._start.steps_total - self._step) // self._anchor_every * self._anchor_s
        )

    def _count_left(self, every: int) -> int:
        """How often what comes `every` so many steps, and at the end, is still due."""
        total = self._start.steps_total
        if self._step >= total:
            return 0
        return -(-total // every) - self._step // every if every else 1
