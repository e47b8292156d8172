"""What is wrong with a recipe, in one sentence that names the key and says what would be right. Torch-free."""

import difflib
import shlex

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.config import KEYS, SECTIONS, ImageSize, RunConfig, Section
from lockstep.recipe_values import LONGEST_SHOWN, show

QUOTE = '"'
MOST_RANKS = 1 << 20
# How each kind of pydantic error completes "KEY = VALUE must be …".
RULES = {
    "float_type": "a number, such as {example}",
    "finite_number": "a finite number, such as {example}",
    "int_type": "a whole number, such as {example}",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "string_unicode": "text in UTF-8",
    "tuple_type": "a list, such as {example}",
    "too_long": "a list of {max_length} values, such as {example}",
    "model_type": "a table of keys",
    "literal_error": "{expected}",
    "greater_than": "above {gt:g}, such as {example}",
    "greater_than_equal": "at least {ge:g}, such as {example}",
    "less_than": "below {lt:g}, such as {example}",
    "less_than_equal": "at most {le:g}, such as {example}",
    "value_error": "{error}",
}


# What other trainers call a setting: their names → ours, with an example; or the option that does it.
NAMES_ELSEWHERE: dict[str, tuple[str, ...]] = {
    'train.duration = "90ep"': ("epochs", "num_epochs", "max_epochs", "n_epochs", "num_train_epochs"),
    'train.duration = "1500st"': ("steps", "max_steps", "num_steps", "total_steps", "iterations", "max_iters"),
    "train.global_batch = 256": (
        "batch_size", "batchsize", "batch", "bs", "train_batch_size", "per_device_train_batch_size",
    ),
    "train.norm_batch = 64": ("ghost_batch_size", "ghost_batch", "virtual_batch_size", "bn_batch_size"),
    "train.accumulate = 4": (
        "accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps",
        "accum_iter",
    ),
    "train.log_every = 10": ("print_freq", "log_interval", "log_freq", "logging_steps", "log_every_n_steps"),
    'train.checkpoint_every = "1ep"': ("save_freq", "save_every", "save_interval", "save_steps", "checkpoint_interval"),
    "train.keep_checkpoints = 2": ("save_total_limit", "checkpoint_hist", "save_top_k", "max_keep_ckpts"),
    'train.eval_every = "1ep"': ("eval_interval", "val_interval", "eval_freq", "eval_steps", "check_val_every_n_epoch"),
    "train.seed = 0": ("random_seed", "manual_seed", "random_state"),
    'train.compile = "block"': ("torchcompile", "torch_compile", "use_compile"),
    "optim.lr = 0.1": ("learning_rate", "base_lr", "blr", "lr0", "initial_lr"),
    'optim.name = "sgd"': ("optimizer", "opt", "optimiser", "solver", "opt_name"),
    "optim.weight_decay = 0.0001": ("wd", "l2", "weight_decay_rate"),
    "optim.beta1 = 0.9": ("betas", "opt_betas", "adam_beta1", "beta_1"),
    "optim.beta2 = 0.999": ("adam_beta2", "beta_2"),
    'optim.schedule = "cosine"': ("scheduler", "lr_scheduler", "sched", "lr_policy", "lr_schedule"),
    'optim.warmup = "5ep"': ("warmup_epochs", "lr_warmup_epochs", "num_warmup_epochs"),
    'optim.warmup = "500st"': ("warmup_steps", "num_warmup_steps", "lr_warmup_steps", "warmup_iters"),
    "optim.end_lr = 0.00001": ("min_lr", "lr_min", "eta_min", "final_lr"),
    'optim.milestones = ["30ep", "60ep"]': ("lr_step_size", "lr_steps", "decay_epochs", "decay_milestones"),
    "optim.gamma = 0.1": ("lr_gamma", "decay_rate"),
    "optim.label_smoothing = 0.1": ("smoothing",),
    "optim.clip_norm = 1.0": (
        "clip", "clip_grad", "clip_grad_norm", "max_grad_norm", "grad_clip", "gradient_clip_val", "max_norm",
    ),
    "optim.average = 0.999": ("ema", "ema_decay", "model_ema", "model_ema_decay", "use_ema", "averaging"),
    "optim.average_every = 5": ("ema_steps", "model_ema_steps", "ema_every", "ema_update_freq"),
    "data.decode_threads = 8": ("num_workers", "workers", "nworkers", "dataloader_num_workers", "loader_workers"),
    "data.prefetch_batches = 4": ("prefetch_factor", "prefetch"),
    'data.path = "imagenet"': (
        "data", "data_dir", "data_path", "data_root", "dataset", "dataset_path", "root", "train_dir", "traindir",
    ),
    "data.image_size = 224": (
        "img_size", "imgsz", "input_size", "crop_size", "train_crop_size", "resolution", "train_size",
    ),
    "data.eval_flip = true": ("tta", "test_time_augmentation", "flip_test", "test_flip", "tta_flip"),
    "data.eval_resize = 256": ("val_resize_size", "resize_size", "eval_size", "val_size"),
    "data.crop_area = [0.08, 1.0]": ("scale", "rrc_scale", "crop_scale"),
    "data.crop_ratio = [0.75, 1.33]": ("ratio", "rrc_ratio"),
    "data.flip = true": ("hflip", "horizontal_flip", "random_flip", "fliplr"),
    "augment.pad = 4": ("padding", "crop_padding", "random_crop_padding", "translate"),
    'augment.policy = "trivial"': ("auto_augment", "aa", "ta_wide", "trivial_augment", "randaugment", "rand_augment"),
    "augment.cutout = 8": ("cutout_size", "cutout_length"),
    "augment.erase = 0.25": ("reprob", "random_erase", "random_erasing", "erasing"),
    "augment.mixup = 0.2": ("mixup_alpha",),
    "augment.cutmix = 1.0": ("cutmix_alpha",),
    'precision.compute = "bf16"': (
        "amp", "use_amp", "amp_dtype", "mixed_precision", "autocast", "fp16", "bf16", "half", "dtype", "precision",
    ),
    'comm.backend = "nccl"': ("dist_backend", "ddp_backend", "distributed_backend"),
    "comm.buffer_mb = 25.0": ("bucket_cap_mb", "ddp_bucket_cap_mb"),
    'model.name = "resnet50"': ("arch", "architecture", "model_name", "net", "network", "backbone", "model"),
    'model.weights = "torchvision:resnet50"': (
        "pretrained", "weights", "checkpoint", "init_checkpoint", "finetune", "load_from", "pretrained_weights",
    ),
    "model.settings.drop_path_rate = 0.1": ("drop_path", "drop_path_rate", "stochastic_depth", "stochastic_depth_prob"),
    "--ranks 4": ("gpus", "devices", "num_gpus", "ngpus", "world_size", "nproc_per_node", "num_processes"),
    "--out RUN": ("output", "output_dir", "out_dir", "save_dir", "logdir", "log_dir", "work_dir", "default_root_dir"),
    "--log wandb": ("wandb", "use_wandb", "log_wandb", "wandb_project", "report_to", "logger"),
    "--log tensorboard": ("tensorboard", "use_tensorboard", "tb"),
    "--resume": ("resume_from", "resume_from_checkpoint", "ckpt_path", "auto_resume"),
}  # fmt: skip
ELSEWHERE = {
    name: ours
    for ours, names in NAMES_ELSEWHERE.items()
    if ours.startswith(("--", "model.settings.")) or ours.partition(" ")[0] in KEYS
    for name in names
}
# A batch of one device is not the global one.
OF_A_RANK = ("per_device_train_batch_size",)
NEAREST = {"adam": "adamw", "nadam": "adamw", "radam": "adamw", "momentum": "sgd"}  # what a rule elsewhere is here
# What nobody has to say here.
FOLLOWS = (
    dict.fromkeys(
        ("num_classes", "n_classes", "nb_classes", "nclasses", "num_labels"),
        "the number of classes follows from the data",
    )
    | dict.fromkeys(
        ("device", "cuda", "use_cuda", "gpu", "accelerator"),
        "GPUs are taken by themselves where there are some, and --ranks says how many",
    )
    | dict.fromkeys(
        ("recipe", "extends", "base", "inherit", "defaults", "_base_"),
        "a recipe holds all of its settings: lockstep recipes copy NAME FILE makes one of NAME to change",
    )
)
# The key of a table that is meant where a text is given for the whole table.
MEANT = {"data": "data.path", "model": "model.name", "optim": "optim.name", "precision": "precision.compute"}


