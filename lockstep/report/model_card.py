"""A model card: what a network is, how it was trained, how good it is and how to use it, in Markdown. Torch-free.

Written beside an export, from the run's own configuration and records. Its code runs as it stands, in the folder that
holds the files. What a run says is text: nothing in a name becomes Markdown or HTML.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.config import RESNETS, RunConfig, to_toml
from lockstep.events import Evaluated, Event, RunStarted
from lockstep.named import GIVEN
from lockstep.recipe_values import show
from lockstep.report.averages import see_average
from lockstep.report.history import History
from lockstep.report.page.charts import tell_time
from lockstep.report.phrases import count, count_parameters, percent, plural

MOST_CLASSES = 200  # whose names are listed
SPECIAL = re.compile(r"([\\`*_\[\]#|~]|^[-+])")


@dataclass(frozen=True)
class Subject:
    """What the card is of."""

    run: str
    step: int
    classes: Sequence[str]
    config: RunConfig
    version: str  # of Lockstep, that wrote the files
    files: Mapping[str, str]  # beside the card, each with its format
    is_average: bool = False  # whether the weights are the average of the run's


def build_card(subject: Subject, events: Iterable[Event]) -> str:
    """The whole card; of a run without records, what its configuration tells."""
    events = list(events)
    history = History(events) if any(isinstance(event, RunStarted) for event in events) else None
    parts = [
        f"# {plain(subject.run)}",
        _introduce(subject, history),
        _tell_accuracy(subject, history),
        _tell_training(subject, history),
        _tell_use(subject),
        _tell_limits(subject, history),
        _list_classes(subject),
        f"## Recipe\n\nAll settings, as `lockstep train` takes them.\n\n{fence(to_toml(subject.config), 'toml')}",
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return text.encode(errors="backslashreplace").decode()


def plain(text: object) -> str:
    """Text that stays text in Markdown and in the HTML made of it."""
    printable = "".join(character if character.isprintable() else " " for character in str(text))
    escaped = printable.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(r"\\\1", escaped)


def fence(text: str, language: str) -> str:
    """A block of code, behind more backticks than it has itself."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text.strip()}\n{marks}"


def _introduce(subject: Subject, history: History | None) -> str:
    model, classes = subject.config.model.name, len(subject.classes)
    model = "network of the program's own" if model == GIVEN else model
    size = f", {count_parameters(history.start.num_parameters)}," if history else ""
    recipe = f" by the recipe {plain(history.start.recipe)}" if history else ""
    return (
        f"A {plain(model)}{size} that tells {classes:,} classes of images apart, trained by Lockstep{recipe}: its "
        f"{'averaged ' if subject.is_average else ''}weights after step {subject.step:,}."
    )


def _tell_accuracy(subject: Subject, history: History | None) -> str:
    """What the run measured of these weights, or of the nearest before them."""
    evaluated = [event for event in history.all(Evaluated) if event.step <= subject.step] if history else []
    if not evaluated:
        return "## Accuracy\n\nThe run has not measured it; `lockstep evaluate RUN` does."
    last = max(reversed(evaluated), key=lambda event: event.step)  # of one that was done again, the later
    chosen = see_average(last) if subject.is_average else last
    if chosen is None:
        return "## Accuracy\n\nThe run has not measured that of its averaged weights; `lockstep evaluate RUN` does."
    rows = [f"| top-1 | {percent(chosen.top1)} | {chosen.correct1:,} of {last.total:,} |"]
    if len(subject.classes) > 5 and chosen.top5 is not None:
        rows.append(f"| top-5 | {percent(chosen.top5)} | {chosen.correct5:,} of {last.total:,} |")
    if subject.is_average:
        rows.append(
            f"| top-1 of the weights of that step | {percent(last.top1)} | {last.correct1:,} of {last.total:,} |"
        )
    ahead = f" The weights are {plural(subject.step - last.step, 'step')} ahead." if last.step < subject.step else ""
    table = "\n".join(["| | | right answers |", "| --- | ---: | ---: |", *rows])
    seen = ", of each image together with its mirror image" if subject.config.data.eval_flip else ""
    return f"## Accuracy\n\nOn the validation data{seen}, after step {last.step:,}.{ahead}\n\n{table}"


def _tell_training(subject: Subject, history: History | None) -> str:
    config = subject.config
    data, optim, train = config.data, config.optim, config.train
    known = {"generated": "generated images", "folder": f"the image folder or pack {data.path}"}
    known[GIVEN] = "images of the program's own"
    source = known.get(data.source, f"a data set of its user's ({data.source})")
    facts = [("data", source)]
    if history:
        start, summary = history.start, history.summary
        facts += [("samples", f"{start.num_train:,} for training, {start.num_val:,} for validation")]
    facts += [
        ("images", f"{data.image_size} × {data.image_size}, cut from the middle of a short side of {data.eval_resize}"),
        (
            "optimiser",
            f"{optim.name}, learning rate {optim.lr:g}, {optim.schedule}, weight decay {optim.weight_decay:g}",
        ),
        ("batch", f"{train.global_batch:,} for {train.duration}, seed {train.seed}"),
        *([("weights", f"a moving average, {optim.average:g}")] if subject.is_average else []),
        ("number format", f"{config.precision.compute}, weights FP32"),
    ]
    if history:
        facts += [
            ("status", str(summary["status"])),
            ("time", f"{tell_time(summary['wall_s'])} for {plural(summary['steps'], 'step')}"),
            ("hardware", f"{plural(start.world_size, 'rank')} on {start.device}"),
        ]
        facts += [("speed", f"{count(summary['T'])} images/s")] if summary["T"] is not None else []
        if summary["ledger_ok"] is not None:
            facts.append(("every sample once an epoch", "yes" if summary["ledger_ok"] else "no"))
        facts += [(str(name), str(version)) for name, version in start.versions.items()]
    facts.append(("files written by", f"lockstep {subject.version}"))
    rows = "\n".join(f"| {plain(name)} | {plain(value)} |" for name, value in facts)
    return f"## Training\n\n| | |\n| --- | --- |\n{rows}"


