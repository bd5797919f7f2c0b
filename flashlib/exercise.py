"""What the assignments' visible tests and the grader share: :func:`assert_agrees` and :func:`bounds_checked`.

Students receive this module. It imports PyTorch, and Triton only where bounds are checked.
"""

import contextlib

import torch

FACTOR = 10
DRAWS = 8
# How Triton's interpreter reaches memory: {its method: (what it is, place of the pointers, of the mask)}.
ACCESSES = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic operation", 1, 3),
    "create_atomic_cas": ("atomic operation", 0, None),
}


def assert_agrees(name, found, formula, *inputs):
    """Judge a tensor against a formula in PyTorch, row by row (last dimension), by what the formula itself is
    off by in the same precision.

    formula(*inputs) is evaluated with floating-point tensors of ``inputs`` as they are, which gives PyTorch's
    own error, and in float64, where 8 further times every number of the inputs is moved by at most one
    rounding: who computes in another order, or with powers of two, is off by as much. A row of ``found`` may
    be off by ten times the largest of these errors, of this row or of the typical row, plus one rounding of
    the row's size. A mistake is off by thousands of times as much.

    Raises AssertionError with a text for the student: not a tensor, shape, dtype, not finite, too far off.
    """

    generator = torch.Generator().manual_seed(0)

    def in_float64(x, moved=False):
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            return x
        by = (2 * torch.rand(x.shape, dtype=torch.float64, generator=generator) - 1).to(x.device)
        return x.double() * (1 + moved * torch.finfo(x.dtype).eps * by)

    plain, exact = formula(*inputs), formula(*map(in_float64, inputs))
    if not isinstance(found, torch.Tensor):
        raise AssertionError(f"{name} must be a tensor, got {type(found).__name__}")
    if found.shape != plain.shape:
        raise AssertionError(f"{name} must have the shape {tuple(plain.shape)}, got {tuple(found.shape)}")
    if found.dtype != plain.dtype:
        raise AssertionError(f"{name} must be {plain.dtype}, got {found.dtype}")
    if found.numel() == 0:
        return
    if exact.ndim == 0:
        found, plain, exact = found[None], plain[None], exact[None]
    wrong = ~(found.isfinite() & exact.isfinite()) & ~(found.double() == exact)
    if wrong.any():
        place = tuple(int(i) for i in wrong.nonzero()[0])
        wanted = "a finite number" if exact[place].isfinite() else exact[place].item()
        raise AssertionError(f"{name} is {found[place].item()} at {place}, expected {wanted} there")

    def size(x):
        return torch.where(exact.isfinite(), x.double(), 0.0).square().mean(dim=-1).sqrt()

    off, own = size(found.double() - exact), size(plain.double() - exact)
    for _ in range(DRAWS):
        moved = formula(*(in_float64(x, moved=True) for x in inputs)).reshape(exact.shape)
        own = torch.maximum(own, size(moved - exact))
    budget = FACTOR * own.clamp(min=own.median().item()) + torch.finfo(found.dtype).eps * size(exact)
    if not (off <= budget).all():
        rows = (~(off <= budget)).nonzero()
        place = tuple(int(i) for i in rows[0])
        raise AssertionError(
            f"{name} is wrong in {len(rows)} of {off.numel()} rows, first in row {place}: its error is "
            f"{off[place].item():.2g} (root mean square), rounding explains {budget[place].item():.2g}"
        )


@contextlib.contextmanager
def bounds_checked():
    """Within this context every load, store and atomic operation of a kernel must fall into a tensor that the
    kernel was given.

    An access outside raises an error that names the nearest argument and how far off it is, where Triton's
    interpreter would read or overwrite whatever lies there. On a GPU, where kernels are compiled, this
    context checks nothing; ``compute-sanitizer`` does there.
    """
    from flashlib import kernels

    if not kernels.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    make_arguments = executor._init_args_hst
    extents = []

    def arguments(self, args, kwargs):
        made = make_arguments(self, args, kwargs)
        extents[:] = [
            (name, x.data_ptr(), _last_byte(x), x.element_size())
            for name, x in [*zip(self.arg_names, made[0], strict=False), *made[1].items()]
            if isinstance(x, torch.Tensor)
        ]
        return made

    def checked(access, what, pointers, mask):
        def call(*args, **kwargs):
            used = args[pointers].data.reshape(-1).astype("int64")
            if mask is not None:
                used = used[args[mask].data.reshape(-1).astype(bool)]
            _require_inside(what, used, extents)
            return access(*args, **kwargs)

        return call

    plain = {name: getattr(builder, name) for name in ACCESSES}
    for name, access in plain.items():
        setattr(builder, name, checked(access, *ACCESSES[name]))
    executor._init_args_hst = arguments
    try:
        yield
    finally:
        for name, access in plain.items():
            setattr(builder, name, access)
        executor._init_args_hst = make_arguments


def _last_byte(x):
    """The address after the last element of a view."""
    if x.numel() == 0:
        return x.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (steps + 1) * x.element_size()


def _require_inside(what, used, extents):
    """Raise IndexError unless every one of the addresses lies in one of the extents."""
    inside = used < 0
    for _, first, end, _ in extents:
        inside |= (used >= first) & (used < end)
    if inside.all():
        return
    address = int(used[~inside][0])
    name, first, end, size = min(extents, key=lambda e: max(e[1] - address, address - e[2] + 1))
    elements = (end - first) // size
    raise IndexError(
        f"{what} out of range: element {(address - first) // size} of {name}, which has elements 0 to "
        f"{elements - 1} (a mask is missing, or wrong)"
    )