def _simplify(name: str) -> str:
    """A name without its section, in one spelling."""
    return name.rpartition(".")[2].strip("-").replace("-", "_").lower()


def find_elsewhere(name: str, value: object = None) -> str:
    """What a name from another trainer is here, as a recipe writes it; empty for one that nobody uses.

    With the value that was given, where the key takes it, and with an example of one elsewhere.
    """
    name = _simplify(name)
    ours = ELSEWHERE.get(name, "")
    return ours if name in OF_A_RANK or value is None else _carry(ours, value)


def _carry(ours: str, value: object) -> str:
    """A setting or an option, with this value in the place of its example if it takes that."""
    if ours == "--ranks 4" and isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST_RANKS:
        return f"--ranks {value}"
    if ours == "--out RUN" and isinstance(value, str) and _is_short(value):
        return f"--out {shlex.quote(value)}"
    key, _, example = ours.partition(" = ")
    if not example or isinstance(value, dict):
        return ours
    if key.startswith("model.settings."):
        return f"{key} = {show(value)}" if isinstance(value, int | float) and not isinstance(value, bool) else ours
    table, _, name = key.partition(".")
    default = SECTIONS[table].model_fields[name].default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool) and is_number and value in (0, 1):
        value = bool(value)
    elif (
        is_number and example.startswith(QUOTE) and (unit := example.strip(QUOTE).lstrip("0123456789")) in ("ep", "st")
    ):
        value = f"{value}{unit}"
    elif key == "optim.name" and isinstance(value, str):
        value = NEAREST.get(value.lower(), value.lower())
    return f"{key} = {show(value)}" if _takes(table, name, value) else ours


