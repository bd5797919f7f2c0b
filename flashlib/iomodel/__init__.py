"""Where the time goes: a two-level memory that counts words, schedules on it, and the closed forms.

============  ======================================================================================
memory        :class:`TwoLevelMemory`: load, store, allocate, free; counts, peak, trace
schedules     attention as programs on it: materialising, row blocks, Algorithms 1 to 8
formulas      the same counts as formulas; bytes, seconds, GPU data sheets, the roofline
paging        memory for keys and values handed out to requests: stretches, pages, a trace of requests
masks         blocks and pairs that a mask leaves
timeline      one multiprocessor in clocks: copies, products and exponentials, and who waits for whom
============  ======================================================================================

Needs numpy and nothing else.
"""

from flashlib.iomodel.memory import Block, CapacityExceeded, TwoLevelMemory

__all__ = ["Block", "CapacityExceeded", "TwoLevelMemory"]
