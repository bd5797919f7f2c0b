"""What NumPy allocates while somebody listens.

NumPy asks a handler for the memory of its arrays (NEP 49), so a handler sees every
array, whatever has made it. The one here takes memory from Python's allocator, and
tells of it. It leaves freeing to that allocator: no Python code may run there, since an
exception may be on its way. ``tracemalloc``, which NumPy tells of its arrays, knows
what is alive.
"""

import contextlib
import ctypes
import tracemalloc
import types

import numpy as np

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
# {name of an allocator's function: the types of its arguments after the first}
CALLS = {"malloc": (SIZE,), "calloc": (SIZE, SIZE), "realloc": (POINTER, SIZE)}
SET_HANDLER = 304  # its place in NumPy's table of C functions, which never changes
ARRAYS = [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]
LISTENING = types.SimpleNamespace(tell=None)


class _Allocator(ctypes.Structure):
    """That of Python, and the end of NumPy's handlers."""

    _fields_ = [(name, POINTER) for name in ("context", *CALLS, "free")]


class _Handler(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("allocator", _Allocator),
    ]


def _telling(allocator, name, types):
    """The function of an allocator that tells of the arrays that it makes room for."""
    kind = ctypes.PYFUNCTYPE(POINTER, POINTER, *types)
    function = kind(getattr(allocator, name))

    def call(context, *arguments):
        if LISTENING.tell is not None:
            count = arguments[0] if name == "calloc" else 1
            LISTENING.tell(count * arguments[-1])
        return function(context, *arguments)

    return ctypes.CFUNCTYPE(POINTER, POINTER, *types)(call)


def _handler():
    """The capsule that NumPy wants."""
    python, raw = ctypes.pythonapi, _Allocator()
    python.PyMem_GetAllocator(0, ctypes.byref(raw))
    calls = [_telling(raw, name, types) for name, types in CALLS.items()]
    addresses = (ctypes.cast(call, POINTER) for call in calls)
    own = _Allocator(raw.context, *addresses, raw.free)
    kept = b"mem_handler", _Handler(b"flashlib", 1, own), calls
    python.Py_IncRef(ctypes.py_object(kept))  # arrays may outlive this module
    new = python.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (POINTER, ctypes.c_char_p, POINTER)
    return new(ctypes.addressof(kept[1]), kept[0], None)


def _set_handler():
    """NumPy's function that sets a handler and returns the one before."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = POINTER, (ctypes.py_object, ctypes.c_char_p)
    table = get(np._core.multiarray._ARRAY_API, None)
    functions = ctypes.cast(table, ctypes.POINTER(POINTER))
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    return kind(functions[SET_HANDLER])


HANDLER, SET = _handler(), _set_handler()


def _alive():
    """The bytes of all arrays that NumPy has told of."""
    arrays = tracemalloc.take_snapshot().filter_traces(ARRAYS)
    return sum(trace.size for trace in arrays.traces)


@contextlib.contextmanager
def told(tell=None):
    """Within this context tell(bytes) is called for each new array of NumPy. The value
    of the context is a function: how many bytes of arrays that are new are alive.
    """
    begun = not tracemalloc.is_tracing()
    if begun:
        tracemalloc.start()
    before, known = LISTENING.tell, _alive()
    LISTENING.tell = tell
    handler = SET(HANDLER)
    try:
        yield lambda: _alive() - known
    finally:
        SET(handler)
        LISTENING.tell = before
        if begun:
            tracemalloc.stop()
