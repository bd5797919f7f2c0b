"""Figures that step through what a simulator recorded, on a page without a server.

    show_program(run, title=..., alt=...)
    show_schedule(memory, title=..., alt=...)
    show_forward(memory, memory, title=..., alt=...)
    show_pages(pool, title=..., alt=...)

``show_program`` shows a program of :mod:`flashlib.machine`: its lines, registers, memory
and counts. ``show_schedule`` shows a schedule of :mod:`flashlib.iomodel`: the blocks in
fast memory, what moves, the words so far. ``show_forward`` shows two forward passes side
by side: their tiles in order, what each step reads and writes, and m, l and O of every
query. ``show_pages`` shows the pages of a cache for keys and values: which sequence
holds which page, what is shared and what is copied.

All return a :class:`~flashlib.stepper.frame.Figure`, which a notebook shows as a table
of all steps. The pages of the book load ``static/stepper.js`` and
``static/stepper.css``, which turn the table into buttons, a slider and pictures. In a
running notebook ``figure.live()`` does the same. The package needs the standard library
only.
"""

from flashlib.stepper.forward import show_forward
from flashlib.stepper.pages import show_pages
from flashlib.stepper.program import show_program
from flashlib.stepper.schedule import show_schedule

__all__ = ["show_forward", "show_pages", "show_program", "show_schedule"]
