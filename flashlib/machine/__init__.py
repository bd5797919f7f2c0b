"""The toy register machine of the chapter *A machine with three registers*, written
with the standard library only.

==============  ====================================================================
``isa``         the instructions, frozen records: LOAD, STORE, MAC_Z, MAC, MAX, ...
``assembler``   text to program and back: ``LOAD a[0][0], R0``
``machine``     runs a program on numbers, counts cycles and keeps the trace
``programs``    matrix products by inner and outer products, safe and online softmax,
                Welford's variance
``exercises``   the exercises that ask for a program, and their judge
``search``      the proven minimum number of cycles of a small matrix product
==============  ====================================================================
"""

from .assembler import assemble, disassemble
from .machine import Machine, cells

__all__ = ["Machine", "assemble", "cells", "disassemble"]
