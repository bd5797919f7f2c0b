"""Where the time goes: a two-level memory that counts words, attention as schedules on
it, and data sheets.

memory       :class:`TwoLevelMemory`: load, store, allocate, free; counts, peak, trace
forms        closed forms, and the shapes of arrays
schedule     the decorator that makes a schedule and attaches its closed forms
roofline     data sheets of GPUs, and the seconds that words and operations take
standard, blocks, flash1, flash2, backward, projections
             a file for each step: its schedules, and the bytes that its kernels move
ring         words between GPUs
masks        the blocks and pairs that a mask leaves
hopper       the clocks of the forward pass on one multiprocessor

Needs numpy and, for ``hopper``, :mod:`flashlib.timeline`.
"""

from .memory import Block, CapacityExceeded, TwoLevelMemory

__all__ = ["Block", "CapacityExceeded", "TwoLevelMemory"]
