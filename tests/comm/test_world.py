import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

from lockstep.comm.world import (
    Membership,
    World,
    expand_tasks,
    first_node,
    has_timed_out,
    join_world,
    read_membership,
    set_timeout,
)
from lockstep.errors import LockstepError
from tests.ranks import find_port, run_ranks, world_of_one

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_NODELIST": "gpu[003-004,9]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "123456",
}


def test_started_by_hand_there_is_no_membership() -> None:
    assert read_membership({"HOME": "/"}) is None


def test_torchrun_variables_name_the_rank() -> None:
    assert read_membership(TORCHRUN) == Membership(5, 8, 1, 4, "node7", 29500)


def test_slurm_variables_name_the_rank() -> None:
    assert read_membership(SLURM) == Membership(17, 20, 1, 4, "gpu003", 20000 + 123456 % 20000)


def test_steps_of_a_slurm_job_that_run_side_by_side_meet_at_ports_of_their_own() -> None:
    steps = [read_membership(SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(100)]
    assert len({step.port for step in steps if step}) == 100


def test_a_starter_that_names_no_local_rank_has_one_rank_on_each_node() -> None:
    """As a Kubernetes job of one rank per pod: counting all ranks as local would rule NCCL out."""
    pod = {key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL_")}
    assert read_membership(pod) == Membership(5, 8, 0, 1, "node7", 29500)


def test_an_interactive_slurm_shell_is_not_a_world() -> None:
    assert read_membership(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[003-006,9],login", "gpu003"), ("a,b", "a"), ("rack2-n[7]", "rack2-n7"), ("", "")]
)
def test_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_slurm_task_counts_expand() -> None:
    assert expand_tasks("8(x2),4") == [8, 8, 4]


def test_a_half_set_environment_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match="MASTER_PORT"):
        read_membership({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})


def test_a_rank_that_is_no_number_is_a_sentence() -> None:
    with pytest.raises(LockstepError, match="RANK is 'five'"):
        read_membership(TORCHRUN | {"RANK": "five"})
    with pytest.raises(LockstepError, match="SLURM_STEP_NUM_TASKS is 'many'"):
        read_membership(SLURM | {"SLURM_STEP_NUM_TASKS": "many"})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "rank 5 of 2"),
        ({"RANK": "-1"}, "rank -1 of"),
        ({"WORLD_SIZE": "-1"}, "of -1"),
        ({"MASTER_PORT": "-5"}, "port -5"),
        ({"MASTER_PORT": "70000"}, "port 70000"),
    ],
)
def test_a_place_that_no_world_has_is_a_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        read_membership(TORCHRUN | given)


def _exchange(world):  # type: ignore[no-untyped-def]
    world.barrier()
    word = world.broadcast_value({"from": world.rank})
    total = world.sum(torch.tensor([2**63 - 1, world.rank]))
    return world.rank, word, total.tolist(), world.gather_values(world.rank * 10), world.num_threads


def test_ranks_agree_and_integers_wrap() -> None:
    results = run_ranks(_exchange, 3)
    for rank, (own, word, total, gathered, threads) in enumerate(results):
        assert own == rank
        assert word == {"from": 0}
        assert total == [(3 * (2**63 - 1) + 2**63) % 2**64 - 2**63, 0 + 1 + 2]
        assert gathered == [0, 10, 20]
        assert threads >= 1


@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        ({}, "and set MASTER_PORT to a free port"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "and set MASTER_PORT to a free port"),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"},
            "by torchrun with --rdzv-backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_ranks_that_do_not_meet_say_what_to_check(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], advice: str
) -> None:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.setenv(name, variables.get(name, ""))
    member = Membership(1, 2, 0, 1, "127.0.0.1", find_port())
    with (
        pytest.raises(LockstepError, match=f"check that all were started, {advice}\\."),
        join_world(member, timeout_s=1),
    ):
        pass


def test_a_world_of_one_needs_no_process_group() -> None:
    world = world_of_one()
    assert world.is_first
    assert world.broadcast_value("x") == "x"
    assert world.sum(torch.tensor([3])).item() == 3


LEAVING = """
import sys
from lockstep.comm import world as module
from lockstep.errors import LockstepError
module.dist.destroy_process_group = lambda: print("destroyed", flush=True)  # as one that waits for ever
try:
    try:
        raise LockstepError("the reason")
    except LockstepError:
        module._leave_after_error(sys.argv[1])
        raise
except LockstepError as error:
    print(error, flush=True)
    sys.exit(1)
"""


@pytest.mark.parametrize(("backend", "expected"), [("nccl", "the reason\n"), ("gloo", "destroyed\nthe reason\n")])
def test_after_an_error_nccl_is_not_waited_for_and_the_reason_is_said(backend: str, expected: str) -> None:
    result = subprocess.run([sys.executable, "-c", LEAVING, backend], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, expected)


def wait_for_a_late_rank(world: World) -> tuple[float, bool]:
    """With a timeout of 1 s a rank comes 2 s late, once inside `patience` and once after it."""
    set_timeout(1.0)
    world = replace(world, device=torch.device("cuda"), timeout_s=1.0)  # as far as `patience` looks
    with world.patience():
        time.sleep(2.0 * world.rank)
        found = world.maximum(torch.tensor([float(world.rank)])).item()
    time.sleep(2.0 * world.rank)
    try:
        world.maximum(torch.zeros(1))
    except RuntimeError:
        return found, True
    return found, False


def test_a_rank_that_compiles_is_waited_for_beyond_the_timeout_and_no_other() -> None:
    assert run_ranks(wait_for_a_late_rank, 2)[0] == (1.0, True)


class Group:
    """A process group of GPUs whose backend has noted this."""

    def __init__(self, noted: str) -> None:
        self.noted = noted

    def _get_backend(self, device: torch.device) -> "Group":
        if self.noted == "no GPU":
            raise RuntimeError("No backend type associated with device type cuda")
        return self

    def get_error(self) -> "Group":
        return self

    @property
    def name(self) -> str:
        return self.noted


@pytest.mark.parametrize(("noted", "expected"), [("SUCCESS", False), ("TIMEOUT", True), ("COMM_ERROR", True)])
def test_what_any_groups_watchdog_has_noted_is_found(
    monkeypatch: pytest.MonkeyPatch, noted: str, expected: bool
) -> None:
    assert not has_timed_out()  # where there is no group at all
    groups = {Group("no GPU"): None, Group("SUCCESS"): None, Group(noted): None}
    monkeypatch.setattr(distributed_c10d, "_pg_map", groups)
    assert has_timed_out() is expected


@pytest.mark.skipif(not distributed_c10d.is_nccl_available(), reason="needs a PyTorch with NCCL")
def test_nccls_watchdog_notes_under_the_names_that_are_asked_for() -> None:
    assert callable(distributed_c10d.ProcessGroupNCCL.get_error)
    assert ErrorType.SUCCESS.name == "SUCCESS"
