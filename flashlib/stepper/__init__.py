"""Figures that step through what a simulator recorded, on a page without a server.

    show_program(run, title=..., alt=...)               of :mod:`flashlib.machine`
    show_schedule(memory, title=..., alt=...)           of :mod:`flashlib.iomodel`
    show_forward(memory, memory, title=..., alt=...)    two forward passes side by side
    show_pages(pool, title=..., alt=...)                of :mod:`flashlib.paging`

All return a :class:`~flashlib.stepper.frame.Figure`, which a notebook shows as a table
of all steps. On the pages of the book ``static/stepper.js`` turns the table into
buttons, a slider and pictures; in a running notebook ``figure.live()`` does. Standard
library only.
"""

from flashlib.stepper.forward import show_forward
from flashlib.stepper.pages import show_pages
from flashlib.stepper.program import show_program
from flashlib.stepper.schedule import show_schedule

__all__ = ["show_forward", "show_pages", "show_program", "show_schedule"]
