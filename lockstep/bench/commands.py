"""The bench commands. Each imports its benchmark only when it runs, so that --help and mistakes answer at once."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from lockstep.bench.step_command import step_command
from lockstep.errors import LockstepError
from lockstep.processes import stopping_by_exception

# What `bench input` takes unless told otherwise: turns of each side, seconds of one, seconds a network is fed.
INPUT_ROUNDS, INPUT_ROUND_S, FED_S = 5, 3.0, 60.0

bench = typer.Typer(help="Measure this system beside its peers, in one run.", no_args_is_help=True)


bench.command("step")(step_command)


@bench.command("train")
def train_command(
    data: Annotated[
        Path | None, typer.Option(help="An image folder with train/ and val/, which both sides read.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Networks of timm's, with commas (timm:convnext_tiny,timm:vit_small_patch16_224)."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs; the first is warm-up and not in the speed.")] = 5,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas: a training of each side with each.")] = "0,1,2",
    batch: Annotated[int, typer.Option(min=1, help="Images of a step.")] = 256,
    image_size: Annotated[int, typer.Option(min=1, help="Side of the images, in pixels.")] = 224,
    precision: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="Number format (bf16 on a GPU, or fp32).")
    ] = None,
    lr: Annotated[float, typer.Option(min=1e-12, help="Learning rate after the warm-up.")] = 1e-3,
    weights: Annotated[
        Path | None,
        typer.Option(help="A state_dict that both sides start from, .safetensors or .pth; drawn if not given."),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="timm's network compiled, and ours where a run would; on a GPU unless told otherwise.",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """Whole trainings of timm's networks through Lockstep beside the loop of timm's users: accuracy, speed, seconds."""
    from lockstep.bench.trainings import run

    run(
        data=data,
        models=model,
        epochs=epochs,
        seeds=seeds,
        batch=batch,
        image_size=image_size,
        precision=precision,
        lr=lr,
        weights=weights,
        compiled=compiled,
        json_file=json_file,
    )


@bench.command("allreduce")
def allreduce_command(
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, in network namespaces or pretended.")] = 4,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 8,
    sizes: Annotated[str, typer.Option(help="Message sizes, such as 1KiB,64KiB,4MiB; 1 KiB to 64 MiB if empty.")] = "",
    gbit_per_s: Annotated[float | None, typer.Option(help="Limit each node's link; not limited if not given.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Turns each algorithm takes at each size.")] = 40,
    budget_s: Annotated[float, typer.Option(help="About how long it may take, in seconds.")] = 420.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a chart to this file.")] = None,
) -> None:
    """Every all-reduce over message sizes beside PyTorch's own and beside the model's prediction."""
    from lockstep.bench.allreduce import SIZES, parse_sizes, run_parent

    run_parent(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        sizes=parse_sizes(sizes) if sizes else SIZES,
        gbit_per_s=gbit_per_s,
        rounds=rounds,
        budget_s=budget_s,
        json_file=json_file,
        html_file=html_file,
    )


@bench.command("input")
def input_command(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A folder of photos, one with train/, or packed shards; generated if not given.", metavar="SRC"
        ),
    ] = None,
    image_size: Annotated[int, typer.Option(min=1, help="Side of the squares the photos are cropped to.")] = 224,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Decode threads, and a peer's workers.")] = None,
    rounds: Annotated[int | None, typer.Option(min=2, help="Turns each side takes (5); the median counts.")] = None,
    round_s: Annotated[float | None, typer.Option(help="Seconds of one turn (3).")] = None,
    feed: Annotated[float | None, typer.Option(help="Training speed to feed, in images a second.")] = None,
    train: Annotated[
        str | None, typer.Option(help="Train this network from SRC, beside the same on data in memory, instead.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="With --train: how long it is fed (60).")] = None,
    read_processes: Annotated[
        int | None, typer.Option(min=0, help="With --train: processes that read for nvJPEG (2).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """Reading, decoding, cropping and the whole input beside PyTorch's DataLoader with Pillow or torchvision."""
    if train:
        if feed is not None:
            raise LockstepError("--feed asks about a speed and --train measures one; give one of them.")
        if rounds is not None or round_s is not None:
            raise LockstepError("With --train there are no rounds; --seconds says how long it is fed.")
        from lockstep.bench import feed as fed
        from lockstep.bench.input import open_photos

        wanted = fed.Wanted(train, batch, image_size, FED_S if seconds is None else seconds, threads)
        if read_processes is not None:
            wanted = replace(wanted, read_processes=read_processes)
        console = Console()
        fed.run(open_photos(path, console), wanted, console, json_file)
        return
    if seconds is not None:
        raise LockstepError("--seconds goes with --train; without it, --rounds and --round-s say how long it takes.")
    if read_processes is not None:
        raise LockstepError("--read-processes goes with --train: only a GPU that trains has nvJPEG to read for.")
    from lockstep.bench.input import run_parent

    run_parent(
        path=path,
        image_size=image_size,
        batch=batch,
        threads=threads,
        rounds=INPUT_ROUNDS if rounds is None else rounds,
        round_s=INPUT_ROUND_S if round_s is None else round_s,
        feed=feed,
        json_file=json_file,
    )


