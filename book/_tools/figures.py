"""Sphinx extension: of the outputs of a cell with a caption, only pictures and steppers
are figures.

MyST-NB makes a figure of every output of such a cell, also of a table below the
picture, all with the same name and caption.
"""

from contextlib import contextmanager

from docutils import nodes
from myst_nb import sphinx_ as myst
from myst_nb.core.render import create_figure_context


def is_picture(bundle):
    """Whether one of the forms of an output is an image or a figure to step through."""
    forms = bundle.findall(nodes.container)
    return any(
        form.get("mime_type", "").startswith("image/")
        or '<figure class="stepper"' in form.astext()
        for form in forms
    )


@contextmanager
def figure_of_pictures(renderer, options, line):
    """Let MyST-NB render an output, then put it into a figure if it is a picture."""
    place = renderer.current_node
    before = len(place.children)
    yield
    made = place.children[before:]
    if any(map(is_picture, made)):
        del place.children[before:]
        with create_figure_context(renderer, options, line):
            renderer.current_node.extend(made)


def setup(app):
    myst.create_figure_context = figure_of_pictures
    return {"parallel_read_safe": True, "parallel_write_safe": True}
