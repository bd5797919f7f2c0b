"""A faster interpreter of Triton, for tests. Its own patches the language anew in every
call of a device function, which takes up to half of a kernel's time; one that the
launch has patched stays as it is here.
"""

from types import SimpleNamespace

from flashlib.kernels import INTERPRETED, tl


def patch_once(fn):
    """As Triton's function: patch what a jit function sees of the language."""
    seen = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
    if any(tl.core.is_builtin(language.load) for language in seen):
        return patch(fn)
    return SimpleNamespace(restore=lambda: None)


if INTERPRETED:  # flashlib.kernels has chosen it, so Triton is imported after that
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    interpreter._patch_lang = patch_once
