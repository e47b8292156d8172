"""Hand-written GPU code in Triton, each kernel beside its plain version; Triton itself is optional."""

from importlib.util import find_spec


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return find_spec("triton") is not None
