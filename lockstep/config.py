"""What a run is asked to do: one tree of frozen models. Torch-free.

Before this on the walk: `recipes/read.py`, which fills the tree from a recipe. After it: `engine/build.py`, its only
reader. Whether a tree is valid depends on its values alone, so the resolved `config.toml` of a run always replays.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from lockstep.named import GIVEN, is_name
from lockstep.recipe_values import (
    LARGEST,
    LONGEST_S,
    LONGEST_SHOWN,
    MOST,
    Duration,
    Durations,
    Names,
    Pair,
    Triple,
    show,
)

LEAST_SHARE = 1e-6  # of the time: with less, snapshots would be further apart than any run is long
USUAL_PASS = 256  # samples, where nobody says how many and nobody measures it

# Update rules that take full gradients at anchors.
ANCHORED = ("svrg", "halp")
# Networks whose settings have keys of their own in [model]; those of any other stand in [model.settings].
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


NETWORK_NAME = re.compile(r"[\w.-]+(:[\w.@/-]+)?", re.ASCII)
MOST_SETTINGS = 100


def _read_network_name(given: object) -> object:
    """A network's name; whether there is such a network is known to `models/` alone, which needs torch."""
    if isinstance(given, str) and (len(given) > LONGEST_SHOWN or not NETWORK_NAME.fullmatch(given)):
        raise ValueError("a network's name, such as resnet50, package.module:name or timm:convnext_tiny")
    return given


def _read_settings(given: object) -> dict[str, Any]:
    """The settings of a network: plain values, or lists of them, by names that a function may have for arguments."""
    wanted = "a table of names and plain values, such as {depth = 12}"
    if not isinstance(given, dict) or len(given) > MOST_SETTINGS:
        raise ValueError(wanted)
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if not (isinstance(name, str) and name.isidentifier() and len(values) <= MOST_SETTINGS):
            raise ValueError(wanted)
        for each in values:
            if not isinstance(each, bool | int | float | str) or each in (math.inf, -math.inf) or each != each:
                raise ValueError(wanted)
            if isinstance(each, int) and abs(each) >= 1 << 63:  # which TOML cannot hold
                raise ValueError(wanted)
    return dict(given)


def _of(*known: str) -> AfterValidator:
    """One of these words, or the name of something of the user's."""

    def check(text: str) -> str:
        if text not in (*known, GIVEN) and not is_name(text):
            raise ValueError(f"{', '.join(known)}, or something of yours as package.module:name")
        return text

    return AfterValidator(check)


Settings = Annotated[dict[str, Any], PlainValidator(_read_settings)]


