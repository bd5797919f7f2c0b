"""A faster interpreter of Triton, for tests, which computes the same. Triton's own

- patches the language anew in every call of a device function, which takes up to half
  of a kernel's time; one that the launch has patched stays as it is here;
- computes for every sum and product of whole numbers, in several operations, whether it
  overflows, and then drops the answer, as long as it is not debugging;
- makes the table of NumPy's dtypes, and the shape and the type of a tensor, whenever it
  needs one.
"""

import dataclasses
import functools
from types import SimpleNamespace

from flashlib.kernels import INTERPRETED, tl


def patch_once(fn):
    """As Triton's function: patch what a jit function sees of the language."""
    seen = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
    if any(tl.core.is_builtin(language.load) for language in seen):
        return patch(fn)
    return SimpleNamespace(restore=lambda: None)


def dtype_once(kind):
    """As Triton's function: NumPy's dtype for a type of the language."""
    scalar = kind.scalar
    return dtype_of(kind) if scalar.is_ptr() else known_dtype(scalar)


def tensor_once(self, handle, kind):
    """As Triton's ``tensor.__init__``, with the shape of an earlier tensor."""
    sizes = tuple(kind.shape.values) if kind.is_block() else ()
    if sizes not in SHAPES:
        tensor(self, handle, kind)
        SHAPES[sizes] = self.numel, self.shape
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = SHAPES[sizes]


def block_once(self, scalar):
    """As Triton's ``block_type.with_element_ty``, with an earlier type of a block."""
    key = *self.shape.values, scalar.name
    if scalar.is_ptr() or key not in BLOCKS:
        BLOCKS[key] = block(self, scalar)
    return BLOCKS[key]


SHAPES, BLOCKS = {}, {}

if INTERPRETED:  # flashlib.kernels has chosen it, so Triton is imported after that
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    known_dtype, tensor = functools.cache(dtype_of), tl.tensor.__init__
    block, tl.block_type.with_element_ty = tl.block_type.with_element_ty, block_once
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = dtype_once
    tl.tensor.__init__ = tensor_once
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        no_answer = {"sanitize_overflow": False}
        builder.options = dataclasses.replace(builder.options, **no_answer)
