"""From a configuration to the parts of a run: the only place that builds (step 0 on the walk)."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.cluster_file import read_cluster
from lockstep.comm.hybrid import Hybrid
from lockstep.comm.reducer import Reducer, allocate_gradients
from lockstep.comm.topology import Topology, find_topology
from lockstep.comm.wire import Wire
from lockstep.comm.world import World
from lockstep.config import DataConfig, PrecisionConfig, RunConfig
from lockstep.data.generated import build_generated, default_cache
from lockstep.data.order import Cursor, steps_per_epoch
from lockstep.data.own_data import OwnData
from lockstep.data.pack import pack_parquet
from lockstep.data.parquet import holds_parquet
from lockstep.data.pipeline import EvalPipeline, TrainPipeline
from lockstep.data.resident import Shelf
from lockstep.data.retouch import Augmentation
from lockstep.data.shards import is_packed, open_shards
from lockstep.data.sources import DataSet, Source, open_folder
from lockstep.data.webdataset import find_tars, open_tars, refuse_compressed
from lockstep.data.workshop import (
    MOST_DECODE_PROCESSES,
    READ_PROCESSES,
    THREADS_BESIDE_NVJPEG,
    DecoderName,
    Means,
    choose_decoder,
    needs_pillow,
)
from lockstep.engine.brought import NOTHING, Brought, build_given, build_own_loss, has_own_data, open_own_data
from lockstep.engine.passes import check_shares, plan_passes
from lockstep.engine.statistics import list_averaged
from lockstep.engine.timing import Clock
from lockstep.errors import LockstepError, SharedError
from lockstep.layout import Layout, plan_layout
from lockstep.models import build_started
from lockstep.models.freeze import freeze
from lockstep.models.mixed import compute_in
from lockstep.named import GIVEN
from lockstep.optim.adamw import AdamW
from lockstep.optim.average import Average
from lockstep.optim.groups import describe_parameters, find_half
from lockstep.optim.halp import Halp
from lockstep.optim.lamb import Lamb
from lockstep.optim.lars import Lars
from lockstep.optim.loss import SummedLoss, cross_entropy_sum
from lockstep.optim.loss_scale import LossScale
from lockstep.optim.muon import Muon
from lockstep.optim.naive_lars import NaiveLars
from lockstep.optim.rule import Rule
from lockstep.optim.schedule import Schedule
from lockstep.optim.sgd import Sgd
from lockstep.optim.storage import build_weights, fill_constants, hold_constants, mixed_views
from lockstep.optim.svrg import Svrg
from lockstep.plan.choose import default_reduction
from lockstep.plan.plan import InputPlan

Progress = Callable[[int, int], None]
# Images of one pass at evaluation: so many of 224 pixels, or of small ones as many as have the same pixels. Always cut
# alike, on any number of ranks.
EVAL_BATCH, MOST_EVALUATED = 100, 500
NUM_NOTES = 11  # the places of `step.py`, and six digits behind them
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sources:
    """Where the samples lie."""

    train: DataSet
    val: DataSet


@dataclass(frozen=True)
class Parts:
    """What one training step works with."""

    model: nn.Module
    layout: Layout
    dtype: torch.dtype  # of images and activations
    weights: Tensor  # the FP32 master weights
    half_weights: Tensor  # what the model computes with, over the half part of the layout
    constants: dict[str, Tensor]  # parameters that are not trained, in full precision: no part of the layout
    reducer: Reducer
    hybrid: Hybrid | None  # None in a world of one
    topology: Topology
    rule: Rule
    lr: Tensor  # of this step, on the device, so that a recorded step can read it
    note: Tensor  # what this rank adds to the side numbers, likewise: its wish to stop, digits of its weights
    loss_scale: LossScale | None  # None unless gradients are FP16
    average: Average | None  # of the weights, where one is asked for
    schedule: Schedule
    clock: Clock
    loss: SummedLoss
    eval_loss: SummedLoss  # without smoothing
    eval_flip: bool  # whether an evaluation also looks at each image's mirror image
    max_batch_per_rank: int | Fraction  # a larger share runs in several passes


def open_sources(config: DataConfig, progress: Progress | None = None, brought: Brought = NOTHING) -> Sources:
    """Open packed shards, tar files of others, sets in Parquet, image folders or the user's own data.

    On first use generated images are rendered, tar files looked through and sets in Parquet packed.
    """
    if has_own_data(config.source):
        return Sources(*open_own_data(config.source, brought, config.read_timeout_s))
    limit_s = config.read_timeout_s
    if config.source == "generated":
        root = build_generated(default_cache(), config.train_images, config.val_images, progress)
        return Sources(*open_folder(root, limit_s))
    root, val_share = Path(config.path).expanduser(), config.val_share
    if is_packed(root, limit_s):
        return Sources(*open_shards(root, limit_s, val_share, config.check_bytes))
    if tars := find_tars(root, limit_s):
        return Sources(*open_tars(root, tars, limit_s, val_share, progress))
    if holds_parquet(root, limit_s):
        pack, notes = pack_parquet(root, default_cache(), limit_s, val_share, progress)
        train, val = open_shards(pack, limit_s, 0.0, config.check_bytes)
        train.notes += notes  # of the files: their pack in the cache does not know them
        return Sources(train, val)
    refuse_compressed(root, limit_s)
    return Sources(*open_folder(root, limit_s, val_share))


def count_steps(config: RunConfig, num_samples: int) -> tuple[int, int]:
    """Steps in an epoch and in the whole run."""
    in_epoch = steps_per_epoch(num_samples, config.train.global_batch)
    return in_epoch, max(1, config.train.duration.steps(in_epoch))


def build_parts(config: RunConfig, world: World, sources: Sources, brought: Brought = NOTHING) -> Parts:
    """Everything a step needs, on this rank's device."""
    check_shares(config, world.size)
    set_number_formats(config.precision)
    model = build_network(config, len(sources.train.classes), brought)
    in_epoch, total = count_steps(config, sources.train.num_samples)
    return assemble(config, world, model, build_schedule(config, in_epoch, total), brought=brought)


