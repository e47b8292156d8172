"""Lockstep from a program: its own network, data, loss and ears, on one rank and on two, in real runs."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import lockstep
from lockstep.apart import _judge
from lockstep.api import bring
from lockstep.engine.brought import NOTHING
from lockstep.errors import Diverged
from lockstep.events import CheckpointSaved, Evaluated, Event, Notice, RunEnded, RunStarted, StepDone
from lockstep.recipe_values import Duration
from lockstep.recipes.read import load_recipe
from tests import own
from tests.engine import commands
from tests.own import Pictures, build_net, open_pictures, plain_loss


def train(out: Path, **more: Any) -> lockstep.Result:
    settings = own.SETTINGS | more.pop("set", {})
    usual: dict[str, Any] = {"data": open_pictures, "model": build_net, "quiet": True, "ranks": 1}
    return lockstep.train("quickstart", set=settings, out=out, **(usual | more))


def steps(events: list[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepDone)]


def test_objects_train_here_and_the_trained_network_can_be_used(tmp_path: Path) -> None:
    """Also: nothing that the program had is changed by it."""
    net, heard = build_net(num_classes=2), list[Event]()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    result = train(tmp_path / "a", data=(Pictures(40), Pictures(10, seed=1)), model=net, on_event=heard.append)

    assert result.folder == tmp_path / "a"
    assert result.summary["status"] == "finished"
    assert result.accuracy == result.summary["top1"]
    assert result.accuracy is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net[0].weight._post_accumulate_grad_hooks  # type: ignore[index, union-attr]
    # The very records of the log, in their order.
    assert heard == commands.events(result.folder)
    assert isinstance(heard[0], RunStarted)
    assert isinstance(heard[-1], RunEnded)
    assert steps(heard) == list(range(1, 11))

    trained = result.load()
    assert trained.classes == ("0", "1")
    saved = commands.last_weights(result.folder)
    assert all(torch.equal(value, saved[name]) for name, value in trained.network.state_dict().items())
    [red] = lockstep.predict(trained, [own.draw(7, 7, 0)], top=2)
    assert {guess.name for guess in red.guesses} == {"0", "1"}


def test_a_network_and_data_without_names_are_measured_and_exported(tmp_path: Path) -> None:
    """By the result, by what is loaded, and by the folder with the objects given again."""
    net, data = build_net(num_classes=2), (Pictures(40), Pictures(10, seed=1))
    result = train(tmp_path / "a", data=data, model=net)
    told = [event for event in commands.events(result.folder) if isinstance(event, Evaluated)][-1]
    tf32, threads = torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    for score in (
        lockstep.evaluate(result, data),
        lockstep.evaluate(result.load(), lambda: data),
        lockstep.evaluate(tmp_path / "a", data[1], model=net),
    ):
        assert (score.accuracy.correct1, score.accuracy.total, score.accuracy.loss) == (told.correct1, 10, told.loss)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()) == (tf32, threads)
    assert lockstep.evaluate(result, Pictures(7, seed=5)).accuracy.total == 7

    [written] = lockstep.export(result, "safetensors", tmp_path / "out" / "net.bin", card=False)
    saved = load_file(tmp_path / "out" / "net.bin")
    assert os.listdir(tmp_path / "out") == ["net.bin"]
    trained = result.load()
    assert all(torch.equal(value, saved[name]) for name, value in trained.network.state_dict().items())
    assert written.file == tmp_path / "out" / "net.bin"
    noise = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = trained.network(noise)
    lockstep.export(trained, ["safetensors", "torch-export"])
    assert sorted(os.listdir(tmp_path / "a" / "export")) == ["model.md", "model.pt2", "model.safetensors"]
    with torch.inference_mode():
        assert torch.equal(trained.network(noise), before)  # what is loaded stays as it is
    program = torch.export.load(tmp_path / "a" / "export" / "model.pt2").module()
    assert torch.allclose(program(noise), before, atol=1e-5)


def test_what_cannot_be_measured_or_exported_is_one_sentence(tmp_path: Path) -> None:
    net, data = build_net(num_classes=2), (Pictures(40), Pictures(10, seed=1))
    result = train(tmp_path / "a", data=data, model=net)
    model_wanted = r"model\.name = .given. .*as model=… of .*lockstep\.evaluate or lockstep\.export\."
    for sentence, call in (
        (model_wanted, lambda: lockstep.export(result.folder)),
        (r"data\.source = .given. .*as data=… of .* or lockstep\.evaluate\.", lambda: lockstep.evaluate(result)),
        ("no trained network; give a run's folder", lambda: lockstep.evaluate(net)),  # type: ignore[arg-type]
        ("device = … is for a run's folder", lambda: lockstep.evaluate(result.load(), device="cpu")),
        ("no trained network; give a run's folder", lambda: lockstep.load(net)),  # type: ignore[arg-type]
        ("There is no format 'tflite'", lambda: lockstep.export(result, "tflite")),
        ("format = 3 is not possible; give one or more of safetensors", lambda: lockstep.export(result, 3)),  # type: ignore[arg-type]
        ("batch = 0 is not possible", lambda: lockstep.export(result, batch=0)),
        ("cannot be written", lambda: lockstep.export(result, out=tmp_path)),
    ):  # fmt: skip
        with pytest.raises(lockstep.LockstepError, match=sentence):
            call()


def test_one_image_alone_and_pil_images_are_predicted(tmp_path: Path) -> None:
    trained = train(tmp_path / "a").load()
    (tmp_path / "x.png").write_bytes(own.draw(7, 7, 0))
    [expected] = lockstep.predict(trained, [own.draw(7, 7, 0)])
    picture = Image.open(io.BytesIO(own.draw(7, 7, 0)))
    for image in (str(tmp_path / "x.png"), tmp_path / "x.png", own.draw(7, 7, 0), picture, [picture]):
        [found] = lockstep.predict(trained, image)
        assert found.failure == ""
        for one, other in zip(found.guesses, expected.guesses, strict=True):
            assert one.name == other.name
            assert one.probability == pytest.approx(other.probability, abs=0.01)
    [nowhere] = lockstep.predict(trained, "x\0y.png")
    assert nowhere.failure == "embedded null byte"
    with pytest.raises(lockstep.LockstepError, match="Image 0 comes as Tensor"):
        lockstep.predict(trained, torch.zeros(2, 3, 4, 4))
    for top in (0, 2.5, True):
        with pytest.raises(lockstep.LockstepError, match=r"top = .* is not possible; give a whole number from 1 on\."):
            lockstep.predict(trained, picture, top=top)  # type: ignore[arg-type]


def test_a_result_or_a_folder_predicts_a_folder_of_images(tmp_path: Path) -> None:
    result = train(tmp_path / "a")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.png").write_bytes(own.draw(7, 7, 0))
    for run in (result, result.folder, str(result.folder), result.load(), lockstep.load(result)):
        found = lockstep.predict(run, [tmp_path / "images", own.draw(7, 7, 0)], top=1)
        assert [prediction.name for prediction in found] == [str(tmp_path / "images" / "x.png"), "image 1"]
        assert not any(prediction.failure for prediction in found)
    assert repr(result) == f"Result({str(tmp_path / 'a')!r}, finished, accuracy {result.accuracy:.4f})"
    assert repr(result.load()).endswith("tests.own:build_net, step 10, 2 classes, on cpu)")


def test_a_rate_kept_for_another_rule_is_a_warning(tmp_path: Path) -> None:
    result = train(tmp_path / "a", set={"optim.name": "adamw", "train.duration": "1st", "optim.warmup": "0st"})
    texts = [event.text for event in commands.events(result.folder) if isinstance(event, Notice)]
    assert any("optim.name = adamw keeps the recipe's optim.lr = 1" in text for text in texts)


def test_a_loss_equal_to_the_built_in_one_gives_identical_bits(tmp_path: Path) -> None:
    """Also: twice in one process is twice the same."""
    built_in = commands.last_weights(train(tmp_path / "a").folder)
    users = commands.last_weights(train(tmp_path / "b", loss=plain_loss).folder)
    lambdas = commands.last_weights(
        train(tmp_path / "c", loss=lambda logits, labels: plain_loss(logits, labels)).folder
    )
    assert built_in.keys() == users.keys()
    assert all(torch.equal(built_in[name], users[name]) for name in built_in)
    assert all(torch.equal(built_in[name], lambdas[name]) for name in built_in)
    assert 'loss = "tests.own:plain_loss"' in (tmp_path / "b" / "config.toml").read_text()
    assert 'loss = "given"' in (tmp_path / "c" / "config.toml").read_text()


def test_two_ranks_are_heard_stopped_and_gone_on_with(tmp_path: Path) -> None:
    """The ear is a closure, though the ranks are other processes; on 1 rank the run goes on to the same samples."""
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if isinstance(event, StepDone):
            raise lockstep.Stop

    longer = {"train.duration": "400ep", "train.eval_every": "400ep", "train.checkpoint_every": "400ep"}
    result = train(tmp_path / "a", ranks=2, loss=plain_loss, on_event=listen, set=longer)
    assert result.summary["status"] == "interrupted"
    assert result.summary["world_size"] == 2
    assert heard == commands.events(result.folder)
    stopped = steps(heard)[-1]
    assert stopped < 2000

    later: list[Event] = []
    end = {"train.duration": f"{stopped + 3}st"}
    result = lockstep.train(result.folder, set=end, resume=True, ranks=1, quiet=True, on_event=later.append)
    assert steps(later) == [stopped + 1, stopped + 2, stopped + 3]
    assert result.summary["status"] == "finished"
    assert result.summary["ledger_ok"] in (True, None)


def test_numbers_that_run_away_are_told_from_outside_causes_on_any_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2):
        with pytest.raises(Diverged, match=r"lower optim\.lr"):
            train(tmp_path / str(ranks), ranks=ranks, set={"optim.lr": 1e12, "train.log_every": 1})


def test_a_program_stops_its_run_and_goes_on_exactly(tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            raise lockstep.Stop

    data = (Pictures(40), Pictures(10, seed=1))
    whole = train(tmp_path / "whole", data=data)
    part = train(tmp_path / "part", data=data, on_event=listen)
    assert part.summary["status"] == "interrupted"
    assert part.summary["steps"] == 4  # the step at hand is taken
    with pytest.raises(lockstep.LockstepError, match=r'data\.source = "given" stands for an object .*data=…'):
        lockstep.train(part.folder, resume=True, ranks=1, quiet=True)
    with pytest.raises(lockstep.LockstepError, match=r"training data has changed .*other bytes"):
        lockstep.train(part.folder, resume=True, ranks=1, quiet=True, data=(Pictures(40, seed=3), data[1]))
    rest = lockstep.train(part.folder, resume=True, ranks=1, quiet=True, data=data)
    assert rest.summary["status"] == "finished"
    one, other = commands.last_weights(whole.folder), commands.last_weights(rest.folder)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_broken_data_set_is_one_sentence_that_names_the_sample(tmp_path: Path, ranks: int) -> None:
    with pytest.raises(lockstep.LockstepError) as caught:
        train(tmp_path / "a", data=own.open_broken, ranks=ranks)
    assert str(caught.value) == "Sample 5 of the training data (Broken) cannot be had: KeyError: 'nothing there'."


def test_a_broken_loss_is_one_sentence_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(lockstep.LockstepError) as caught:
        train(tmp_path / "a", loss=own.broken_loss)
    assert str(caught.value) == "The loss broken_loss failed: ValueError: 8 labels are too many."
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_broken_ear_is_named_once_and_costs_nothing(tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        raise RuntimeError(f"heard {event.kind}")

    result = train(tmp_path / "a", on_event=listen)
    assert result.summary["status"] == "finished"
    heard = [event.text for event in commands.events(result.folder) if isinstance(event, Notice)]
    (said,) = (text for text in heard if "listen failed" in text)
    assert "listen failed on RunStarted: RuntimeError: heard RunStarted" in said


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        (
            {"loss": lambda logits, labels: logits},
            "loss = .*<lambda> has no name that other ranks could import; put it",
        ),
        ({"model": build_net(2)}, "model = Sequential has no name"),
        ({"data": (Pictures(4), Pictures(4))}, "data = tuple has no name"),
    ],
)
def test_what_other_ranks_cannot_import_is_said_before_they_start(
    tmp_path: Path, brought: dict[str, Any], words: str
) -> None:
    with pytest.raises(lockstep.LockstepError, match=words):
        train(tmp_path / "a", ranks=2, **brought)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("brought", "words"),
    [
        ({"data": Pictures(8)}, r"data is a Pictures, and must be two data sets: \(train, val\)"),
        ({"data": "tests.own:nothing"}, "tests.own has no nothing; check the name behind the colon"),
        ({"data": "no.such:thing"}, "data.source = no.such:thing cannot be imported"),
        ({"data": Path("nowhere")}, "nowhere is not a folder"),
        ({"model": lambda num_classes: num_classes}, "The network .*<lambda> is a int"),
        ({"model": torch.nn.Linear(3, 2)}, "The network Linear failed on images of 16"),
        ({"loss": torch.nn.Linear(2, 1)}, "The loss Linear has parameters, which nobody would train"),
        ({"loss": 3}, "The loss int is not callable"),
        ({"set": {"optim.lr": None}}, "optim.lr = NoneType is no setting"),
        ({"ranks": 0}, r"^ranks=0 is not possible"),
        ({"restarts": -1, "ranks": 2}, r"^restarts = -1 is not possible; give a whole number from 0 on\.$"),
        ({"restarts": "a"}, r"^restarts = \"a\" is not possible"),
        ({"log": "wandbb"}, r'^log="wandbb" is no viewer'),
        ({"set": {"gpus": 4}}, r"here it is ranks=4 "),
        ({"set": {"device": "cuda"}}, "and ranks says how many"),
        (
            {"loss": torch.nn.CrossEntropyLoss(reduction="sum")},
            "The loss CrossEntropyLoss gives a sum over its samples",
        ),
        ({"resume": "yes"}, 'resume = "yes" is not possible; give True, False or "auto"'),
        ({"resume": True}, r"nothing to resume; start without resume=True\."),
        ({"set": {"optim.namee": "sgd"}}, r"""\(set=\['optim\.namee="sgd"'\]\)\.$"""),
        ({"on_event": 3}, r"^on_event = int cannot be called; give a function that takes a record\.$"),
        ({"set": {"optim.lrr": 1}}, r"There is no key optim\.lrr; the nearest is optim\.lr \(set=\[.optim\.lrr=1.\]\)"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, brought: dict[str, Any], words: str) -> None:
    with pytest.raises(lockstep.LockstepError, match=words) as caught:
        train(tmp_path / "a", **brought)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (5, "set = 5 must be a mapping of settings"),
        ("optim.lr=1", 'set = "optim.lr=1" must be a mapping of settings'),
        (["optim.lr"], r"write set=\['optim\.lr=VALUE'\]\.$"),
    ],
)
def test_settings_that_are_none_are_one_sentence(tmp_path: Path, settings: Any, words: str) -> None:
    with pytest.raises(lockstep.LockstepError, match=words):
        lockstep.train("quickstart", set=settings, out=tmp_path / "a")


def test_a_configuration_and_lists_of_settings_will_do(tmp_path: Path) -> None:
    texts, brought = bring(own.SETTINGS, build_net, open_pictures, None)
    assert brought == NOTHING
    config = load_recipe("quickstart", texts)[1]
    assert config.model.name == "tests.own:build_net"
    result = lockstep.train(config, set=["train.duration=1ep"], out=tmp_path / "a", ranks=1, quiet=True)
    assert result.summary["steps"] == 5
    again = lockstep.train(config, set=["train.duration=1ep"], out=tmp_path / "a", resume="auto", ranks=1, quiet=True)
    assert again.summary == result.summary


def test_settings_become_toml() -> None:
    given = {"data.image_sizes": [{"until": "1ep", "size": 8}], "data.flip": False, "train.duration": Duration(3, "ep")}
    texts, _ = bring(given, None, "images/of: mine", None)
    config = load_recipe("quickstart", list(texts))[1]
    assert [(str(step.until), step.size) for step in config.data.image_sizes] == [("1ep", 8)]
    assert not config.data.flip
    assert str(config.train.duration) == "3ep"
    assert (config.data.source, config.data.path) == ("folder", "images/of: mine")


def test_it_runs_beside_an_event_loop_and_in_a_thread(tmp_path: Path) -> None:
    async def work() -> lockstep.Result:
        return train(tmp_path / "loop", set={"train.duration": "1ep"})

    assert asyncio.run(work()).summary["status"] == "finished"
    results: list[lockstep.Result] = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path / "thread", set={"train.duration": "1ep"})))
    thread.start()
    thread.join()
    assert results[0].summary["status"] == "finished"


def test_ctrl_c_leaves_a_checkpoint_and_is_raised(tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="goes on with resume=True"):
        train(tmp_path / "a", on_event=listen)
    assert signal.getsignal(signal.SIGINT) is before
    events = commands.events(tmp_path / "a")
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [3]
    assert not any(isinstance(event, Evaluated) for event in events)


def test_ctrl_c_reaches_the_ranks_of_a_program(tmp_path: Path) -> None:
    """One signal to the program alone: ranks that are processes of their own leave a checkpoint all the same."""
    longer = {"train.duration": "400ep", "train.eval_every": "400ep", "train.checkpoint_every": "400ep"}

    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a", ranks=2, on_event=listen, set=longer)
    events = commands.events(tmp_path / "a")
    assert any(isinstance(event, CheckpointSaved) for event in events)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "interrupted"


PROGRAM = """
import os, sys
import lockstep
from tests import own
rank = int(os.environ["RANK"])
for number in range(2):
    net, data = own.build_net(num_classes=2), (own.Pictures(40), own.Pictures(10, seed=1))
    result = lockstep.train("quickstart", set=own.SETTINGS, out=f"{sys.argv[1]}/{number}", model=net, data=data,
                            loss=lambda logits, labels: own.plain_loss(logits, labels), quiet=True)
    # At once: both ranks write to one pipe.
    os.write(1, f"{rank} {number} {result.summary['status']} {result.summary['N']}\\n".encode())
