"""The command `bench step`: a whole training step beside one of its peers, and which options say something there."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.errors import LockstepError

# Options of `bench step` that say nothing to its side beside torchvision, and the one that says something there alone.
NOT_BESIDE_TORCHVISION = (
    "nodes",
    "ranks_per_node",
    "ranks",
    "device",
    "image_size",
    "precision",
    "compiled",
    "gradient_mb",
    "gbit_per_s",
    "round_s",
    "html_file",
    "data",
)
NOT_BESIDE_TIMM = tuple(name for name in NOT_BESIDE_TORCHVISION if name not in ("image_size", "precision", "data"))
DDP_ROUNDS, TORCHVISION_ROUNDS = 40, 12  # of `bench step`, unless told otherwise


def refuse_idle(context: typer.Context, names: Iterable[str], where: str) -> None:
    """Refuse options that were given and would have no effect."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name) if parameter.name in names else None
        if source is not None and source.name == "COMMANDLINE":
            raise LockstepError(f"{parameter.opts[0]} has no effect {where}; leave it out.")


def step_command(
    context: typer.Context,
    against: Annotated[
        Literal["ddp", "bare", "torchvision", "timm"],
        typer.Option(
            help="The peer: DDP, default and tuned; a bare loop on one rank; torchvision's network on one GPU; timm's "
            "network, loader and optimiser."
        ),
    ] = "ddp",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, in network namespaces or pretended.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 2,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine, instead of nodes with ranks.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="Beside DDP, ranks on GPUs over NCCL, which share one where there are too few; or on CPUs."),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="Train this network; beside DDP on CPUs on one small image a rank, unless told otherwise; beside timm "
            "several (timm:convnext_tiny,timm:vit_small_patch16_224)."
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            "--batch", help="Images of a rank (256 on a GPU); beside torchvision (256,512) and timm (256) several."
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the images beside DDP or timm, in pixels (224 on a GPU).")
    ] = None,
    precision: Annotated[
        Literal["fp32", "fp16", "bf16"] | None,
        typer.Option(help="Beside DDP (fp16) or timm (bf16) on GPUs."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Beside timm: an image folder that both sides read and decode; noise in memory if not given."
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            help="Settings that take part, all if empty: torchvision's, such as fp32,fp16-compiled; timm's, such as "
            "plain,compiled."
        ),
    ] = "",
    before: Annotated[
        Path | None,
        typer.Option(help="Beside torchvision: another checkout of Lockstep that takes part, as before a change."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="On GPUs, DDP compiled too: minutes of preparation.")
    ] = True,
    gradient_mb: Annotated[
        float | None,
        typer.Option(help="Train a stack of layers with about this many MB of gradients; two usual ones if not given."),
    ] = None,
    gbit_per_s: Annotated[float | None, typer.Option(help="Limit each node's link; not limited if not given.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=2, help="Turns each side takes (40; on one GPU 12); the median of the ratios counts."),
    ] = None,
    round_s: Annotated[float, typer.Option(help="Seconds of one turn.")] = 0.3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file as JSON.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a chart to this file.")] = None,
) -> None:
    """A whole training step beside PyTorch's DDP on several ranks, a bare loop on one, torchvision's or timm's."""
    from lockstep.bench.one_gpu import parse_batches

    if against == "torchvision":
        refuse_idle(context, NOT_BESIDE_TORCHVISION, "with --against torchvision")
        from lockstep.bench.one_gpu import run
        from lockstep.bench.torchvision_peers import pick_peers

        models = [model] if model else ["resnet50", "alexnet"]
        run(
            models=models,
            batches=parse_batches(batches or "256,512"),
            peers=pick_peers(peers),
            rounds=rounds or TORCHVISION_ROUNDS,
            before=before,
            json_file=json_file,
        )
        return
    refuse_idle(context, ("before",), f"with --against {against}, only beside torchvision")
    if against == "timm":
        refuse_idle(context, NOT_BESIDE_TIMM, "with --against timm")
        from lockstep.bench import beside_timm, timm_peers

        beside_timm.run(
            models=model,
            batches=parse_batches(batches or "256"),
            image_size=image_size,
            precision=precision,
            data=data,
            peers=timm_peers.pick_peers(peers),
            rounds=rounds or TORCHVISION_ROUNDS,
            json_file=json_file,
        )
        return
    refuse_idle(context, ("peers",), f"with --against {against}, only beside torchvision or timm")
    refuse_idle(context, ("data",), f"with --against {against}, only beside timm")
    if ranks is not None and nodes > 1:
        raise LockstepError("--ranks are those of this machine alone; with --nodes give --ranks-per-node.")
    from lockstep.bench.step import run_parent

    run_parent(
        nodes=nodes,
        ranks_per_node=ranks or ranks_per_node,
        against=against,
        device=device,
        model=model,
        batch=parse_batches(batches)[0] if batches else None,
        image_size=image_size,
        precision=precision,
        compiled=compiled,
        gradient_mb=gradient_mb,
        gbit_per_s=gbit_per_s,
        rounds=rounds or DDP_ROUNDS,
        round_s=round_s,
        json_file=json_file,
        html_file=html_file,
    )
