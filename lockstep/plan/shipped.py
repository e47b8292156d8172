"""Device profiles that come with the package: measured ones as files, derived ones as rows. Torch-free."""

from importlib import resources

from lockstep.errors import LockstepError
from lockstep.plan.device import DeviceProfile, from_json

FOLDER = "profiles"


def list_shipped() -> tuple[tuple[str, str], ...]:
    """Device and model of each, in alphabetical order: the names that `read_shipped` takes."""
    return tuple(sorted(_list_measured()))


def read_shipped(device: str, model: str) -> DeviceProfile:
    """One of them; a name that there is not is a sentence."""
    wanted = device.lower(), model.lower()
    if wanted in _list_measured():
        file = resources.files("lockstep.plan").joinpath(FOLDER, "-".join(wanted) + ".json")
        return from_json(file.read_text(encoding="utf-8"))
    known = ", ".join(" ".join(names) for names in list_shipped()) or "none"
    raise LockstepError(f"There is no profile of {device} with {model}: there are {known}.")


def _list_measured() -> set[tuple[str, str]]:
    folder = resources.files("lockstep.plan").joinpath(FOLDER)
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    pairs = (name.removesuffix(".json").split("-") for name in names if name.endswith(".json"))
    return {(pair[0], pair[1]) for pair in pairs if len(pair) == 2}