try:
    data = (own.Pictures(40 - rank), own.Pictures(10, seed=1))
    lockstep.train("quickstart", set=own.SETTINGS, out=f"{sys.argv[1]}/other", model=net, data=data, quiet=True)
except lockstep.LockstepError as error:
    os.write(1, f"{rank} {error}\\n".encode())
"""


def test_a_program_under_torchrun_is_a_rank_and_trains_several_times(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(commands.ROOT)}
    done = subprocess.run(
        [*torchrun, str(program), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    other = "Rank 1 has other data than rank 0 (39 and 40 training samples, or other labels); give every rank all of"
    for rank in (0, 1):
        assert f"{rank} 0 finished 2" in said
        assert f"{rank} 1 finished 2" in said
        assert any(line.startswith(f"{rank} {other}") for line in said)
    first, second = (commands.last_weights(tmp_path / str(number)) for number in range(2))
    assert first.keys() == second.keys()


def test_a_module_that_trains_when_it_is_imported_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "import lockstep\nlockstep.train('quickstart', model='unguarded:net')\ndef net(num_classes): ...\n"
    (tmp_path / "unguarded.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(lockstep.LockstepError, match="unguarded trains while it is being imported; put the call under"):
        train(tmp_path / "a", model="unguarded:net")


@pytest.mark.parametrize(
    ("status", "words", "was_signalled", "was_asked", "expected"),
    [
        (0, [], False, False, "finished"),
        (143, [], False, True, "stopped"),
        (130, [], True, False, "interrupted"),
        (143, [], True, True, "interrupted"),
    ],
)
def test_how_ranks_have_ended(
    tmp_path: Path, status: int, words: list[str], was_signalled: bool, was_asked: bool, expected: str
) -> None:
    assert _judge(status, words, tmp_path, was_signalled=was_signalled, was_asked=was_asked) == expected


def test_the_first_sentence_after_the_last_restart_is_the_reason(tmp_path: Path) -> None:
    words = [
        "noise",
        "lockstep: Rank 1 was killed; all ranks start again (1 more restart allowed).",
        "lockstep: A.",
        "lockstep: B.",
    ]
    with pytest.raises(lockstep.LockstepError, match=r"^A\.$"):
        _judge(1, words, tmp_path, was_signalled=False, was_asked=False)
    passed_on = "lockstep: Rank 0 could not go on, and rank 1 stopped with it: A."
    for words, reason in (([passed_on, "lockstep: A."], r"^A\.$"), ([passed_on], r"^Rank 0 .* stopped with it: A\.$")):
        with pytest.raises(lockstep.LockstepError, match=reason):
            _judge(1, words, tmp_path, was_signalled=False, was_asked=False)
    with pytest.raises(lockstep.LockstepError, match="status 9"):
        _judge(9, ["noise"], tmp_path, was_signalled=False, was_asked=False)


def test_importing_lockstep_imports_no_torch() -> None:
    code = (
        "import sys, lockstep; lockstep.LockstepError, lockstep.Stop; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(commands.ROOT)})
    code = "import sys, lockstep; lockstep.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(commands.ROOT)})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lockstep.nothing  # type: ignore[attr-defined]  # noqa: B018
