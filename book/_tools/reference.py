"""Sphinx extension: in docstrings, labels of equations and algorithms are links.

``(``eq-standard-attention``)`` becomes the number of the equation, as on other pages.
"""

import re

GROUP = r"\((``(?:eq|alg)-[\w-]+``(?:,\s+``(?:eq|alg)-[\w-]+``)*)\)"
ROLES = {"eq": "eq", "alg": "prf:ref"}


def linked(text):
    """A docstring with roles in place of labels, and no brackets around them."""
    text = re.sub(GROUP, r"\1", text)
    return re.sub(r"``((eq|alg)-[\w-]+)``", lambda m: f":{ROLES[m[2]]}:`{m[1]}`", text)


def link_labels(app, what, name, thing, options, lines):
    lines[:] = linked("\n".join(lines)).split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", link_labels)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