def set_number_formats(precision: PrecisionConfig) -> None:
    """PyTorch's own switches: what its multiplications may round, and that its kernels are chosen by measurement."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision.compute == "tf32"
    # The gradient of a 1×1 convolution sums over a million pixels; in half precision that sum would stall.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = True


def assemble(
    config: RunConfig,
    world: World,
    model: nn.Module,
    schedule: Schedule,
    hybrid: Hybrid | None = None,
    brought: Brought = NOTHING,
) -> Parts:
    """Lay `model` out flat and put the reducer and the update rule over it; several ranks need no `hybrid` given."""
    dtype = HALF.get(config.precision.compute, torch.float32)
    layout = build_layout(config, model)
    weights, half_weights = build_weights(model, layout, world.device, dtype)
    constants = hold_constants(model, layout, find_half(model), dtype)
    # A network of somebody's own may draw numbers that no seed decides; this package's has no such buffers.
    buffers = [] if getattr(model, "takes_half", False) else list(model.buffers())
    for values in (weights, *constants.values(), *buffers):
        share_array(world, values)
    half_weights.copy_(weights[: layout.split])
    fill_constants(model, constants)
    compute_in(model, dtype, world.device.type)
    parameters = dict(model.named_parameters())
    gradients = allocate_gradients(layout.numel, world.device, split=layout.split, dtype=dtype)
    loss, eval_loss = build_losses(config, world.device, brought)
    topology = build_topology(config, world)
    if world.size > 1:
        hybrid = Hybrid(topology, world.rank, world.device, build_wire(config), timeout_s=config.comm.timeout_s)
    backend = str(dist.get_backend()) if world.size > 1 else ""
    plan = default_reduction(config.comm, layout, topology, build_wire(config).bytes_per_element, backend)
    if hybrid:
        hybrid.prepare(plan.choices)
    reducer = Reducer(
        [parameters[slot.name] for slot in layout.slots],
        gradients,
        mixed_views(*gradients, layout),
        plan,
        start=hybrid.start if hybrid else None,
        pulse=world.pulse,
    )
    rule = build_rule(config, layout, world.device)
    rule.begin(weights)
    return Parts(
        model=model.train(),
        layout=layout,
        dtype=dtype,
        weights=weights,
        half_weights=half_weights,
        constants=constants,
        reducer=reducer,
        hybrid=hybrid,
        topology=topology,
        rule=rule,
        lr=torch.zeros((), device=world.device),
        note=torch.zeros(NUM_NOTES, device=world.device),
        loss_scale=build_loss_scale(config, layout, world.device),
        average=build_average(config, model, weights),
        schedule=schedule,
        clock=Clock(world.device),
        loss=loss,
        eval_loss=eval_loss,
        eval_flip=config.data.eval_flip,
        max_batch_per_rank=plan_passes(config.train, world.rank, world.size),
    )


def build_losses(config: RunConfig, device: torch.device, brought: Brought) -> tuple[SummedLoss, SummedLoss]:
    """What training minimises, and what evaluation reports."""
    if config.optim.loss == "cross_entropy":
        return partial(cross_entropy_sum, label_smoothing=config.optim.label_smoothing), cross_entropy_sum
    loss = build_own_loss(config.optim.loss, brought, device)
    return loss, loss


def share_array(world: World, values: Tensor, source: int = 0) -> None:
    """Overwrite an array of any format and strides on every rank with that of one; backends know but a few."""
    is_known = values.dtype in (torch.float32, torch.int64) and values.is_contiguous()
    if is_known or world.size == 1 or not values.numel():
        world.broadcast(values, source)
        return
    content = values.detach().contiguous().flatten().view(torch.uint8)
    world.broadcast(content, source)
    with torch.no_grad():
        values.copy_(content.view(values.dtype).view(values.shape))


def build_layout(config: RunConfig, model: nn.Module) -> Layout:
    """Where the model's parameters lie in the flat arrays."""
    return plan_layout(
        describe_parameters(
            model,
            decay_norm_and_bias=config.optim.decay_norm_and_bias,
            adapt_norm_and_bias=config.optim.adapt_norm_and_bias,
            half=config.precision.compute in HALF,
            layer_decay=config.optim.layer_decay,
        )
    )