@bench.command("optimizer")
def optimizer_command(
    model: Annotated[str, typer.Option(help="resnet50, alexnet, or both.")] = "both",
    rounds: Annotated[int, typer.Option(min=2, help="Updates timed of each kind; the median counts.")] = 200,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try our kernels under many tilings instead.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """Our fused updates beside PyTorch's optimisers, and beside the time their bytes take to move."""
    from lockstep.bench.optimizer import parse_models, run_bench

    run_bench(parse_models(model), rounds=rounds, sweep=sweep, json_file=json_file)


@bench.command("kernels")
def kernels_command(
    model: Annotated[str, typer.Option(help="alexnet, or a ResNet such as resnet50.")] = "resnet50",
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 256,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Measure the compiler's too.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """Our passes between convolutions beside the time their bytes take to move, and beside torch.compile's."""
    from lockstep.bench.norm_passes import run_bench

    run_bench(model, batch=batch, compiled=compiled, json_file=json_file)


@bench.command("overlap")
def overlap_command(
    model: Annotated[str, typer.Option(help="alexnet, or a ResNet such as resnet50.")] = "resnet50",
    batches: Annotated[str, typer.Option("--batch", help="Batch sizes, with commas.")] = "32,256",
    latency_ms: Annotated[float, typer.Option(min=0.0, help="What every sum takes at least.")] = 0.3,
    gb_per_s: Annotated[float, typer.Option(min=0.001, help="GB of gradients summed in a second.")] = 100.0,
    rounds: Annotated[int, typer.Option(min=2, help="Turns each way takes; the median counts.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """How much of a network's time the step hides, on one GPU with a stand-in for the network."""
    from lockstep.bench.one_gpu import parse_batches
    from lockstep.bench.overlap import run
    from lockstep.comm.topology import Link

    run(
        model=model,
        batches=parse_batches(batches),
        link=Link(latency_ms / 1e3, gb_per_s * 1e9),
        rounds=rounds,
        console=Console(),
        json_file=json_file,
    )


@bench.command("chaos")
def chaos_command(
    faults: Annotated[int, typer.Option(min=1, help="Faults to inject.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Decides which faults, to whom and when.")] = 0,
    ranks: Annotated[int, typer.Option(min=2, help="Ranks of each run.")] = 2,
    backend: Annotated[str, typer.Option(help="auto, gloo or nccl, whose ranks may share a GPU.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
    every: Annotated[
        float | None, typer.Option(min=1, help="Instead: kill a rank every so many seconds; how much time is of use?")
    ] = None,
    lasting: Annotated[
        float | None, typer.Option("--for", min=1, help="Seconds that --every lasts; 4 faults' time if not given.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Instead: one table of the FILES that --json wrote.")] = False,
    files: Annotated[list[Path] | None, typer.Argument(help="For --merge.", metavar="FILES")] = None,
) -> None:
    """Kill, stop, starve and cut off real runs, go on with them, and see whether anything is lost or left behind."""
    from lockstep.bench.chaos.campaign import run
    from lockstep.bench.chaos.report import read_report, show
    from lockstep.bench.chaos.useful import measure_useful

    console = Console()
    if backend not in ("auto", "gloo", "nccl"):
        raise LockstepError(f"--backend {backend[:40]} is not possible; choose auto, gloo or nccl.")
    if merge != bool(files):
        raise LockstepError("--merge and the files it makes one table of belong together; give both or neither.")
    if merge:
        is_clean = show([read_report(file) for file in files or []], console)
    elif every is not None:
        for_s = lasting or max(120.0, 4.5 * every)
        with stopping_by_exception():
            is_clean = measure_useful(
                every_s=every, for_s=for_s, seed=seed, num_ranks=ranks, json_file=json_file, console=console
            )
    else:
        with stopping_by_exception():
            is_clean = run(
                count=faults, seed=seed, num_ranks=ranks, backend=backend, json_file=json_file, console=console
            )
    if not is_clean:
        raise typer.Exit(1)


@bench.command("fuzz")
def fuzz_command(
    files: Annotated[int, typer.Option(min=1, help="Files to damage.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is damaged, and how.")] = 0,
    case: Annotated[str | None, typer.Option(help="KIND:NUMBER, a single file; it is kept.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes at a time; 0: one for each core.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """Damage recipes, checkpoints, plans, indexes, shards and images, and see whether all are read or refused."""
    from lockstep.bench.fuzz import run

    if not run(files=files, seed=seed, case=case, workers=workers, json_file=json_file, console=Console()):
        raise typer.Exit(1)


@bench.command("virtual")
def virtual_command(
    nodes: Annotated[int, typer.Option(min=2, help="Nodes, each a network namespace.")] = 4,
    gbit_per_s: Annotated[float | None, typer.Option(help="Limit of each node's link.")] = 1.0,
    delay_ms: Annotated[float | None, typer.Option(help="Delay of each link, where the kernel has netem.")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="NODE=GBIT_PER_S, another limit for one node.")] = None,
) -> None:
    """Lay out a cluster of network namespaces on this machine and measure its links."""
    from lockstep.bench.network import parse_slow, run_parent

    run_parent(nodes=nodes, gbit_per_s=gbit_per_s, delay_ms=delay_ms, slow=parse_slow(slow or []))


@bench.command("instruments")
def instruments_command(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on this machine.")] = 1,
    model: Annotated[str, typer.Option(help="alexnet, or a ResNet such as resnet50.")] = "resnet18",
    batch: Annotated[int, typer.Option(min=1, help="Images of a rank.")] = 32,
    image_size: Annotated[int, typer.Option(min=1, help="Side of the images, in pixels.")] = 64,
    rounds: Annotated[int, typer.Option(min=2, help="Turns each side takes; the median of the ratios counts.")] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """What measuring layers, noise and timelines costs a step: with it and without it, in turns."""
    from lockstep.bench.instrument_cost import run_parent

    run_parent(ranks, model=model, batch=batch, image_size=image_size, rounds=rounds, json_file=json_file)


@bench.command("halp")
def halp_command(
    data: Annotated[
        Path, typer.Argument(help="A folder of images, packed or not; its training images are taken.", metavar="SRC")
    ],
    image_size: Annotated[int, typer.Option(min=1, help="Side that images are scaled to, in pixels.")] = 8,
    samples: Annotated[int, typer.Option(min=0, help="Images to take; 0: all.")] = 0,
    weight_decay: Annotated[float, typer.Option(min=1e-9, help="Which is the strong convexity.")] = 0.01,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 100,
    lr: Annotated[float, typer.Option(min=1e-9, help="Learning rate, of images whose mean squared norm is 1.")] = 1.0,
    anchors: Annotated[int, typer.Option(min=2, help="Anchors, an epoch after each.")] = 10,
    mu: Annotated[float, typer.Option(min=0.0, help="What HALP takes for it; 0: the weight decay.")] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the curves to this file as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a chart to this file.")] = None,
) -> None:
    """HALP and SVRG beside low-precision SGD on a strongly convex problem, whose optimum is known."""
    from lockstep.bench.low_precision import Case, run_bench

    case = Case(data, image_size, samples, weight_decay, batch, lr, anchors, mu)
    run_bench(case, json_file, html_file, Console())


@bench.command("forecast")
def forecast_command(
    shapes: Annotated[str, typer.Option(help="Virtual clusters, NODESxRANKS with commas.")] = "1x2,2x2,2x4,4x4",
    gbit_per_s: Annotated[float, typer.Option(min=0.001, help="Limit of each node's link.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Images of a rank.")] = 8,
    rounds: Annotated[int, typer.Option(min=2, help="Turns each setting takes; the median counts.")] = 5,
    patience_s: Annotated[
        float, typer.Option(min=0.0, help="How long turns are taken again in which other programs worked.")
    ] = 45.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
) -> None:
    """Step times that the planner predicts for virtual clusters beside those measured on them."""
    from lockstep.bench.forecast_check import parse_shapes, run
    from lockstep.bench.forecast_ranks import Case

    run(
        parse_shapes(shapes),
        case=Case(batch=batch),
        gbit_per_s=gbit_per_s,
        rounds=rounds,
        patience_s=patience_s,
        json_file=json_file,
        console=Console(),
    )