def _tell_use(subject: Subject) -> str:
    """Code for each file there is, behind the code that reads an image as the run's evaluation does."""
    data, blocks = subject.config.data, []
    uses = {"safetensors": _use_safetensors, "onnx": _use_onnx, "torch-export": _use_program}
    for file, kind in subject.files.items():
        title, code = uses[kind](subject, file)
        blocks.append(f"### {title}\n\n{fence(code, 'python')}")
    reading = f"""
import json

import numpy as np
import torch
from PIL import Image


def read_image(file):
    image = Image.open(file).convert("RGB")
    side = min(image.size) * {data.image_size} / {data.eval_resize}
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    image = image.resize(({data.image_size}, {data.image_size}), Image.Resampling.BILINEAR, box=box)
    pixels = (np.asarray(image) / 255 - {list(data.mean)}) / {list(data.std)}
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float().contiguous()


def show(logits, classes):
    chances = logits.softmax(1)[0]
    for chance, place in zip(*chances.topk(min(5, len(classes)))):
        print(f"{{classes[place]}}: {{100 * chance:.1f}} %")
"""
    return "\n\n".join(
        [
            "## Use\n\nWith Lockstep: `lockstep predict RUN image.jpeg`. Without it, images are read like this:",
            fence(reading, "python"),
            *blocks,
        ]
    )


def _use_safetensors(subject: Subject, file: str) -> tuple[str, str]:
    model = subject.config.model
    is_published = model.width == 64 and model.stem in ("imagenet", "cifar") and not model.pooled_shortcuts
    if model.name in RESNETS and is_published:
        title, imports = "Weights in torchvision", "import torchvision"
        build = [f"network = torchvision.models.{model.name}(num_classes=len(classes))"]
        if model.stem == "cifar":
            build += [
                "network.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)",
                "network.maxpool = torch.nn.Identity()",
            ]
    elif model.name == GIVEN:
        title, imports = "Weights in the program's network", ""
        build = ["network = ...  # put in the nn.Module that the program gave to this run"]
    else:  # nobody else has this network
        title = "Weights in Lockstep's network"
        imports = (
            "import tomllib\n\nfrom lockstep.config import RunConfig\nfrom lockstep.engine.build import build_network"
        )
        build = [
            'config = RunConfig.model_validate(tomllib.loads(facts["recipe"]))',
            "network = build_network(config, len(classes))",
        ]
    lines = "\n".join(build)
    code = f"""
{imports}
from safetensors import safe_open
from safetensors.torch import load_file

with safe_open({show(file)}, "pt") as opened:
    facts = opened.metadata()
classes = json.loads(facts["classes"])
{lines}
network.load_state_dict(load_file({show(file)}))
with torch.no_grad():
    show(network.eval()(read_image("image.jpeg")), classes)
"""
    return title, code


def _use_onnx(subject: Subject, file: str) -> tuple[str, str]:
    code = f"""
import onnxruntime

session = onnxruntime.InferenceSession({show(file)}, providers=["CPUExecutionProvider"])
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
(logits,) = session.run(["logits"], {{"images": read_image("image.jpeg").numpy()}})
show(torch.from_numpy(logits), classes)
"""
    return "ONNX", code


def _use_program(subject: Subject, file: str) -> tuple[str, str]:
    code = f"""
facts = {{"lockstep.json": ""}}
program = torch.export.load({show(file)}, extra_files=facts)
classes = json.loads(json.loads(facts["lockstep.json"])["classes"])
with torch.no_grad():
    show(program.module()(read_image("image.jpeg")), classes)
"""
    return "Plain PyTorch", code


def _tell_limits(subject: Subject, history: History | None) -> str:
    limits = [
        f"It answers with one of its {len(subject.classes):,} classes whatever it is shown: an image of something else "
        "is taken for one of them.",
        "Its probabilities were not calibrated: how sure it says it is, and how often it is right, may differ.",
        "Its accuracy is that on the validation data above, and on images from elsewhere may be lower.",
        "It sees the middle of an image, and nothing beside it.",
    ]
    if subject.config.data.eval_flip:
        limits.append(
            "Its accuracy is that of the mean of an image's answer and its mirror image's, which is what "
            "`lockstep predict` tells. The files are the network alone: asked of an image without its mirror image, "
            "they may be right less often."
        )
    if subject.config.data.source == "generated":
        limits.append("It was trained on generated pictures of shapes, and is of no use for photographs.")
    if history and history.summary["status"] != "finished":
        limits.append("Its run has not finished.")
    if history and (bad := history.summary["bad_samples"]):
        limits.append(f"{plural(bad, 'sample')} of the training data could not be read.")
    limits.append(
        "Who may use it, and for what, depends on the images it was trained on: this card knows nothing of that."
    )
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _list_classes(subject: Subject) -> str:
    names = "\n".join(f"{place}. {plain(name)}" for place, name in enumerate(subject.classes[:MOST_CLASSES]))
    left = len(subject.classes) - MOST_CLASSES
    more = f"\n\nAnd {left:,} more, in the files' metadata." if left > 0 else ""
    return f"## Classes\n\n{names}{more}"
