"""SVRG and HALP in whole runs: the paper's algorithm in FP64, on any number of ranks, stopped and gone on with."""

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.data.order import Cursor, expected_ledger, steps_per_epoch
from lockstep.engine.anchor_pass import build_anchors
from lockstep.engine.anchored import refuse_chance, subtract_anchor
from lockstep.engine.build import Parts, assemble, build_network, build_train_pipeline, open_sources, plan_input
from lockstep.engine.checkpoint import list_checkpoints
from lockstep.engine.measure import fake_batch
from lockstep.engine.state import list_changing
from lockstep.engine.step import LOSS, train_step
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.errors import LockstepError
from lockstep.events import AnchorTaken, EpochDone, Event, Notice, RunEnded, StartedUp, StepDone
from lockstep.optim.halp import Halp
from lockstep.optim.schedule import Schedule
from lockstep.optim.storage import named_arrays
from lockstep.recipes.read import load_recipe
from lockstep.report.run import SilentSink
from tests.engine.conftest import NUM_TRAIN, tiny_config, tiny_settings
from tests.optim.test_rounding import draw_by_hand
from tests.ranks import run_ranks, world_of_one

LR, DECAY, MU, SIZE, BATCH, EVERY = 0.02, 0.1, 20.0, 8, 28, 3
CONVEX = [
    "model.name=linear",
    f"data.image_size={SIZE}",
    f"data.eval_resize={SIZE}",
    f"optim.lr={LR}",
    "optim.schedule=constant",
    "optim.warmup=0st",
    f"optim.weight_decay={DECAY}",
    "optim.decay_norm_and_bias=true",
    f"optim.anchor_every={EVERY}st",
    "train.duration=10st",
    "train.eval_every=0st",
    "train.checkpoint_every=0st",
]
HALP = ["optim.name=halp", f"optim.mu={MU}"]
RULES = {"svrg": ["optim.name=svrg"], "halp8": [*HALP, "optim.bits=8"], "halp16": [*HALP, "optim.bits=16"]}
OTHERS = {"normed": RULES["halp8"], "averaged": [*RULES["halp8"], "optim.average=0.9"]}


Together = dict[int, list[dict[str, Any]]]


class Ear(SilentSink):
    """Keeps what is said, and asks for a stop once a step is done or an anchor taken."""

    def __init__(self, stop: StopRequest, stop_at: int, kind: type[Event] = StepDone) -> None:
        self.heard: list[Event] = []
        self._stop, self._stop_at, self._kind = stop, stop_at, kind

    def emit(self, event: Event) -> None:
        self.heard.append(event)
        if isinstance(event, self._kind) and event.step == self._stop_at:  # type: ignore[attr-defined]
            self._stop.ask()

    def all(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


def configure(images: Path, *settings: str) -> RunConfig:
    """The tiny recipe without its network."""
    tiny = [setting for setting in tiny_settings(images) if not setting.startswith("model.")]
    return load_recipe("quickstart", [*tiny, *CONVEX, *settings])[1]


def build(config: RunConfig, world: World, case: str) -> Parts:
    """Softmax regression, or a network with batch norm."""
    torch.manual_seed(4)
    network = build_network(config, 10)
    if case == "normed":
        network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))
    return assemble(config, world, network, Schedule("constant", LR, total_steps=10))


def run(world: World, config: RunConfig, folder: Path, stop_at: int = -1) -> tuple[Trainer, Ear, str]:
    """A run, gone on with where there is one in the folder."""
    sources, stop = open_sources(config.data), StopRequest()
    ear = Ear(stop, stop_at)
    trainer = Trainer(config, "tiny", world, sources, build(config, world, folder.name), folder, ear, stop)
    if world.broadcast_value(bool(list_checkpoints(folder / "checkpoints"))):
        trainer.resume()
    status = trainer.run()
    if trainer.parts.hybrid:
        trainer.parts.hybrid.close()
    return trainer, ear, status


