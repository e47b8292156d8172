"""Training on packed shards: the same run as on the folder they were made from, and resumed at once."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.comm.world import join_world
from lockstep.data.index import read_index
from lockstep.data.order import Cursor, Ledger
from lockstep.data.pack import pack_folder
from lockstep.data.sources import ImageFolder
from lockstep.engine.build import build_parts, build_train_pipeline, open_sources, plan_input
from lockstep.engine.fit import describe_fit
from lockstep.engine.run import run_rank
from lockstep.engine.step import train_step
from lockstep.errors import LockstepError
from lockstep.events import Event, Notice
from lockstep.report.run import SilentSink
from tests.data.large_index import NUM_SAMPLES, write_large
from tests.engine.conftest import NUM_TRAIN, tiny_config


@pytest.fixture
def pack(images: Path, tmp_path: Path) -> Path:
    pack_folder(images, tmp_path / "pack", shard_mb=0.05)
    return tmp_path / "pack"


def train(*paths: Path) -> tuple[Tensor, Ledger]:
    """Weights and ledger after two steps on each of these, one going on where the other stopped."""
    config = tiny_config(paths[0])
    ledger, cursor = Ledger(), Cursor()
    with join_world(None) as world:
        parts = build_parts(config, world, open_sources(config.data))
        for path in paths:
            source = open_sources(tiny_config(path).data).train
            with build_train_pipeline(config, world, source, cursor, plan_input(config, world)) as pipeline:
                for batch in itertools.islice(pipeline, 2):
                    train_step(parts, batch, 0.1)
                    ledger.add(batch.epoch, batch.samples)
                    cursor = batch.cursor
    return parts.weights, ledger


def test_training_on_shards_equals_training_on_the_folder(images: Path, pack: Path) -> None:
    weights, ledger = train(images, images)
    for paths in ((pack, pack), (images, pack)):
        other_weights, other_ledger = train(*paths)
        assert torch.equal(other_weights, weights)
        assert other_ledger == ledger


def test_a_part_for_validation_is_the_same_on_folder_and_shards(images: Path, pack: Path) -> None:
    """And the run too, to the last bit."""
    found = []
    for path in (images, pack):
        config = tiny_config(path, "data.val_share=0.3")
        sources = open_sources(config.data)
        with join_world(None) as world:
            parts = build_parts(config, world, sources)
            plan = plan_input(config, world)
            with build_train_pipeline(config, world, sources.train, Cursor(), plan) as pipeline:
                for batch in itertools.islice(pipeline, 2):
                    train_step(parts, batch, 0.1)
        val = [sources.val.read(sample) for sample in range(sources.val.num_samples)]
        found.append((parts.weights, val, sources.train.fingerprint()["labels"]))
        said = f"keeps {sources.val.num_samples} of {NUM_TRAIN} samples for validation"
        assert sum(said in notice.text for notice in describe_fit(config, sources)) == 1
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][2] != open_sources(tiny_config(images).data).train.fingerprint()["labels"]


class Listener(SilentSink):
    """Keeps what the run says."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.mark.parametrize("checks", [True, False])
