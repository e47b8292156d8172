"""In how many passes a rank's share of a step runs (before step 6 on the walk)."""

from fractions import Fraction

from lockstep.config import RunConfig, TrainConfig
from lockstep.data.order import share
from lockstep.errors import LockstepError


def plan_passes(train: TrainConfig, rank: int, num_ranks: int) -> int | Fraction:
    """Samples of a pass: a batch of n runs in ⌈n / this⌉ passes, a whole share in exactly `train.accumulate`.

    The smaller last batch of an epoch takes fewer in proportion.
    """
    start, stop = share(train.global_batch, rank, num_ranks)
    return Fraction(max(1, stop - start), train.accumulate) if train.accumulate else train.largest_pass


def check_shares(config: RunConfig, num_ranks: int) -> None:
    """Refuse a world in which a rank would never get a sample."""
    if num_ranks > config.train.global_batch:
        raise LockstepError(
            f"train.global_batch = {config.train.global_batch} cannot be shared by {num_ranks} ranks; "
            "give at least one sample to each."
        )
    if config.train.accumulate * num_ranks > config.train.global_batch:
        raise LockstepError(
            f"train.global_batch = {config.train.global_batch} cannot be shared by {num_ranks} ranks in "
            f"train.accumulate = {config.train.accumulate} passes each; give at least one sample to each pass."
        )
