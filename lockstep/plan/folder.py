"""A plan and its profile in a folder: `plan.toml` and `profile.json`, written aside and renamed. Torch-free."""

from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import clear_leftovers, write_whole
from lockstep.layout import Layout
from lockstep.plan import plan as plans
from lockstep.plan import profile as profiles
from lockstep.plan.plan import Plan
from lockstep.plan.profile import Profile

PLAN_FILE, PROFILE_FILE = "plan.toml", "profile.json"
STALE_S = 3600.0  # after which nobody is still writing; the user's cache is shared by many runs
MAX_BYTES = 16 * 2**20  # more than any network's profile; a file beyond it was not written by us


def write_plan(folder: Path, plan: Plan, profile: Profile) -> None:
    """Leave both for people and for later runs."""
    for name, text in ((PROFILE_FILE, profiles.to_json(profile)), (PLAN_FILE, plans.to_toml(plan))):
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(path.parent, STALE_S)
        write_whole(path, text)
    except OSError as error:
        raise LockstepError(
            f"The plan cannot be written to {path} ({error.strerror}); set LOCKSTEP_CACHE to another folder."
        ) from error


def read_plan(folder: Path, layout: Layout, num_ranks: int) -> tuple[Plan, Profile] | None:
    """What a run left; None when there is nothing, or nothing that fits this layout and these ranks."""
    try:
        profile = profiles.from_json(_read(folder / PROFILE_FILE))
        return plans.from_toml(_read(folder / PLAN_FILE), layout, num_ranks), profile
    except LockstepError:
        return None


def read_profile(folder: Path) -> Profile | None:
    """The profile in a folder; None when there is none, or none that can be read."""
    try:
        return profiles.from_json(_read(folder / PROFILE_FILE))
    except LockstepError:
        return None


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise LockstepError(f"{path} is no file of a plan.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockstepError(f"{path} cannot be read: {error}.") from None