def test_a_bit_flipped_in_a_shard_is_named_by_the_run_unless_bytes_are_not_checked(
    pack: Path, tmp_path: Path, checks: bool
) -> None:
    index = read_index(pack / "train.index")
    tar = pack / index.shards[0].name
    content = bytearray(tar.read_bytes())
    content[int(index.offsets[0]) + int(index.lengths[0]) // 2] ^= 0x04
    tar.write_bytes(content)
    said = Listener()
    wanted = ["train.duration=1ep", "optim.warmup=0st", "data.bad_share=0.1", f"data.check_bytes={str(checks).lower()}"]
    status = run_rank(
        tiny_config(pack, *wanted), "tiny", tmp_path / "run", resume=False, membership=None,
        open_sink=lambda world, folder: said,
    )  # fmt: skip
    assert status == "finished"
    texts = [event.text for event in said.events if isinstance(event, Notice)]
    named = [text for text in texts if str(tar) in text and "its bytes do not match their checksum" in text]
    assert len(named) == checks, texts


RESUME_LARGE = """
import sys, time
from pathlib import Path
from lockstep.comm.world import join_world
from lockstep.recipes.read import load_recipe
from lockstep.data.order import Cursor
from lockstep.engine.build import build_train_pipeline, open_sources, plan_input
from tests.data.large_index import NUM_SAMPLES, resident_mb
config = load_recipe("quickstart", ["data.source=folder", f"data.path={sys.argv[1]}", "train.global_batch=256"])[1]
with join_world(None, backend="gloo", timeout_s=60) as world:
    before, start = resident_mb(), time.perf_counter()
    sources = open_sources(config.data)
    position = 256 * (NUM_SAMPLES // 512)
    cursor, plan = Cursor(36, position), plan_input(config, world)
    with build_train_pipeline(config, world, sources.train, cursor, plan) as pipeline:
        batch = next(iter(pipeline))
        seconds = time.perf_counter() - start
        assert (batch.labels.numpy() == sources.train.labels[batch.samples]).all()
        assert (batch.epoch, batch.cursor) == (36, Cursor(36, position + 256))
    print(sources.train.num_samples, seconds, resident_mb() - before)
"""


def test_resuming_in_the_middle_of_epoch_37_of_imagenet_takes_little_time_and_memory(tmp_path: Path) -> None:
    write_large(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run(
        [sys.executable, "-c", RESUME_LARGE, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    num_samples, seconds, used_mb = map(float, out.split())
    print(f"the first batch after {seconds:.3f} s, {used_mb:.1f} MB")
    assert num_samples == NUM_SAMPLES
    assert used_mb < 400  # most of it the batches prepared ahead and the libraries that prepare them
    assert seconds < 30


@pytest.fixture(scope="module")
def begun(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on the folder."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    config = tiny_config(images, "train.duration=3st", "optim.warmup=0st")
    assert run_rank(config, "tiny", folder, resume=False, membership=None, open_sink=lambda *_: Listener())
    return folder


def go_on(begun: Path, run: Path, path: Path) -> str:
    """How a run ends that goes on with the data there."""
    shutil.copytree(begun, run)
    config = tiny_config(path, "train.duration=4st", "optim.warmup=0st")
    return run_rank(config, "tiny", run, resume=True, membership=None, open_sink=lambda *_: Listener())


def repaint(images: Path, target: Path) -> Path:
    """The same names with other pixels: each file has its neighbour's."""
    shutil.copytree(images, target)
    paths = sorted((target / "train").rglob("*.jpeg"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    return target


def test_a_run_goes_on_with_its_folder_or_the_pack_of_it(begun: Path, images: Path, pack: Path, tmp_path: Path) -> None:
    assert go_on(begun, tmp_path / "folder run", images) == "finished"
    assert go_on(begun, tmp_path / "pack run", pack) == "finished"


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_run_does_not_go_on_with_other_pixels_under_the_same_names(
    begun: Path, images: Path, tmp_path: Path, is_packed: bool
) -> None:
    other = repaint(images, tmp_path / "other")
    if is_packed:
        pack_folder(other, tmp_path / "other pack")
        other = tmp_path / "other pack"
    with pytest.raises(LockstepError, match=r"has changed since the checkpoint was written \(other images\); resume"):
        go_on(begun, tmp_path / "run", other)


def test_a_checkpoint_that_knows_no_images_goes_on(
    begun: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions."""
    known = ImageFolder.fingerprint
    with monkeypatch.context() as earlier:
        earlier.setattr(
            ImageFolder, "fingerprint", lambda self: {k: v for k, v in known(self).items() if k != "images"}
        )
        assert go_on(begun, tmp_path / "earlier", images) == "finished"
    config = tiny_config(images, "train.duration=5st", "optim.warmup=0st")
    run = tmp_path / "earlier"
    status = run_rank(config, "tiny", run, resume=True, membership=None, open_sink=lambda *_: Listener())
    assert status == "finished"
