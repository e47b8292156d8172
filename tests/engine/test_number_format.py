"""Which number format a run settles on, and that it stays with it."""

from pathlib import Path

import pytest
import torch

from lockstep.comm.world import World
from lockstep.config import PrecisionConfig, RunConfig, to_toml
from lockstep.engine.number_format import find_format, settle_format
from lockstep.engine.run import run_rank, share_settled, write_config
from lockstep.engine.starting import plan_start, settle_like
from lockstep.errors import LockstepError
from lockstep.events import Notice, RunStarted
from lockstep.recipes.read import load_recipe
from tests.engine.conftest import tiny_config
from tests.engine.small import Keeping
from tests.ranks import run_ranks, world_of_one

FP16_KEYS = ["precision.loss_scale=static", "precision.initial_scale=1024.0"]


def tiny(*settings: str) -> RunConfig:
    return load_recipe("quickstart", list(settings))[1]


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")])
def test_a_gpu_with_tensor_cores_computes_in_fp16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert find_format(torch.device("cuda", 0)) == expected
    assert find_format(torch.device("cpu")) == "fp32"


def test_a_cpu_computes_in_fp32_and_the_settled_recipe_replays() -> None:
    """The settings of a loss scale are allowed before it is known that there is none."""
    config = tiny(*FP16_KEYS)
    assert config.precision.compute == "auto"
    settled, said = settle_format(config, world_of_one())
    assert settled.precision == PrecisionConfig(compute="fp32")
    assert said == "Computing in FP32, on a CPU (precision.compute = auto)."
    assert settle_format(settled, world_of_one()) == (settled, "")
    assert "auto" not in to_toml(settled).partition("[precision]")[2].partition("[comm]")[0]


def test_with_tensor_cores_the_settings_of_the_loss_scale_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engine.number_format.find_format", lambda device: "fp16")
    settled, said = settle_format(tiny(*FP16_KEYS), world_of_one())
    assert settled.precision == PrecisionConfig(compute="fp16", loss_scale="static", initial_scale=1024.0)
    assert said.startswith("Computing in FP16 with a loss scale")
    named = tiny("precision.compute=bf16")
    assert settle_format(named, world_of_one()) == (named, "")


def settle_apart(world: World, formats: list[str]) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.engine.number_format.find_format", lambda device: formats[world.rank])
        settled, said = settle_format(tiny(), world)
    return settled.precision.compute, said


def test_ranks_with_other_devices_settle_on_one_format() -> None:
    ranks = run_ranks(settle_apart, 2, ["fp16", "fp32"])
    assert (
        ranks[0]
        == ranks[1]
        == (
            "fp32",
            "Computing in FP32, a rank's device has no tensor cores (precision.compute = auto).",
        )
    )


def share_apart(world: World) -> tuple[str, int]:
    """Rank 1 has read the run's folder; rank 0 has only the recipe."""
    config = tiny("precision.compute=fp16", "train.max_batch_per_rank=64") if world.rank == 1 else tiny()
    shared = share_settled(config, world)
    return shared.precision.compute, shared.train.max_batch_per_rank


def test_ranks_that_do_not_see_the_folder_hear_what_the_run_settled_on() -> None:
    assert run_ranks(share_apart, 2) == [("fp16", 64), ("fp16", 64)]


def test_the_same_command_goes_on_with_what_it_settled_on_and_refuses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = plan_start("quickstart", FP16_KEYS, Path("run"), "auto")
    for compute in ("fp16", "fp32"):
        settled = first.config.model_copy(update={"precision": first.config.precision.settle(compute)})
        train = settled.train.model_copy(update={"max_batch_per_rank": 64})
        write_config(Path("run"), settled.model_copy(update={"train": train}))
        again = plan_start("quickstart", FP16_KEYS, Path("run"), "auto")
        assert again.resume
        assert again.config.precision.compute == compute
        with pytest.raises(LockstepError, match=f'precision.compute was "{compute}" and is "bf16"'):
            plan_start("quickstart", ["precision.compute=bf16"], Path("run"), "auto")
        with pytest.raises(LockstepError, match="max_batch_per_rank was 64 and is 32"):
            plan_start("quickstart", [*FP16_KEYS, "train.max_batch_per_rank=32"], Path("run"), "auto")


def test_passes_that_were_counted_are_not_given_a_size() -> None:
    asked = tiny("train.accumulate=2")
    assert settle_like(asked, tiny("train.max_batch_per_rank=64")).train.max_batch_per_rank == 0


def test_a_run_says_it_once_records_it_and_keeps_it(images: Path, tmp_path: Path) -> None:
    """As if it had been started on a GPU: what it settled on there it goes on with here."""
    short = ["train.checkpoint_every=1st", "train.eval_every=0st", "optim.warmup=0st"]
    left_open = ["precision.compute=auto", "train.max_batch_per_rank=0"]
    config = tiny_config(images, *short, *left_open, "train.duration=1st")
    parts = []
    for resume in (False, True):
        heard = Keeping()
        run_rank(
            config, "tiny", tmp_path / "run", resume=resume, membership=None, open_sink=lambda *_, heard=heard: heard
        )
        said = [event.text for event in heard.events if isinstance(event, Notice)]
        (start,) = [event for event in heard.events if isinstance(event, RunStarted)]
        parts.append((any("precision.compute = auto" in text for text in said), start.config["precision"]["compute"]))
        _, config = load_recipe(str(tmp_path / "run"), ["train.duration=2st", "precision.compute=fp16"])
    assert parts == [(True, "fp32"), (False, "fp16")]
    _, left = load_recipe(str(tmp_path / "run"))
    assert (left.precision.compute, left.train.max_batch_per_rank) == ("fp16", 256)