def build_topology(config: RunConfig, world: World) -> Topology:
    """Where the ranks stand: from the cluster file, or from the names their hosts report."""
    if not config.comm.cluster:
        return find_topology(world.gather_values(os.environ.get("LOCKSTEP_NODE") or socket.gethostname()))
    topology = read_cluster(config.comm.cluster)
    if topology.num_ranks != world.size:
        raise LockstepError(
            f"comm.cluster = {config.comm.cluster} describes {topology.num_ranks} ranks ({topology.key()}), but this "
            f"world has {world.size}; correct the file or the number of ranks."
        )
    return topology


def build_wire(config: RunConfig) -> Wire:
    """The precision gradients travel in."""
    return Wire(config.comm.wire, config.comm.division)


def build_network(config: RunConfig, num_classes: int, brought: Brought = NOTHING) -> nn.Module:
    """The initialised network, its frozen parts frozen; the same weights on every rank."""
    wanted, data = config.model, config.data
    # Networks with keys of their own in [model] get those that mean them, any other the table of its settings.
    own = {key: getattr(wanted, key) for key, (_, names) in wanted.only_with.items() if wanted.name in names}
    if wanted.name == "alexnet":
        own["pool5_batch_norm"] = wanted.pool5_batch_norm
    sizes = (data.image_size, *(step.size for step in data.image_sizes))
    try:
        if wanted.name == GIVEN:
            model = build_given(brought, num_classes, config.train.seed, sizes, wanted.settings)
        else:
            model = build_started(wanted.name, num_classes, config.train.seed, sizes, own | wanted.settings)
        freeze(model, wanted.freeze)
    except LockstepError as error:
        raise SharedError(str(error)) from error
    return model


def build_rule(config: RunConfig, layout: Layout, device: torch.device) -> Rule:
    """The update rule the recipe names."""
    optim = config.optim
    common: dict[str, Any] = {"weight_decay": optim.weight_decay, "clip_norm": optim.clip_norm}
    betas: dict[str, Any] = {"beta1": optim.beta1, "beta2": optim.beta2}
    match optim.name:
        case "sgd":
            return Sgd(layout, device, momentum=optim.momentum, nesterov=optim.nesterov, **common)
        case "lars":
            common |= {"momentum": optim.momentum, "trust_coefficient": optim.trust_coefficient}
            if config.precision.masters == "fp16":
                return NaiveLars(layout, device, epsilon=optim.epsilon, fused=False, **common)
            return Lars(layout, device, epsilon=optim.epsilon, **common)
        case "lamb":
            return Lamb(layout, device, epsilon=optim.lamb_epsilon, **betas, **common)
        case "adamw":
            return AdamW(layout, device, epsilon=optim.adamw_epsilon, **betas, **common)
        case "muon":
            return Muon(layout, device, momentum=optim.momentum, **common)
        case "svrg":
            return Svrg(layout, device, weight_decay=optim.weight_decay)
        case "halp":
            mu = optim.mu or optim.weight_decay
            own: dict[str, Any] = {"bits": optim.bits, "mu": mu, "seed": config.train.seed}
            return Halp(layout, device, weight_decay=optim.weight_decay, **own)


def build_loss_scale(config: RunConfig, layout: Layout, device: torch.device) -> LossScale | None:
    """FP16 alone needs one: BF16 reaches as far as FP32."""
    precision = config.precision
    if precision.compute != "fp16":
        return None
    is_static = precision.loss_scale == "static"
    return LossScale(
        layout,
        device,
        initial=precision.initial_scale,
        growth_steps=precision.growth_steps,
        floor=precision.initial_scale if is_static else precision.min_scale,
        ceiling=precision.initial_scale if is_static else precision.max_scale,
    )


def build_average(config: RunConfig, model: nn.Module, weights: Tensor) -> Average | None:
    """The moving average that the recipe asks for."""
    optim = config.optim
    statistics = list_averaged(model)
    return Average(weights, statistics, decay=optim.average, every=optim.average_every) if optim.average else None


