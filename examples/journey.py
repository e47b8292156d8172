"""From a folder of images to a network in use: `python examples/journey.py [FOLDER]`, under a minute on a CPU.

Everything here is a public command or the public Python API. Each step is what you would do with your own images and
your own network (`small_net.py`, beside this file); a test runs it (`tests/test_journey.py`). The ONNX file takes
`pip install '.[export]'`.
"""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from small_net import SmallNet

import lockstep
from lockstep.events import Event

SETTINGS = {
    "data.image_size": 32,
    "data.eval_resize": 36,
    "data.mean": [0.5, 0.5, 0.5],
    "data.std": [0.25, 0.25, 0.25],
    "optim.name": "adamw",
    "optim.lr": 0.005,
    "optim.warmup": "1ep",
    "train.global_batch": 32,
    "train.log_every": 2,
    "train.eval_every": "2ep",
    "train.checkpoint_every": "2ep",
    "comm.tune_s": 0,  # a run of seconds is too short to measure first how its steps are best taken
}


def main(folder: Path) -> dict[str, Any]:
    """The whole way; returns what it found."""
    # 1. Your images: train/<class>/ and test/<class>/, which serves as val/ where there is none. These are drawn.
    images, others = folder / "shapes", folder / "other-shapes"
    draw_images(images, {"train": 120, "test": 30}, {"bar": 2, "disc": 40, "square": 4, "triangle": 3})
    draw_images(others, {"train": 10, "test": 40}, {"hexagon": 6, "rail": 2, "roof": 3})

    # 2. Train your own network on two ranks. The program hears every record, and here it ends the run early.
    run = folder / "runs" / "shapes"

    def train(on_event: Callable[[Event], None] | None = None) -> lockstep.Result:
        return lockstep.train(
            "quickstart",
            set=SETTINGS | {"train.duration": "10ep"},
            out=run,
            resume="auto",  # start it, or go on with it
            ranks=2,
            data=images,
            model=SmallNet,
            on_event=on_event,
        )

    def stop_early(event: Event) -> None:
        if event.kind == "StepDone":
            raise lockstep.Stop

    stopped = train(stop_early)
    print(f"{stopped.summary['status']} after {stopped.summary['steps']} steps")

    # 3. The same call goes on where it was: no sample lost, none seen twice.
    result = train()
    print(f"{result.summary['status']} after {result.summary['steps']} steps, top-1 {result.accuracy:.1%}")

    # 4. How good is it, class by class? It says that test/ serves.
    call("evaluate", run, images, "--json", folder / "test.json")
    test = json.loads((folder / "test.json").read_text())

    # 5. What is in an image? `lockstep predict RUN IMAGE…` says the same.
    trained = result.load(device="cpu")
    files = sorted(images.glob("test/*/0.png"))
    named = lockstep.predict(trained, files)
    for file, prediction in zip(files, named, strict=True):
        print(f"{file.relative_to(images)}: {prediction.guesses[0].name} {prediction.guesses[0].probability:.1%}")

    # 6. For programs without Lockstep, and without PyTorch: ONNX gives the same logits.
    call("export", run, "--format", "onnx")
    noise = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = trained.network(noise)
    session = onnxruntime.InferenceSession(run / "export" / "model.onnx", providers=["CPUExecutionProvider"])
    [theirs] = session.run(None, {"images": noise.numpy()})
    difference = float((torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max())
    print(f"ONNX: logits differ by {difference:.1e} of the largest")

    # 7. Somebody's weights: a file with torchvision's names. Here it is a small ResNet, trained on the first images.
    resnet = {"model.name": "resnet18", "model.width": 8}
    teacher = SETTINGS | resnet | {"train.duration": "8ep", "train.eval_every": "8ep", "train.checkpoint_every": "8ep"}
    weights = folder / "resnet18.pth"
    [exported] = lockstep.export(lockstep.train("quickstart", set=teacher, out=folder / "runs/teacher", data=images))
    torch.save(load_file(exported.file), weights)  # as torchvision's files are

    # 8. Other classes, 10 images of each: keep what was learnt and train a new classifier; or begin with nothing.
    few = (
        SETTINGS | resnet | {"train.duration": "6ep", "train.global_batch": 10, "optim.lr": 0.02, "optim.warmup": "0ep"}
    )
    kept = {"model.weights": str(weights), "model.freeze": ["conv1", "bn1", "layer1", "layer2", "layer3", "layer4"]}
    tuned = lockstep.train("quickstart", set=few | kept, out=folder / "runs/tuned", data=others)
    scratch = lockstep.train("quickstart", set=few, out=folder / "runs/scratch", data=others)
    print(f"after 6 epochs: {tuned.accuracy:.1%} with what was learnt, {scratch.accuracy:.1%} from nothing")
    return {
        "stopped_at": stopped.summary["steps"],
        "steps": result.summary["steps"],
        "val": result.accuracy,
        "test": test["top1"],
        "notes": test["notes"],
        "named": sum(file.parent.name == one.guesses[0].name for file, one in zip(files, named, strict=True)),
        "difference": difference,
        "weights": weights,
        "tuned": tuned.accuracy,
        "scratch": scratch.accuracy,
    }


def call(*arguments: object) -> None:
    """A command, as you would type it in the folder that holds `small_net.py`."""
    words = [str(argument) for argument in arguments]
    print("$ lockstep", *words, flush=True)
    places = os.pathsep.join(sys.path)  # where this program finds modules
    subprocess.run([sys.executable, "-m", "lockstep", *words], check=True, env=os.environ | {"PYTHONPATH": places})


def draw_images(root: Path, splits: dict[str, int], corners: dict[str, int]) -> None:
    """Polygons of any size, place and colour on noise; those with fewer than 3 corners are drawn as lines."""
    for split, count in splits.items():
        for name, number in corners.items():
            (root / split / name).mkdir(parents=True)
            for place in range(count):
                pencil = random.Random(f"{split} {name} {place}")
                image = Image.frombytes("L", (40, 40), pencil.randbytes(1600)).point(lambda level: level // 3)
                radius, turn = pencil.uniform(11, 16), pencil.uniform(0, math.tau)
                x, y = (pencil.uniform(radius, 40 - radius) for _ in range(2))
                angles = [turn + math.tau * corner / abs(number) for corner in range(abs(number))]
                points = [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]
                colour = tuple(pencil.randrange(140, 256) for _ in range(3))
                image = image.convert("RGB")
                if number > 2:
                    ImageDraw.Draw(image).polygon(points, fill=colour)
                else:
                    ImageDraw.Draw(image).line([*points, points[0]], fill=colour, width=4)
                image.save(root / split / name / f"{place}.png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
