"""Triton's interpreter, under which kernels run on a CPU."""

from typing import Any

from lockstep.kernels import has_triton


def mend_interpreter() -> None:
    """Let kernels count in Triton 3.6, which takes an array of one element for a number; NumPy no longer does."""
    if not has_triton():
        return
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_too(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    interpreter._patch_lang_tensor = patch_too
