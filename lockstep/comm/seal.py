"""Marks on what ranks leave in the store, so that a stranger's values are as if they had not come. Torch-free.

A mark says whose value it is and under which key, not when it was written: a stranger can put an old one back, and
whoever reads values that change has to tell by what they say (`pulse.py` counts).

The launcher hands a secret out in the environment. Where ranks were started without one there is no mark, and whoever
reaches the store is believed: then the network has to be trusted.
"""

import hmac
import os
import secrets
from collections.abc import Mapping

SECRET = "LOCKSTEP_SECRET"
MAX_BYTES = 4096  # of a sealed value; more is not ours
NO_MARK = b"-"


class Seal:
    """Signs values with the run's secret and believes only what it could have signed."""

    def __init__(self, secret: str = "") -> None:
        self._secret = os.fsencode(secret)  # of any bytes

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Seal":
        """With the secret that the launcher handed out, if any."""
        return cls(environment.get(SECRET, ""))

    def close(self, key: str, text: str) -> bytes:
        """`text`, to be kept under `key` and nowhere else."""
        return self._mark(key, text.encode()) + b" " + text.encode()

    def open(self, key: str, data: bytes) -> str | None:
        """The text that was sealed for `key`; None for anything else."""
        if len(data) > MAX_BYTES:
            return None
        mark, _, text = data.partition(b" ")
        if not hmac.compare_digest(mark, self._mark(key, text)):
            return None
        try:
            return text.decode("ascii")
        except UnicodeDecodeError:
            return None

    def _mark(self, key: str, text: bytes) -> bytes:
        if not self._secret:
            return NO_MARK
        return hmac.new(self._secret, key.encode() + b"\0" + text, "sha256").hexdigest().encode()


def make_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)