class Section(BaseModel):
    """One table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    section: ClassVar[str]
    # key -> (the key that decides, its values under which this key has an effect); elsewhere it must keep its default.
    only_with: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {}

    @model_validator(mode="after")
    def _has_no_idle_key(self) -> Self:
        for key, (switch, values) in self.only_with.items():
            given, default, now = getattr(self, key), type(self).model_fields[key].default, getattr(self, switch)
            if given != default and now not in values:
                decider = f"{self.section}.{switch}"
                # Whoever names a folder wants its images; whoever names another rule may well want that rule.
                way = f"add --set {decider}={values[0]}" if switch == "source" else f"change {decider}"
                raise ValueError(
                    f"{self.section}.{key} = {show(given)} has no effect with {decider} = {show(now)}, only with "
                    f"{', '.join(values)}; leave it at {show(default)} or {way}"
                )
        return self


class ImageSize(Section):
    """The size of training images up to an epoch."""

    section = "data.image_sizes"

    until: Duration = Field(examples=["6ep"], description="the first epochs, a whole number of them")
    size: int = Field(ge=1, le=1 << 16, examples=[160], description="side of the square the network sees, in pixels")


ImageSizes = Annotated[tuple[ImageSize, ...], Field(strict=False)]


class DataConfig(Section):
    """Where samples come from and how they become a batch."""

    section = "data"
    only_with = {"path": ("source", ("folder",)), "val_share": ("source", ("folder",))}

    source: Annotated[str, _of("generated", "folder")] = Field(
        default="generated", description="where samples lie: generated, folder, or package.module:name (docs/api.md)"
    )
    path: str = Field(
        default="",
        description="folder that holds train/ and val/, packed shards, tar or Parquet files, for source = folder",
    )
    val_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the training samples kept for validation, by a hash of their names; 0: val/ is",
    )
    train_images: int = Field(default=4096, ge=1, le=MOST, description="training samples to generate")
    val_images: int = Field(default=1024, ge=1, le=MOST, description="validation samples to generate")
    image_size: int = Field(default=224, ge=1, le=1 << 16, description="side of the square the network sees, in pixels")
    image_sizes: ImageSizes = Field(
        default=(), description='smaller images for the first epochs, such as [{until = "6ep", size = 160}]'
    )
    eval_resize: int = Field(
        default=256, ge=1, le=1 << 16, description="short side before the central crop at evaluation, in pixels"
    )
    eval_flip: bool = Field(
        default=False,
        description="answer at evaluation by the mean of an image's logits and its mirror image's; takes twice as long",
    )
    crop_area: Pair = Field(default=(0.08, 1.0), description="least and greatest share of the area a random crop keeps")
    crop_ratio: Pair = Field(
        default=(3 / 4, 4 / 3), description="least and greatest width over height of a random crop"
    )
    flip: bool = Field(default=True, description="mirror every other training sample, at random")
    flip_in_turn: bool = Field(
        default=False, description="mirror a training sample in every other epoch instead of by chance; needs flip"
    )
    mean: Triple = Field(default=(0.485, 0.456, 0.406), description="subtracted from red, green, blue in [0, 1]")
    std: Triple = Field(
        default=(0.229, 0.224, 0.225), description="divides red, green, blue after the mean is subtracted"
    )
    decoder: Literal["auto", "cpu", "nvjpeg", "both"] = Field(
        default="auto", description="who decodes training images; auto: on a GPU nvJPEG, and threads where they help"
    )
    read_processes: int = Field(
        default=-1,
        ge=-1,
        le=1 << 12,
        description=(
            "processes of a rank that read for a GPU's nvJPEG, or decode where most images are no JPEGs; 0: its own "
            "threads do; -1: 2 to read, and to decode by the cores it may use"
        ),
    )
    decode_threads: int = Field(
        default=0, ge=0, le=1 << 12, description="decoding threads of a rank; 0: from the cores it may use"
    )
    prefetch_batches: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="batches prepared ahead of the step; 0: as many as it takes, by measurement",
    )
    resident: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="keep decoded images in the GPU's memory; auto: if a fifth of what is free holds them all",
    )
    bad_share: float = Field(
        default=0.001, ge=0, le=1, description="share of unreadable samples above which a run stops"
    )
    check_bytes: bool = Field(default=True, description="hold each packed sample against its checksum when it is read")
    read_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=LONGEST_S,
        description="how long a sample's bytes may take to come before it counts as unreadable",
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.source == "folder" and not self.path:
            raise ValueError('data.source = "folder" needs data.path, the folder that holds train/ and val/')
        if self.eval_resize < self.image_size:
            raise ValueError(
                f"data.eval_resize = {self.eval_resize} is smaller than data.image_size = {self.image_size}; "
                "the central crop needs at least that many pixels"
            )
        if self.flip_in_turn and not self.flip:
            raise ValueError("data.flip_in_turn = true has no effect with data.flip = false; leave one of them out")
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ValueError(f"data.crop_area = {show(self.crop_area)} must be two rising shares in (0, 1]")
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"data.crop_ratio = {show(self.crop_ratio)} must be two rising numbers above 0")
        if low < 0.001 or high > 1000:
            raise ValueError(f"data.crop_ratio = {show(self.crop_ratio)} must lie between 0.001 and 1000")
        for step in self.image_sizes:
            if step.until.unit != "ep" or step.until.value != int(step.until.value) or step.until.value < 1:
                raise ValueError(
                    f'data.image_sizes has until = {show(step.until)}, and must change between epochs, such as "6ep"'
                )
        ends = [step.until.value for step in self.image_sizes]
        if ends != sorted(set(ends)):
            raise ValueError(
                f"data.image_sizes must rise, but ends after {', '.join(f'{end:g}' for end in ends)} epochs"
            )
        if min(self.std) <= 0:
            raise ValueError(f"data.std = {show(self.std)} must be three numbers above 0")
        if min(self.std) < 1e-6 or max(*self.std, *map(abs, self.mean)) > 1e6:
            raise ValueError(
                f"data.mean = {show(self.mean)} and data.std = {show(self.std)} must be of images in [0, 1]; give "
                "numbers of at most a million, and no std below 0.000001"
            )
        return self


class AugmentConfig(Section):
    """What training samples undergo beyond crop and flip, on the device that holds the batch."""

    section = "augment"

    pad: int = Field(
        default=0,
        ge=0,
        le=1 << 15,
        description="pixels reflected around each square, of which one of its size is cut out at random",
    )
    policy: Literal["none", "trivial"] = Field(
        default="none", description="trivial: TrivialAugment, one operation of random strength on each sample"
    )
    erase: float = Field(default=0.0, ge=0, le=1, description="share of the samples of which a part is erased")
    cutout: int = Field(
        default=0,
        ge=0,
        le=1 << 15,
        description="side of a square that is erased of every sample, in pixels, around any of its pixels; 0: none",
    )
    mixup: float = Field(
        default=0.0, ge=0, le=1e3, description="alpha of mixup, which adds pairs of samples and their labels; 0: none"
    )
    cutmix: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="alpha of CutMix, by pairs likewise; with mixup one of the two, by chance",
    )

    @property
    def mixes(self) -> bool:
        """Whether a sample has two labels."""
        return bool(self.mixup or self.cutmix)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.erase and self.cutout:
            raise ValueError("augment.erase and augment.cutout both erase a part of a sample; set one of them to 0")
        return self


class ModelConfig(Section):
    """Which network."""

    section = "model"
    only_with = {
        "stem": ("name", RESNETS),
        "pooled_shortcuts": ("name", RESNETS),
        "width": ("name", RESNETS),
        "zero_init_residual": ("name", RESNETS),
        "batch_norm": ("name", ("alexnet",)),
        "dropout": ("name", ("alexnet",)),
    }

    name: Annotated[str, BeforeValidator(_read_network_name)] = Field(
        default="resnet50",
        description="resnet18 to resnet152, alexnet, linear, package.module:name, torchvision:NAME or timm:NAME",
    )
    stem: Literal["imagenet", "deep", "fine", "cifar"] = Field(
        default="imagenet",
        description="first layers: one 7×7 convolution and a pool; ResNet-D's three 3×3 and a pool; those without the "
        "pool, for images of about 64 to 160 pixels at four times the work; one 3×3, for smaller ones",
    )
    pooled_shortcuts: bool = Field(
        default=False, description="ResNet-D's shortcuts: at stride 2 a mean over 2×2 pixels before the convolution"
    )
    width: int = Field(
        default=64, ge=1, le=1 << 16, description="channels of the first stage; 64 is the published network"
    )
    zero_init_residual: bool = Field(
        default=True, description="start the last batch norm of each residual block at zero"
    )
    batch_norm: bool = Field(default=True, description="batch norm after each convolution and hidden layer of alexnet")
    pool5_batch_norm: bool = Field(
        # Follows batch_norm, so that switching that one off leaves none at all.
        default_factory=lambda given: bool(given.get("batch_norm", True)),
        description="the paper's extra batch norm after alexnet's last pooling",
    )
    dropout: float = Field(default=0.5, ge=0, lt=1, description="share dropped in alexnet's two hidden layers")
    settings: Settings = Field(
        default_factory=dict, description="what any other network is called with, besides the number of classes"
    )
    weights: str = Field(
        default="",
        description="weights to start from: a file, a run's folder, torchvision:NAME or timm:NAME; none if empty",
    )
    freeze: Names = Field(
        default=(),
        examples=[("conv1", "bn1")],
        description='parts that stay as they are, by the beginnings of their names, such as ["conv1"]',
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.name != "alexnet" and not self.pool5_batch_norm:
            raise ValueError('model.pool5_batch_norm has an effect only with model.name = "alexnet"; leave it out')
        if self.pool5_batch_norm and not self.batch_norm:
            raise ValueError("model.pool5_batch_norm = true needs model.batch_norm = true; drop one of the two")
        keys = {key for key, (_, names) in self.only_with.items() if self.name in names}
        if own := sorted(self.settings.keys() & keys):
            raise ValueError(f"model.settings holds {own[0]}, which has a key of its own; write model.{own[0]}")
        return self


class OptimConfig(Section):
    """How gradients become weights."""

    section = "optim"
    only_with = {
        "momentum": ("name", ("sgd", "lars", "muon")),
        "nesterov": ("name", ("sgd",)),
        "trust_coefficient": ("name", ("lars",)),
        "epsilon": ("name", ("lars",)),
        "beta1": ("name", ("lamb", "adamw")),
        "beta2": ("name", ("lamb", "adamw")),
        "lamb_epsilon": ("name", ("lamb",)),
        "adamw_epsilon": ("name", ("adamw",)),
        "adapt_norm_and_bias": ("name", ("lars", "lamb")),
        "anchor_every": ("name", ANCHORED),
        "bits": ("name", ("halp",)),
        "mu": ("name", ("halp",)),
        "end_lr": ("schedule", ("poly", "cosine")),
        "power": ("schedule", ("poly",)),
        "milestones": ("schedule", ("step",)),
        "gamma": ("schedule", ("step",)),
        "label_smoothing": ("loss", ("cross_entropy",)),
    }

    name: Literal["sgd", "lars", "lamb", "adamw", "muon", "svrg", "halp"] = Field(
        default="sgd", description="the update rule"
    )
    lr: float = Field(gt=0, le=LARGEST, examples=[0.1], description="learning rate after warm-up")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of sgd, lars and muon")
    nesterov: bool = Field(default=False, description="Nesterov's form of momentum (sgd)")
    weight_decay: float = Field(
        default=1e-4,
        ge=0,
        le=LARGEST,
        description="weight decay, added to the gradient; to the direction (lamb, adamw, muon)",
    )
    decay_norm_and_bias: bool = Field(default=False, description="decay batch-norm parameters and biases too")
    adapt_norm_and_bias: bool = Field(
        default=False, description="give batch-norm parameters and biases a trust ratio too"
    )
    trust_coefficient: float = Field(default=0.001, gt=0, le=LARGEST, description="eta of the trust ratio (lars)")
    epsilon: float = Field(default=0.0, ge=0, le=LARGEST, description="added to the trust ratio's denominator (lars)")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the gradient's running mean (lamb, adamw)")
    beta2: float = Field(
        default=0.999, ge=0, lt=1, description="decay of the squared gradient's running mean (lamb, adamw)"
    )
    lamb_epsilon: float = Field(
        default=1e-6, gt=0, le=LARGEST, description="added to the root of the second moment (lamb)"
    )
    adamw_epsilon: float = Field(
        default=1e-8, gt=0, le=LARGEST, description="added to the root of the second moment (adamw)"
    )
    anchor_every: Duration = Field(
        default=Duration(1, "ep"), description="between full gradients, each a pass over the data (svrg, halp)"
    )
    bits: Literal[8, 16] = Field(default=8, description="bits of an offset from the anchor (halp)")
    mu: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST,
        description="strong convexity: offsets reach to the full gradient's norm over it; 0: weight_decay (halp)",
    )
    clip_norm: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST,
        description="the gradient of the whole network is scaled down to this norm where it is above; 0: never",
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor on the learning rate for every block nearer to the images, down from 1 in the head",
    )
    schedule: Literal["constant", "poly", "cosine", "step"] = Field(
        default="cosine", description="learning rate after warm-up"
    )
    warmup: Duration = Field(default=Duration(0, "ep"), description="the learning rate rises linearly for this long")
    warmup_lr: float = Field(default=0.0, ge=0, le=LARGEST, description="learning rate at step 0 of the warm-up")
    end_lr: float = Field(default=0.0, ge=0, le=LARGEST, description="learning rate at the end (poly, cosine)")
    power: float = Field(default=2.0, gt=0, le=1e3, description="exponent of the decay (poly)")
    milestones: Durations = Field(
        default=(),
        examples=[("30ep", "60ep", "80ep")],
        description="when the learning rate drops, counted from step 0 (step)",
    )
    gamma: float = Field(default=0.1, gt=0, le=1, description="factor of each drop (step)")
    loss: Annotated[str, _of("cross_entropy")] = Field(
        default="cross_entropy", description="what is minimised: cross_entropy, or package.module:name (docs/api.md)"
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="share of the target spread over all classes")
    average: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="what a moving average of the weights keeps of itself at an update, such as 0.999; 0: no average",
    )
    average_every: int = Field(default=1, ge=1, le=MOST, description="steps between two updates of that average")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.average_every != 1 and not self.average:
            raise ValueError(
                f"optim.average_every = {self.average_every} has no effect without an average; set optim.average, such "
                "as 0.99, or leave it at 1"
            )
        if self.schedule == "step" and not self.milestones:
            raise ValueError('optim.schedule = "step" needs optim.milestones, such as ["30ep", "60ep", "80ep"]')
        for early, late in zip(self.milestones, self.milestones[1:], strict=False):
            if early.unit == late.unit and early.value >= late.value:
                raise ValueError(f"optim.milestones must rise, but {show(late)} comes after {show(early)}")
        if self.name in ANCHORED:
            self._is_anchored()
        return self

    def _is_anchored(self) -> None:
        if self.anchor_every.value == 0:
            raise ValueError(f'optim.anchor_every = {show(self.anchor_every)} is no length; give one such as "1ep"')
        if self.name == "halp" and not self.mu and not self.weight_decay:
            raise ValueError("optim.name = halp needs optim.mu, or an optim.weight_decay that is the strong convexity")
        for key, usual in (("clip_norm", 0.0), ("layer_decay", 1.0)):
            if (given := getattr(self, key)) != usual:
                raise ValueError(
                    f"optim.{key} = {show(given)} cannot be had with optim.name = {self.name}, whose steps are "
                    f"corrected by one full gradient; leave it at {show(usual)} or choose another rule"
                )


class PrecisionConfig(Section):
    """In which number formats the step runs."""

    section = "precision"
    only_with = {
        "masters": ("compute", ("fp16",)),
        "loss_scale": ("compute", ("auto", "fp16")),
        "initial_scale": ("compute", ("auto", "fp16")),
        "growth_steps": ("compute", ("auto", "fp16")),
        "min_scale": ("compute", ("auto", "fp16")),
        "max_scale": ("compute", ("auto", "fp16")),
    }

    compute: Literal["auto", "fp32", "tf32", "fp16", "bf16"] = Field(
        default="auto",
        description="format of multiplications; auto: fp16 on GPUs with tensor cores, fp32 elsewhere; fp16 and bf16 "
        "have FP32 master weights",
    )
    masters: Literal["fp32", "fp16"] = Field(
        default="fp32",
        description="format of weights, momentum and norms in the update; fp16 only to see what is lost by it (lars)",
    )
    loss_scale: Literal["dynamic", "static"] = Field(
        default="dynamic", description="halved by an overflow and doubled after good steps, or left alone (fp16)"
    )
    initial_scale: float = Field(default=2.0**16, gt=0, le=LARGEST, description="loss scale of the first step (fp16)")
    growth_steps: int = Field(default=2000, ge=1, le=MOST, description="good steps after which the loss scale doubles")
    min_scale: float = Field(default=1.0, gt=0, le=LARGEST, description="the loss scale never falls below this")
    max_scale: float = Field(default=2.0**24, gt=0, le=LARGEST, description="the loss scale never rises above this")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.loss_scale == "dynamic" and not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"precision.initial_scale = {show(self.initial_scale)} must lie between precision.min_scale = "
                f"{show(self.min_scale)} and precision.max_scale = {show(self.max_scale)}"
            )
        return self

    def settle(self, compute: str) -> Self:
        """The same in this format; the settings of a loss scale that it has none of go back to their defaults."""
        kept = {key for key in type(self).model_fields if compute in self.only_with.get(key, ("", (compute,)))[1]}
        return type(self).model_validate(self.model_dump(include=kept) | {"compute": compute})


class CommConfig(Section):
    """How ranks exchange gradients."""

    section = "comm"
    only_with = {
        "group_size": ("algorithm", ("hierarchical", "torus")),
        "division": ("wire", ("fp16", "bf16")),
    }

    backend: Literal["auto", "nccl", "gloo"] = Field(default="auto", description="auto: nccl on GPUs, gloo on CPUs")
    algorithm: Literal["auto", "flat", "hierarchical", "torus", "doubling"] = Field(
        default="auto", description="how a buffer is summed; auto: measured, for each buffer"
    )
    group_size: int = Field(default=0, ge=0, le=1 << 20, description="ranks in a group; 0: those of a node")
    fusion: Literal["auto", "merged", "two-segments", "threshold"] = Field(
        default="auto", description="which gradients travel together; auto: each rule tried"
    )
    buffer_mb: float = Field(
        default=25.0, gt=0, le=1e6, description="size of a fused buffer under the threshold rule, in MiB"
    )
    overlap: Literal["auto", "on", "off"] = Field(
        default="auto", description="reduce buffers while backward still runs; auto: measured"
    )
    wire: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="the precision gradients travel in")
    division: Literal["before", "split", "fp32"] = Field(
        default="before",
        description="where half-precision sums are divided: before, by the root on both sides, in FP32",
    )
    cluster: str = Field(default="", description="a cluster file; the nodes are found from host names if empty")
    tune_s: float = Field(
        default=20.0,
        ge=0,
        le=LONGEST_S,
        description="longest time for measuring before step 0, beyond one rehearsed and one sent step and compiling; "
        "0: no all-reduces are compared, only a GPU's ways to execute the step",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, le=LONGEST_S, description="a rank silent for this long ends the run, in seconds"
    )


class TrainConfig(Section):
    """How long to train, and what to do on the way."""

    section = "train"

    global_batch: int = Field(ge=1, le=MOST, examples=[256], description="samples of one step over all ranks")
    duration: Duration = Field(examples=["90ep"], description="length of the whole run")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="decides weights, order and crops")
    max_batch_per_rank: int = Field(
        default=0,
        ge=0,
        le=MOST,
        description="a larger share runs in several passes whose gradients add; 0: what fits and is quickest on a GPU, "
        "256 on a CPU",
    )
    accumulate: int = Field(
        default=0, ge=0, le=MOST, description="passes of a step on each rank; 0: by max_batch_per_rank"
    )
    norm_batch: int = Field(
        default=0,
        ge=0,
        le=MOST,
        description="samples over which batch norm takes its statistics, at most: no pass is larger; 0: a whole pass",
    )
    eval_every: Duration = Field(default=Duration(1, "ep"), description='between evaluations; "0st": only at the end')
    checkpoint_every: Duration = Field(
        default=Duration(1, "ep"), description='between checkpoints; "0st": only at the end'
    )
    keep_checkpoints: int = Field(default=2, ge=1, le=1 << 20, description="how many of the last checkpoints stay")
    snapshot_share: float = Field(
        default=0.01,
        ge=0,
        le=0.5,
        description="share of the time that snapshots in memory may take, where ranks can be started again; 0: none",
    )
    log_every: int = Field(default=10, ge=1, le=MOST, description="steps between step records")
    own_kernels: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Lockstep's fused kernels in the network, on a GPU; auto: wherever Triton and the GPU can",
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        default="auto", description="record the step and replay it in one launch, on a GPU; auto: where it is quicker"
    )
    compile: Literal["auto", "off", "whole", "stage", "block"] = Field(
        default="auto", description="torch.compile the network; auto: tried on a GPU in runs long enough to earn it"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.duration.value == 0:
            raise ValueError(f'train.duration = {show(self.duration)} trains nothing; give a length such as "90ep"')
        if 0 < self.snapshot_share < LEAST_SHARE:
            raise ValueError(
                f"train.snapshot_share = {show(self.snapshot_share)} is less than any run can keep to; give 0 for no "
                f"snapshots, or at least {LEAST_SHARE:g}"
            )
        # Runs of an older version have the usual size beside it.
        if self.accumulate and self.max_batch_per_rank not in (0, USUAL_PASS):
            raise ValueError(
                f"train.accumulate = {self.accumulate} and train.max_batch_per_rank = {self.max_batch_per_rank} both "
                "say in how many passes a step runs; leave one of the two at 0"
            )
        if self.accumulate and self.norm_batch:
            raise ValueError(
                f"train.accumulate = {self.accumulate} and train.norm_batch = {self.norm_batch} both say how large a "
                "pass is; leave one of the two at 0"
            )
        if self.accumulate > self.global_batch:
            raise ValueError(
                f"train.accumulate = {self.accumulate} asks for more passes than train.global_batch = "
                f"{self.global_batch} has samples; lower it"
            )
        return self

    @property
    def largest_pass(self) -> int:
        """Samples of a pass at most, by these settings alone."""
        most = self.max_batch_per_rank or USUAL_PASS
        return min(most, self.norm_batch) if self.norm_batch else most


class RunConfig(Section):
    """Everything a run is asked to do."""

    section = ""

    description: str = Field(default="", description="a note for people")
    data: DataConfig = Field(default=DataConfig(), description="where samples come from and how they become a batch")
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="what training samples undergo beyond crop and flip"
    )
    model: ModelConfig = Field(default=ModelConfig(), description="which network")
    optim: OptimConfig = Field(description="how gradients become weights")
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description="in which number formats the step runs")
    comm: CommConfig = Field(default=CommConfig(), description="how ranks exchange gradients")
    train: TrainConfig = Field(description="how long to train, and what to do on the way")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.precision.masters == "fp16" and self.optim.name != "lars":
            raise ValueError('precision.masters = "fp16" is there for optim.name = "lars" alone; leave it at "fp32"')
        if self.data.image_sizes and self.model.name == "alexnet":
            raise ValueError(
                "data.image_sizes has no effect on alexnet, whose hidden layers take one size; leave it out or change "
                "model.name"
            )
        smallest = min(self.data.image_size, *(step.size for step in self.data.image_sizes), MOST)
        if self.augment.cutout >= smallest:
            raise ValueError(
                f"augment.cutout = {self.augment.cutout} erases all of some images of data.image_size = {smallest}; "
                "lower it"
            )
        if self.augment.pad >= smallest:
            raise ValueError(
                f"augment.pad = {self.augment.pad} reflects more pixels than images of data.image_size = {smallest} "
                "have beside their edge; lower it"
            )
        if self.optim.name in ANCHORED:
            self._is_exact()
        warmup, duration = self.optim.warmup, self.train.duration
        if warmup.unit == duration.unit and warmup.value > duration.value:
            raise ValueError(
                f"optim.warmup = {show(warmup)} is longer than train.duration = {show(duration)}; shorten the warm-up"
            )
        return self

    def _is_exact(self) -> None:
        """Differences of nearly equal gradients are noise in half precision."""
        for key, given, exact in (
            ("precision.compute", self.precision.compute, ("fp32", "tf32", "auto")),
            ("comm.wire", self.comm.wire, ("fp32",)),
        ):
            if given not in exact:
                raise ValueError(
                    f"{key} = {show(given)} cannot be had with optim.name = {self.optim.name}, which compares "
                    f"gradients at two places near each other; set {key} to {' or '.join(exact)}, or take another rule"
                )


SECTIONS: dict[str, type[Section]] = {
    model.section: model
    for model in (DataConfig, AugmentConfig, ModelConfig, OptimConfig, PrecisionConfig, CommConfig, TrainConfig)
}
KEYS = ("description", *(f"{name}.{key}" for name, model in SECTIONS.items() for key in model.model_fields))


def to_toml(config: RunConfig) -> str:
    """The whole tree, defaults included, as a recipe that loads to the same tree."""
    return tomli_w.dumps(config.model_dump(mode="json"))
