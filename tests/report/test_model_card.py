"""A model card says what is known and nothing else, and no name in it becomes Markdown."""

from collections.abc import Mapping

from lockstep.config import RunConfig
from lockstep.named import GIVEN
from lockstep.recipes.read import load_recipe
from lockstep.report.model_card import MOST_CLASSES, Subject, build_card, fence, plain
from tests.report.records import ended, epoch_done, evaluated, started

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox"]
QUICKSTART = load_recipe("quickstart")[1]


def card_of(
    *events: object,
    classes: list[str] = NAMES,
    step: int = 40,
    config: RunConfig = QUICKSTART,
    files: Mapping[str, str] = {},
) -> str:
    return build_card(Subject("a-run", step, classes, config, "9.9", files), events)  # type: ignore[arg-type]


def finished() -> tuple[object, ...]:
    versions = {"lockstep": "0.1.0", "commit": "abc1234"}
    return (
        started(versions=versions),
        evaluated(30, 1020.0, 0.6),
        epoch_done(3, 1021.0, bad_samples=2),
        evaluated(40, 1025.0, 0.75),
        ended(40, 1030.0, 30.0),
    )


def test_it_tells_accuracy_time_hardware_commit_and_recipe() -> None:
    card = card_of(*finished())
    for words in (
        "| top-1 | 75.0 % | 75 of 100 |",
        "| top-5 | 90.0 % | 90 of 100 |",
        "after step 40",
        "| time | 30.0 s for 40 steps |",
        "| hardware | 2 ranks on test CPU |",
        "| commit | abc1234 |",
        "by the recipe tiny",
        "320 for training, 100 for validation",
        "[optim]",
        "5. fox",
        "2 samples of the training data could not be read",
        "generated pictures of shapes",
    ):
        assert words in card, words


def test_accuracy_is_that_of_these_weights_and_not_of_later_ones() -> None:
    events = finished()
    assert "| top-1 | 60.0 % |" in card_of(*events, step=30)
    between = card_of(*events, step=35)
    assert "| top-1 | 60.0 % |" in between
    assert "after step 30. The weights are 5 steps ahead." in between
    assert "The run has not measured it" in card_of(*events, step=5)
    again = [*events, started(start_step=20, time_s=2000.0), evaluated(40, 2010.0, 0.8)]
    assert "| top-1 | 80.0 % |" in card_of(*again)


def test_top5_of_five_classes_is_left_out() -> None:
    assert "top-5" not in card_of(*finished(), classes=NAMES[:5])


def test_a_run_without_records_has_a_card() -> None:
    card = card_of()
    assert "The run has not measured it" in card
    assert "tells 6 classes of images apart" in card
    assert "hardware" not in card


def test_strange_names_stay_text() -> None:
    hostile = ["<img src=x onerror=alert(1)>", "a|b", "`code` *bold* [x](y)", "new\nline # title", "- item", "\udcff"]
    card = card_of(*finished(), classes=hostile)
    assert "<img" not in card
    assert "&lt;img src=x onerror=alert(1)&gt;" in card
    assert "1. a\\|b" in card
    assert "2. \\`code\\` \\*bold\\* \\[x\\](y)" in card
    assert "3. new line \\# title" in card
    assert "4. \\- item" in card
    card.encode()
    assert plain("x\x1b[2J") == "x \\[2J"


def test_code_fences_hold_whatever_is_in_them() -> None:
    assert fence("a\n```\nb", "toml") == "````toml\na\n```\nb\n````"
    config = QUICKSTART.model_copy(update={"description": "```\n# not a title"})
    recipe = card_of(config=config).partition("## Recipe")[2]
    marks = recipe.strip().splitlines()[-1]
    assert set(marks) == {"`"}
    assert recipe.count(marks) == 2


def test_of_very_many_classes_some_are_listed() -> None:
    card = card_of(classes=[f"class {place}" for place in range(MOST_CLASSES + 7)])
    assert f"{MOST_CLASSES - 1}. class {MOST_CLASSES - 1}\n" in card
    assert "And 7 more, in the files' metadata." in card


def test_each_file_has_its_code_and_torchvision_only_what_it_has() -> None:
    files = {"m.safetensors": "safetensors", "m.onnx": "onnx", "m.bin": "torch-export"}
    card = card_of(files=files)
    assert [f'"{name}"' in card for name in files] == [True] * 3
    assert "torchvision" not in card  # whose networks have one width
    assert 'torch.export.load("m.bin"' in card  # by what it is, whatever it is called
    wide = QUICKSTART.model_copy(
        update={"model": QUICKSTART.model.model_copy(update={"width": 64, "stem": "imagenet"})}
    )
    assert f"torchvision.models.{wide.model.name}(num_classes=len(classes))" in card_of(files=files, config=wide)


def test_a_network_that_a_program_gave_is_to_be_put_in_and_not_built() -> None:
    given = QUICKSTART.model_copy(update={"model": QUICKSTART.model.model_copy(update={"name": GIVEN})})
    card = card_of(files={"m.safetensors": "safetensors"}, config=given)
    assert "network = ...  # put in" in card
    assert "build_network" not in card
