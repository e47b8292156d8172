"""Device profiles that come with the package: measured ones as files, derived ones made anew from them. Torch-free."""

from functools import lru_cache
from importlib import resources
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_small
from lockstep.plan.derive import MEASURED_ON, RATES, STAND_IN, derive_published
from lockstep.plan.device import DeviceProfile, from_json

FOLDER = "profiles"
MAX_BYTES = 16 << 20  # far beyond any profile


def list_shipped() -> tuple[tuple[str, str], ...]:
    """Device and model of each, in alphabetical order: the names that `read_shipped` takes."""
    measured = _list_measured()
    models = [model for device, model in measured if device == MEASURED_ON]
    if (MEASURED_ON, STAND_IN) not in measured:
        return tuple(sorted(measured))
    devices = {device for device, _ in RATES}
    return tuple(sorted(measured | {(device, model) for device in devices for model in models}))


@lru_cache(maxsize=32)
def read_shipped(device: str, model: str) -> DeviceProfile:
    """One of them; a name that there is not is a sentence."""
    wanted = device.lower(), model.lower()
    if wanted not in list_shipped():
        known = ", ".join(" ".join(names) for names in list_shipped()) or "none"
        raise LockstepError(f"There is no profile of {device} with {model}: there are {known}.")
    if wanted in _list_measured():
        file = resources.files("lockstep.plan").joinpath(FOLDER, "-".join(wanted) + ".json")
        return from_json(file.read_text(encoding="utf-8"))
    return derive_published(*wanted, read_shipped(MEASURED_ON, wanted[1]), read_shipped(MEASURED_ON, STAND_IN))


def read_file(path: Path) -> DeviceProfile:
    """One that `lockstep profile` wrote."""
    try:
        text = read_small(path, MAX_BYTES).decode()
    except FileNotFoundError:
        raise LockstepError(f"There is no device profile {path}; measure one with `lockstep profile`.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LockstepError(f"The device profile {path} cannot be read ({reason}).") from None
    return from_json(text)


def _list_measured() -> set[tuple[str, str]]:
    folder = resources.files("lockstep.plan").joinpath(FOLDER)
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    pairs = (name.removesuffix(".json").split("-") for name in names if name.endswith(".json"))
    return {(pair[0], pair[1]) for pair in pairs if len(pair) == 2}
