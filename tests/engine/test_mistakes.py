"""What an evaluation got wrong, against counting by hand, on one rank and several."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from lockstep.comm.world import World
from lockstep.data.sources import open_folder
from lockstep.engine.build import build_eval_pipeline, build_network, open_sources
from lockstep.engine.evaluate import evaluate
from lockstep.engine.mistakes import NUM_WORST, SIDE, Mistakes, count_pairs
from tests.engine.conftest import NUM_VAL, tiny_config
from tests.ranks import run_ranks, world_of_one


def look(world: World, images: Path) -> tuple[dict[str, Any], int]:
    """What a network that knows nothing gets wrong, and how much it gets right."""
    config = tiny_config(images)
    sources = open_sources(config.data)
    model: nn.Module = build_network(config, len(sources.train.classes))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    mistakes = Mistakes(sources.val, world)
    with build_eval_pipeline(config, world, sources.val) as batches:
        result = evaluate(model, batches, world, mistakes=mistakes)
    return mistakes.find(), result.correct1


def test_the_confusion_counts_every_sample_once_and_agrees_with_the_accuracy(images: Path) -> None:
    found, correct = look(world_of_one(), images)
    confusion = found["confusion"]
    assert sum(count for *_, count in confusion) == NUM_VAL
    assert sum(count for label, answer, count in confusion if label == answer) == correct
    assert [count for *_, count in confusion] == sorted((count for *_, count in confusion), reverse=True)


def test_the_worst_are_wrong_and_sorted_and_have_small_pictures(images: Path) -> None:
    found, correct = look(world_of_one(), images)
    worst = found["worst"]
    assert len(worst) == min(NUM_WORST, NUM_VAL - correct)
    assert all(one["label"] != one["predicted"] for one in worst)
    confidences = [one["confidence"] for one in worst]
    assert confidences == sorted(confidences, reverse=True)
    assert all(0.1 <= confidence <= 1 for confidence in confidences)
    _, val = open_folder(images)
    known = {Path(val.name(number)).name: int(val.labels[number]) for number in range(val.num_samples)}
    for one in worst:
        assert known[one["name"].rpartition("/")[2]] == one["label"]
        picture = Image.open(io.BytesIO(base64.b64decode(one["jpeg"])))
        assert picture.format == "JPEG"
        assert max(picture.size) <= SIDE


def test_it_is_the_same_again_and_on_any_number_of_ranks(images: Path) -> None:
    expected = look(world_of_one(), images)
    first, second = run_ranks(look, 2, images)
    assert second[0] == {}
    assert (first[0]["confusion"], first[1]) == (expected[0]["confusion"], expected[1])
    for one, other in zip(first[0]["worst"], expected[0]["worst"], strict=True):
        assert one["jpeg"] == other["jpeg"]
        assert one["name"] == other["name"]


def test_pairs_are_counted_like_by_hand() -> None:
    labels, answers = np.array([2, 2, 0, 1, 2]), np.array([1, 1, 0, 2, 2])
    assert count_pairs(labels, answers) == [[2, 1, 2], [0, 0, 1], [1, 2, 1], [2, 2, 1]]
    assert count_pairs(labels[:0], answers[:0]) == []
