"""What NumPy allocates while somebody listens.

NumPy asks a handler for the memory of its arrays (NEP 49). The one here takes it from the
C library, and tells of it. Only a handler sees every array, whatever has made it.
"""

import contextlib
import ctypes

import numpy as np

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
# {function of the C library: the types of its arguments}
CALLS = {"malloc": (SIZE,), "calloc": (SIZE, SIZE), "realloc": (POINTER, SIZE)}
FREE = ctypes.CDLL(None).free
FREE.restype, FREE.argtypes = None, (POINTER,)
SET_HANDLER = 304  # its place in NumPy's table of C functions, which never changes


class _Functions(ctypes.Structure):
    _fields_ = [(name, POINTER) for name in ("context", *CALLS, "free")]


class _Handler(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("functions", _Functions),
    ]


class _Heap:
    """``tell`` is called with the bytes of a new array and those of all arrays that have
    been made since ``tell`` was set and are alive.
    """

    def __init__(self):
        self.tell, self.sizes, self.alive = None, {}, 0

    def take(self, place, size):
        if self.tell is not None and place:
            self.sizes[place] = size
            self.alive += size
            self.tell(size, self.alive)
        return place

    def drop(self, place):
        self.alive -= self.sizes.pop(place, 0)


HEAP = _Heap()


def _taking(name, types):
    function = getattr(ctypes.CDLL(None), name)
    function.restype, function.argtypes = POINTER, types

    def call(context, *arguments):
        if name == "realloc":
            HEAP.drop(arguments[0])
        size = arguments[-1] * (arguments[0] if name == "calloc" else 1)
        return HEAP.take(function(*arguments), size)

    return ctypes.CFUNCTYPE(POINTER, POINTER, *types)(call)


def _free(context, place, size):
    HEAP.drop(place)
    FREE(place)


def _handler():
    """The capsule that NumPy wants, and what must live as long as any array."""
    calls = [_taking(name, types) for name, types in CALLS.items()]
    calls.append(ctypes.CFUNCTYPE(None, POINTER, POINTER, SIZE)(_free))
    addresses = (ctypes.cast(call, POINTER) for call in calls)
    handler = _Handler(b"flashlib", 1, _Functions(None, *addresses))
    kept = b"mem_handler", handler, calls
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # arrays may outlive this module
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (POINTER, ctypes.c_char_p, POINTER)
    return new(ctypes.addressof(handler), kept[0], None), kept


def _set_handler():
    """NumPy's function that sets a handler and returns the one before."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = POINTER, (ctypes.py_object, ctypes.c_char_p)
    table = get(np._core.multiarray._ARRAY_API, None)
    functions = ctypes.cast(table, ctypes.POINTER(POINTER))
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
    return kind(functions[SET_HANDLER])


HANDLER, KEPT = _handler()
SET = _set_handler()


@contextlib.contextmanager
def told(tell):
    """Within this context tell(bytes of a new array, bytes of all new ones) is called."""
    before = HEAP.tell, HEAP.sizes, HEAP.alive
    HEAP.tell, HEAP.sizes, HEAP.alive = tell, {}, 0
    handler = SET(HANDLER)
    try:
        yield
    finally:
        SET(handler)
        HEAP.tell, HEAP.sizes, HEAP.alive = before