def train(world: World, configs: dict[str, RunConfig], folder: Path, stop_at: int = -1) -> dict[str, Any]:
    """What each case has at its end."""
    found = {}
    for case, config in configs.items():
        trainer, ear, status = run(world, config, folder / case, stop_at)
        arrays = {name: array.clone() for name, array in list_changing(trainer.parts).over_layout.items()}
        found[case] = {**arrays, "status": status, "anchors": ear.all(AnchorTaken), "epochs": ear.all(EpochDone)}
        found[case] |= {"folder": str(folder / case), "ended": ear.all(RunEnded)[-1], "up": ear.all(StartedUp)}
    return found


@pytest.fixture(scope="module")
def configs(images: Path) -> dict[str, RunConfig]:
    return {case: configure(images, *settings) for case, settings in (RULES | OTHERS).items()}


@pytest.fixture(scope="module")
def alone(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {case: configs[case] for case in (*RULES, "averaged")}
    return train(world_of_one(), cases, tmp_path_factory.mktemp("alone"))


def softmax_gradient(weights: Any, batches: list[tuple[Any, Any]]) -> Any:
    """Of softmax regression's mean cross-entropy over all samples of these batches; the bias is the last row."""
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    logits = x @ weights
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y)


def run_by_hand(config: RunConfig, bits: int) -> tuple[Any, Any]:
    """The paper's algorithm 3 in FP64 over the pixels of the pipeline: the last weights and z in units of s."""
    world, source = world_of_one(), open_sources(config.data).train
    pixels = 3 * SIZE * SIZE
    with build_train_pipeline(config, world, source, Cursor(), plan_input(config, world)) as pipeline:
        epochs = [
            [
                (np.c_[b.images.flatten(1).double().numpy(), np.ones(len(b.labels))], b.labels.numpy())
                for b in pipeline.pass_over(epoch)
            ]
            for epoch in (0, 1)
        ]
    anchor = np.zeros((pixels + 1, len(source.classes)))
    places = {slot.name: slot.offset for slot in build(config, world, "").layout.slots}
    flat = np.empty(anchor.shape, dtype=np.int64)  # where each element lies in the layout
    flat[:-1] = (places["fc.weight"] + np.arange(anchor[:-1].size)).reshape(anchor.shape[::-1][0], pixels).T
    flat[-1] = places["fc.bias"] + np.arange(anchor.shape[1])
    z, s, most = np.zeros_like(anchor), 1.0, 2 ** (bits - 1) - 1
    in_epoch = steps_per_epoch(NUM_TRAIN, BATCH)
    for step in range(10):
        batches = epochs[step // in_epoch]
        if step % EVERY == 0:
            anchor, z = anchor + s * z, np.zeros_like(z)
            full = softmax_gradient(anchor, batches) + DECAY * anchor
            s = np.linalg.norm(full) / (MU * most) if bits else 1.0
        batch = [batches[step % in_epoch]]
        v = softmax_gradient(anchor + s * z, batch) - softmax_gradient(anchor, batch) + DECAY * s * z + full
        x = z - LR * v / s
        if bits:
            uniform = np.vectorize(lambda place, step=step: draw_by_hand(config.train.seed, step, int(place)))(flat)
            x = np.clip(np.floor(x) + (uniform < x - np.floor(x)), -most - 1, most)
        z = x
    return anchor + s * z, z


@pytest.mark.parametrize(("case", "bits"), [("svrg", 0), ("halp8", 8), ("halp16", 16)])
def test_a_run_is_the_papers_algorithm_in_fp64(
    configs: dict[str, RunConfig], alone: dict[str, Any], case: str, bits: int
) -> None:
    expected, z = run_by_hand(configs[case], bits)
    parts = build(configs[case], world_of_one(), case)
    found = named_arrays(alone[case]["weights"], parts.layout)
    both = np.concatenate([found["fc.weight"].T, found["fc.bias"][None]])
    np.testing.assert_allclose(both, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected).max() > 1e-3
    if bits:
        offsets = named_arrays(alone[case]["offset"], parts.layout)
        off = np.abs(np.concatenate([offsets["fc.weight"].T, offsets["fc.bias"][None]]) - z)
        # FP32 knows a step to a thousandth of the finest grid's unit, and rounds one in a thousand the other way.
        assert off.max() <= (1 if bits == 16 else 0)
        assert (off > 0).mean() <= 0.002
        assert np.abs(z).max() > 3


@pytest.fixture(scope="module")
def together(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Together:
    """By number of ranks; two also train with batch norm, and go on with a run that one has begun."""
    convex = {case: configs[case] for case in RULES}
    folder = tmp_path_factory.mktemp("of-2")
    *_, status = run(world_of_one(), configs["halp8"], folder / "moved", 4)
    assert status == "interrupted"
    more = {"normed": configs["normed"], "averaged": configs["averaged"], "moved": configs["halp8"]}
    return {
        2: run_ranks(train, 2, convex | more, folder),
        3: run_ranks(train, 3, convex, tmp_path_factory.mktemp("of-3")),
    }


@pytest.mark.parametrize("case", RULES)
def test_any_number_of_ranks_has_the_same_anchor_offset_and_weights(
    alone: dict[str, Any], together: Together, case: str
) -> None:
    for results in together.values():
        for name in ("weights", "anchor", "full_gradient", "offset"):
            first, *others = (result[case][name] for result in results)
            assert all(torch.equal(first, other) for other in others), name
            if first.is_floating_point():
                torch.testing.assert_close(first, alone[case][name], rtol=1e-4, atol=2e-6)
            elif case == "halp8":
                assert torch.equal(first, alone[case][name])  # of the same chance, whoever draws


def test_the_averaged_weights_follow_steps_and_no_anchors_pass(
    configs: dict[str, RunConfig], alone: dict[str, Any], together: Together, tmp_path: Path
) -> None:
    """The formula over the weights after every step; the same on two ranks, and by a run that was stopped."""
    taken: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_read_vote", lambda trainer, side: taken.append(trainer.parts.weights.clone()))
        train(world_of_one(), {"averaged": configs["averaged"]}, tmp_path / "watched")
    expected = torch.zeros_like(taken[0])
    for count, weights in enumerate(taken, start=1):
        expected += max(0.1, 9 / (9 + count)) * (weights - expected)
    torch.testing.assert_close(alone["averaged"]["average"], expected, rtol=1e-5, atol=1e-7)
    assert (expected - taken[-1]).norm() > 0.05 * expected.norm()
    for result in together[2]:
        torch.testing.assert_close(result["averaged"]["average"], expected, rtol=1e-4, atol=2e-6)
    stopped = train(world_of_one(), {"averaged": configs["averaged"]}, tmp_path, 4)["averaged"]
    found = train(world_of_one(), {"averaged": configs["averaged"]}, tmp_path)["averaged"]
    assert (stopped["status"], found["status"]) == ("interrupted", "finished")
    assert torch.equal(found["average"], alone["averaged"]["average"])


def test_an_anchor_is_a_pass_over_every_sample_beside_the_epoch(alone: dict[str, Any], together: Together) -> None:
    for result in (alone["halp8"], together[3][0]["halp8"]):
        anchors, epochs = result["anchors"], result["epochs"]
        assert [anchor.step for anchor in anchors] == [0, 3, 6, 9]
        assert all(anchor.samples == NUM_TRAIN for anchor in anchors)
        for anchor, epoch in zip(anchors, [0, 0, 1, 1], strict=True):
            assert anchor.ledger == f"{expected_ledger(NUM_TRAIN, epoch).value:016x}"
        assert [event.ledger_ok for event in epochs] == [True, True]
        assert anchors[0].loss == pytest.approx(np.log(10), rel=1e-6)  # of weights that are all zero
        assert anchors[0].gradient_norm > anchors[2].gradient_norm > 0
        ended = result["ended"]
        assert ended.anchor_s == pytest.approx(sum(anchor.seconds for anchor in anchors))
        assert ended.images_per_second == pytest.approx(ended.images / (ended.train_s + ended.anchor_s))
        product = ended.speed_one_rank * ended.world_size * ended.efficiency
        assert ended.images_per_second == pytest.approx(product)
        assert all(a.scale == pytest.approx(a.gradient_norm / (MU * 127), rel=1e-6) for a in anchors)


def test_the_first_anchor_is_no_part_of_the_first_step(alone: dict[str, Any]) -> None:
    (up,) = alone["svrg"]["up"]
    assert list(up.seconds) == ["plan", "input", "full gradient", "first step"]
    assert up.seconds["full gradient"] >= alone["svrg"]["anchors"][0].seconds > 0


def test_an_anchor_tells_how_far_the_offsets_before_it_reached(
    configs: dict[str, RunConfig], alone: dict[str, Any], tmp_path: Path
) -> None:
    for case, bits in (("svrg", 0), ("halp8", 8), ("halp16", 16)):
        first, *others = alone[case]["anchors"]
        assert (first.share_at_end, first.share_at_zero) == (None, None)  # no step before it
        if not bits:
            assert all((anchor.share_at_end, anchor.share_at_zero) == (None, None) for anchor in others)
            continue
        # Stopped where the next anchor is due, the run has the offsets that the anchor's record tells of.
        at = 3 if case == "halp8" else 9
        stopped = train(world_of_one(), {case: configs[case]}, tmp_path, at - 1)[case]
        assert stopped["status"] == "interrupted"
        z = load_offsets(tmp_path / case, at)
        told = next(anchor for anchor in others if anchor.step == at)
        assert told.share_at_zero == pytest.approx((z == 0).mean(), abs=1e-12)
        assert told.share_at_end == pytest.approx(
            np.isin(z, (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)).mean(), abs=1e-12
        )


def load_offsets(folder: Path, step: int) -> Any:
    """All elements of z that a checkpoint holds."""
    saved = load_file(folder / "checkpoints" / f"step-{step:08d}" / "optimizer.safetensors")
    return np.concatenate([array.numpy().ravel() for name, array in saved.items() if name.startswith("offset/")])


@pytest.mark.parametrize(
    ("mu", "sentence"),
    [
        (1e5, r"\d % of the offsets reached the end of their grid; lower optim\.mu \(now 100000\)\."),
        (
            1e-6,
            r"^(99\.\d+|100) % of the offsets are still at zero, as their grid is coarse; raise .*mu \(now 1e-06\)\.",
        ),
        (1.0, ""),
    ],
)
def test_a_mu_that_is_far_off_is_said_once(images: Path, tmp_path: Path, mu: float, sentence: str) -> None:
    config = configure(images, *RULES["halp8"], f"optim.mu={mu}")
    _, ear, status = run(world_of_one(), config, tmp_path / "run")
    assert status == "finished"
    said = [notice.text for notice in ear.all(Notice) if "offsets" in notice.text]
    assert len(said) == (1 if sentence else 0), said
    assert not sentence or re.search(sentence, said[0])


@pytest.mark.gpu
def test_ranks_over_nccl_have_the_anchor_and_weights_of_one(images: Path, tmp_path: Path) -> None:
    """On one GPU; with 8 bits a single offset that is rounded otherwise would be more than the tolerance."""
    # nvJPEG's pixels are not those of the host's decoder, and either may decode a sample.
    wanted = {case: configure(images, *RULES[case], "data.decoder=cpu") for case in ("svrg", "halp16")}
    one = train(world_of_one(), wanted, tmp_path / "of-1")
    results = run_ranks(train, 2, wanted, tmp_path / "of-2", backend="nccl")
    for case in wanted:
        for name in ("weights", "anchor", "full_gradient"):
            first, second = (result[case][name] for result in results)
            assert torch.equal(first, second), name
            torch.testing.assert_close(first, one[case][name].cpu(), rtol=1e-4, atol=1e-5)


def stop_and_go_on(world: World, config: RunConfig, folder: Path) -> dict[int, Any]:
    """Stopped after each of these steps, and gone on with by parts that remember nothing."""
    found = {}
    for stop_at in (3, 4):
        place = folder / str(stop_at)
        _, _, status = run(world, config, place / "normed", stop_at)
        last = list_checkpoints(place / "normed" / "checkpoints")[0].name
        world.barrier()  # nobody may go on from what another has not looked at
        found[stop_at] = {"stopped": (status, last), **train(world, {"normed": config}, place)["normed"]}
    return found


@pytest.fixture(scope="module")
def gone_on(configs: dict[str, RunConfig], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("broken")
    return folder, run_ranks(stop_and_go_on, 2, configs["normed"], folder)[0]


@pytest.mark.parametrize(("stop_at", "last", "anchors"), [(3, 3, [3, 6, 9]), (4, 5, [6, 9])])
def test_stopped_and_gone_on_a_run_ends_with_the_same_bits(
    together: Together, gone_on: tuple[Path, dict[int, Any]], stop_at: int, last: int, anchors: list[int]
) -> None:
    """After step 3 in the pass for an anchor, which leaves no trace; after step 4 a step into the inner loop."""
    (folder, results), whole = gone_on, together[2][0]["normed"]
    found = results[stop_at]
    assert found["stopped"] == ("interrupted", f"step-{last:08d}")
    assert found["status"] == "finished"
    assert [anchor.step for anchor in found["anchors"]] == anchors
    for name in ("weights", "anchor", "full_gradient", "offset"):
        assert torch.equal(whole[name], found[name]), name
    for file in ("model", "optimizer", "statistics"):
        expected, saved = (
            load_file(run_folder / "checkpoints" / "step-00000010" / f"{file}.safetensors")
            for run_folder in (Path(whole["folder"]), folder / str(stop_at) / "normed")
        )
        assert expected.keys() == saved.keys()
        assert all(torch.equal(expected[name], saved[name]) for name in expected), file
        if file == "optimizer":
            assert {saved[name].dtype for name in saved if name.startswith("offset/")} == {torch.int8}


def test_a_run_stopped_on_one_rank_goes_on_on_two(alone: dict[str, Any], together: Together) -> None:
    for result in together[2]:
        assert torch.equal(result["moved"]["offset"], alone["halp8"]["offset"])
        torch.testing.assert_close(result["moved"]["weights"], alone["halp8"]["weights"], rtol=1e-5, atol=1e-7)
        assert [anchor.step for anchor in together[2][0]["moved"]["anchors"]] == [6, 9]


@pytest.mark.parametrize("case", RULES)
def test_alone_every_rule_goes_on_with_the_same_bits(
    configs: dict[str, RunConfig], alone: dict[str, Any], tmp_path: Path, case: str
) -> None:
    stopped = train(world_of_one(), {case: configs[case]}, tmp_path, 4)[case]
    found = train(world_of_one(), {case: configs[case]}, tmp_path)[case]
    assert (stopped["status"], found["status"]) == ("interrupted", "finished")
    for name in ("weights", "anchor", "full_gradient", "offset"):
        assert torch.equal(alone[case][name], found[name]), name


def test_offsets_of_other_bits_are_refused(configs: dict[str, RunConfig], tmp_path: Path) -> None:
    train(world_of_one(), {"run": configs["halp8"]}, tmp_path, 4)
    with pytest.raises(LockstepError, match=r"the offset as int8 and this run as int16; resume with the optim\.bits"):
        train(world_of_one(), {"run": configs["halp16"]}, tmp_path)
    with pytest.raises(LockstepError, match=r"optimiser state of halp but this run uses svrg"):
        train(world_of_one(), {"run": configs["svrg"]}, tmp_path)


def test_only_passes_at_the_iterate_move_running_statistics(configs: dict[str, RunConfig]) -> None:
    """A step is then, for batch norm, one step: the anchor's passes leave no trace there."""
    config, world = configs["normed"], world_of_one()
    parts, batch = build(config, world, "normed"), fake_batch(config, world)
    assert isinstance(parts.rule, Halp)
    parts.rule.anchor.copy_(parts.weights)
    before = [buffer.clone() for buffer in parts.model.buffers()]
    subtract_anchor(parts, batch.images, batch.labels, batch.global_size)
    assert all(map(torch.equal, parts.model.buffers(), before))
    train_step(parts, batch, 0.01)
    assert not all(map(torch.equal, parts.model.buffers(), before))
    assert int(parts.model.get_buffer("1.num_batches_tracked")) == 1


@pytest.mark.parametrize("case", ["svrg", "halp8"])
def test_before_the_first_anchor_trials_step_with_the_weights_that_there_are(
    configs: dict[str, RunConfig], case: str
) -> None:
    """What a step of none would run on, and how long it takes a GPU, is not what a run's steps do."""
    parts = build(configs[case], world_of_one(), "normed")
    weights = parts.weights.clone()
    losses = [train_step(parts, fake_batch(configs[case], world_of_one()), 0.0)[LOSS].item() for _ in range(2)]
    assert torch.equal(parts.weights, weights)
    assert weights.any()
    assert losses[0] == losses[1]


def test_gradients_in_several_passes_are_those_of_one(images: Path) -> None:
    found = []
    for passes in (0, 3):
        config = configure(images, *RULES["halp16"], f"train.accumulate={passes}")
        parts = build(config, world_of_one(), "")
        assert isinstance(parts.rule, Halp)
        full = torch.linspace(-1, 1, parts.layout.numel, dtype=torch.float64)
        for slot in parts.layout.slots:
            full[slot.end : slot.end + 32] = 0
        parts.rule.recentre(parts.weights, full)
        for _ in range(2):
            train_step(parts, fake_batch(config, world_of_one()), 0.1)
        found.append(parts.weights.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0].abs().max() > 0.01


def test_dropout_is_refused() -> None:
    refuse_chance(nn.Sequential(nn.Dropout(0.0), nn.ReLU()))
    with pytest.raises(LockstepError, match=r"drops a share of 0\.5 at random in '1', .* set its dropout to 0"):
        refuse_chance(nn.Sequential(nn.ReLU(), nn.Dropout(0.5)))


class Dropping(nn.Module):
    """Chance that no module of PyTorch's shows, behind batch norm."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3 * SIZE * SIZE, 10)
        self.share = share

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(functional.dropout(self.norm(images).flatten(1), self.share, self.training))


def test_chance_that_no_module_shows_is_refused_and_looking_for_it_leaves_no_trace(
    configs: dict[str, RunConfig],
) -> None:
    world, config = world_of_one(), configs["halp8"]
    for share in (0.0, 0.5):
        parts = assemble(config, world, Dropping(share), Schedule("constant", LR, total_steps=10))
        statistics, chance = [buffer.clone() for buffer in parts.model.buffers()], torch.get_rng_state()
        with pytest.raises(LockstepError, match="draws random numbers") if share else contextlib.nullcontext():
            build_anchors(config, parts, world, NUM_TRAIN, False, pytest.fail)
        assert torch.equal(torch.get_rng_state(), chance)
        assert all(map(torch.equal, parts.model.buffers(), statistics))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["precision.compute=fp16"], r"precision\.compute = \"fp16\" cannot be had .* to fp32 or tf32"),
        (["comm.wire=bf16"], r"comm\.wire = \"bf16\" cannot be had .* to fp32"),
        (["optim.clip_norm=1.0"], r"optim\.clip_norm = 1\.0 cannot be had with optim\.name = halp"),
        (["optim.layer_decay=0.9"], r"optim\.layer_decay = 0\.9 cannot be had"),
        (["optim.momentum=0.5"], r"optim\.momentum = 0\.5 has no effect"),
        (["optim.anchor_every=0st"], r"optim\.anchor_every = \"0st\" is no length"),
        (["optim.mu=0.0", "optim.weight_decay=0.0"], r"needs optim\.mu, or an optim\.weight_decay"),
        (["optim.bits=4"], r"optim\.bits = 4 must be 8 or 16"),
        (["optim.name=sgd", "optim.bits=16"], r"optim\.bits = 16 has no effect"),
    ],
)
def test_what_makes_no_sense_with_it_is_a_sentence(images: Path, settings: list[str], sentence: str) -> None:
    with pytest.raises(LockstepError, match=sentence):
        tiny_config(images, *RULES["halp8"], *settings)
