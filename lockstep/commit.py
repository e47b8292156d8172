"""Which commit this is, for what outlives it: a run's records, a table of faults. Torch-free."""

import subprocess
from pathlib import Path

GIT_S = 5.0  # a repository on a slow disk is not worth more


def read_commit() -> str:
    """The commit of the checkout that this package lies in; empty for one that is installed."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():  # else git would tell of whatever repository an environment lies in
        return ""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
