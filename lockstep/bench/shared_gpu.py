"""Several NCCL ranks on one GPU, for benchmarks and tests where there are fewer GPUs than ranks. Torch-free.

NCCL refuses two ranks of one host on one GPU. A rank that names a host of its own is believed, and NCCL reaches the
other ranks over sockets: what is computed is what a cluster computes, and what travels is slower than in one.
"""

from lockstep.engine.places import SHARED_QUEUES


def describe_rank(rank: int | str) -> dict[str, str]:
    """A rank's environment, to be set before NCCL starts: a host and a node of its own, with one rank on it."""
    name = f"r{rank}"
    own = {"NCCL_HOSTID": name, "LOCKSTEP_NODE": name, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return own | SHARED_QUEUES