def _is_short(text: str) -> bool:
    return 0 < len(text) < LONGEST_SHOWN and text.isprintable()


def _takes(table: str, name: str, value: object) -> bool:
    """Whether a key takes a value, by itself."""
    if isinstance(value, str) and not _is_short(value):
        return False
    if name == "weights" and not (isinstance(value, str) and any(mark in value for mark in "/.:")):
        return False  # a word such as "imagenet", which is weights elsewhere and no file here
    try:
        SECTIONS[table].model_validate({name: value})
    except ValidationError as invalid:
        return not any(error["loc"][:1] == (name,) for error in invalid.errors())
    except RecursionError:
        return False
    return True


def describe_option(option: str, value: object = None) -> str:
    """The sentence on an option of another trainer, or a setting given as an option; empty for any other."""
    name = option.strip("-").replace("-", "_").lower()
    if name in FOLLOWS:
        return f"There is no option {option}; {FOLLOWS[name]}."
    ours = find_elsewhere(name, value)
    if not ours:
        known = [key for key in KEYS if name in (key, key.rpartition(".")[2]) and "." in key]
        example = f"{known[0]} = {_example(known[0].split('.'))}" if len(known) == 1 else ""
        ours = example if value is None or not example else _carry(example, value)
    if not ours:
        return ""
    return f"There is no option {option}; here it is {_write_override(ours)}."


def describe_no_table(section: str, value: object, *, is_override: bool = False) -> str:
    """The opening of a sentence on a table that is given as one value, with the key that is meant; else empty."""
    key = MEANT.get(section, "")
    if not key or not isinstance(value, str) or not _takes(section, key.rpartition(".")[2], value):
        return ""
    ours = f"{key} = {show(value)}"
    source = "" if is_override or key != "data.path" else ' with data.source = "folder"'
    return f"{section} is a table of keys; here it is {_write_override(ours) if is_override else ours}{source}"


def _write_override(ours: str) -> str:
    """A setting as the command line takes it; an option is one already."""
    key, _, value = ours.partition(" = ")
    # A text needs no quotes there, and what else a shell would take apart gets some.
    given = shlex.quote(f"{key}={value.removeprefix(QUOTE).removesuffix(QUOTE)}")
    source = "--set data.source=folder " if key == "data.path" else ""  # without which no recipe takes a path
    return f"{source}--set {given}" if value else ours


def describe_invalid(invalid: ValidationError, where: str) -> str:
    """One sentence on the first error; a misspelt key comes before whatever else it caused."""
    errors = [error for error in invalid.errors() if error["type"] != "default_factory_not_called"]
    first = min(errors, key=lambda error: error["type"] != "extra_forbidden")
    more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    return f"{_problem(first)} ({where}{more})."


def describe_unknown(key: str, value: object = None, *, is_table: bool = False, is_override: bool = False) -> str:
    """The opening of a sentence about a key that does not exist, with ours of that meaning, or the nearest."""
    name = key.rpartition(".")[2]

    def likeness(known: str) -> float:
        known_name = known.rpartition(".")[2]
        words, known_words = set(name.split("_")), set(known_name.split("_"))
        shared = len(words & known_words) / len(words | known_words)
        return _ratio(key, known) + _ratio(name, known_name) + shared

    if len(key) > LONGEST_SHOWN:
        return f"There is no key {key[:LONGEST_SHOWN]}…"
    if not is_table and (reason := FOLLOWS.get(_simplify(key))):
        return f"There is no key {key}; {reason}"
    if not is_table and (ours := find_elsewhere(key, value)):
        return f"There is no key {key}; here it is {_write_override(ours) if is_override else ours}"
    return f"There is no key {key}; the nearest is {max((*SECTIONS, *KEYS), key=likeness)}"


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _problem(error: ErrorDetails) -> str:
    """What one pydantic error means, in terms of the recipe."""
    kind, location, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "value_error" and len(location) < 2:  # a combination: its validator wrote the whole sentence
        return str(context["error"])
    names = [part for part in location if isinstance(part, str)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if kind == "extra_forbidden":
        return describe_unknown(key, error["input"], is_table=isinstance(error["input"], dict))
    if kind == "model_type" and (meant := describe_no_table(key, error["input"])):
        return meant
    example = _example(names)
    if kind == "missing":
        return f"{key} is missing; give a value such as {example}"
    rule = RULES.get(kind, "something else, such as {example}").format(example=example, **context)
    return f"{key} = {show(error['input'])} must be {rule}"


def _example(names: list[str]) -> str:
    """A right value for a key: its default, or the example of a key that must be given."""
    tables: dict[str, type[Section]] = {**SECTIONS, ImageSize.section: ImageSize}
    model = tables.get(".".join(names[:-1]), RunConfig)
    field = model.model_fields[names[-1]]
    return show(field.examples[0] if field.examples else field.default)