def build_schedule(config: RunConfig, in_epoch: int, total: int) -> Schedule:
    """The learning rate of every step."""
    optim = config.optim
    return Schedule(
        kind=optim.schedule,
        lr=optim.lr,
        total_steps=total,
        warmup_steps=optim.warmup.steps(in_epoch),
        warmup_lr=optim.warmup_lr,
        end_lr=optim.end_lr,
        power=optim.power,
        milestones=tuple(milestone.steps(in_epoch) for milestone in optim.milestones),
        gamma=optim.gamma,
    )


def count_decode_threads(config: RunConfig, world: World, decoder: DecoderName) -> int:
    """As many as cores; on a GPU two are left to the threads that drive it, and beside nvJPEG a few are enough."""
    if config.data.decode_threads or world.device.type != "cuda":
        return config.data.decode_threads or world.num_threads
    most = THREADS_BESIDE_NVJPEG if choose_decoder(decoder, world.device) == "both" else world.num_threads
    return max(1, min(most, world.num_threads - 2))


def count_read_processes(config: RunConfig, world: World, decoder: DecoderName, *, is_odd: bool) -> int:
    """A few that read for nvJPEG; without it as many as cores but two, where most images are Pillow's to decode."""
    wanted = config.data.read_processes
    if choose_decoder(decoder, world.device) != "cpu":
        return READ_PROCESSES if wanted < 0 else wanted
    if not is_odd:  # threads decode JPEGs side by side
        return 0
    return max(1, min(MOST_DECODE_PROCESSES, world.num_threads - 2)) if wanted < 0 else wanted


def plan_input(config: RunConfig, world: World, source: Source | None = None) -> InputPlan:
    """Who makes this run's batches, from what is asked for and what is there; without a source its images are JPEGs."""
    data = config.data
    is_odd = False
    if source is not None and data.decoder in ("auto", "cpu"):
        is_odd = needs_pillow(source, world.device, data.read_timeout_s)
    decoder: DecoderName = "cpu" if is_odd else data.decoder
    return InputPlan(
        decoder=choose_decoder(decoder, world.device),
        threads=count_decode_threads(config, world, decoder),
        read_processes=count_read_processes(config, world, decoder, is_odd=is_odd),
        prefetch_batches=data.prefetch_batches,
    )


def build_train_pipeline(
    config: RunConfig, world: World, source: Source, start: Cursor, plan: InputPlan, shelf: Shelf | None = None
) -> TrainPipeline:
    """This rank's training batches from `start` on."""
    data = config.data
    # Code of the user's stays in the process that it was given to.
    read_processes = 0 if isinstance(source, OwnData) else plan.read_processes
    return TrainPipeline(
        source,
        global_batch=config.train.global_batch,
        rank=world.rank,
        world_size=world.size,
        seed=config.train.seed,
        image_size=data.image_size,
        image_sizes=tuple((int(step.until.value), step.size) for step in data.image_sizes),
        crop_area=data.crop_area,
        crop_ratio=data.crop_ratio,
        flip=data.flip,
        flip_in_turn=data.flip_in_turn,
        augmentation=Augmentation(**config.augment.model_dump()),
        prefetch_batches=plan.prefetch_batches,
        start=start,
        bad_share=data.bad_share,
        read_timeout_s=data.read_timeout_s,
        **build_means(config, world, plan.decoder, plan.threads, read_processes, shelf),
    )


def build_eval_pipeline(config: RunConfig, world: World, source: Source, shelf: Shelf | None = None) -> EvalPipeline:
    """This rank's part of the validation set."""
    data = config.data
    is_odd = not isinstance(source, OwnData) and needs_pillow(source, world.device, data.read_timeout_s)
    threads = count_decode_threads(config, world, "cpu")
    read_processes = count_read_processes(config, world, "cpu", is_odd=is_odd)
    return EvalPipeline(
        source,
        batch_size=max(EVAL_BATCH, min(MOST_EVALUATED, EVAL_BATCH * 224**2 // data.image_size**2)),
        rank=world.rank,
        world_size=world.size,
        image_size=data.image_size,
        eval_resize=data.eval_resize,
        prefetch_batches=data.prefetch_batches,
        bad_share=data.bad_share,
        read_timeout_s=data.read_timeout_s,
        # Always the same pixels, so that an evaluation can be repeated to the last sample.
        **build_means(config, world, "cpu", threads, read_processes, shelf),
    )


def build_means(
    config: RunConfig,
    world: World,
    decoder: DecoderName,
    threads: int,
    read_processes: int = 0,
    shelf: Shelf | None = None,
) -> Means:
    """What it takes to make batches, for training and evaluation alike."""
    return Means(
        mean=config.data.mean,
        std=config.data.std,
        threads=threads,
        device=world.device,
        decoder=decoder,
        read_processes=read_processes,
        resident=config.data.resident,
        shelf=shelf,
        dtype=HALF.get(config.precision.compute, torch.float32),
    )
