"""Figures to step through: what a simulator recorded, one step at a time, on a page without a server.

    show_program(run, title=..., alt=...)
    show_schedule(memory, closed_form_words=..., title=..., alt=...)
    show_forward(memory, memory, title=..., alt=...)
    show_pages(pool, title=..., alt=...)

The first shows a program of :mod:`flashlib.machine`: its lines, registers, memory, counts. The second shows a
schedule of :mod:`flashlib.iomodel`: the blocks in fast memory, what moves, the words so far. The third shows
two forward passes beside each other, schedules or kernels: the tiles in their order, what each step reads and
writes, m, l and O of every query. The fourth shows the pages of a cache for keys and values: which sequence
holds which, what is shared and copied.
All return a :class:`~flashlib.stepper.frame.Figure`, which a notebook shows as a table of all steps. In the
book, whose pages load ``static/stepper.js`` and ``static/stepper.css``, the table becomes buttons, a slider
and pictures; in a running notebook ``figure.live()`` does the same.

============  ======================================================================================
frame         the figure itself: its data, its table, what every kind of panel shows
program       programs of the register machine
schedule      schedules on the two-level memory
forward       two forward passes of one problem, such as FlashAttention and FlashAttention-2
pages         sequences in a pool of pages
static/       the script and the style sheet that the book's pages load
============  ======================================================================================

Needs the standard library and nothing else.
"""

from flashlib.stepper.forward import show_forward
from flashlib.stepper.pages import show_pages
from flashlib.stepper.program import show_program
from flashlib.stepper.schedule import show_schedule

__all__ = ["show_forward", "show_pages", "show_program", "show_schedule"]
