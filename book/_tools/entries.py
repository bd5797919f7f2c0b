"""Sphinx extension: a table with the class `entries` can be sorted and filtered.

A page with such a table loads `_static/entries.js` and has no contents on the right, so
that six columns fit. Without the script the whole table is shown.
"""

from docutils import nodes


def widen(app, pagename, templatename, context, doctree):
    """Load the script and drop the sidebar on a page that has such a table."""
    tables = doctree.findall(nodes.table) if doctree else ()
    if any("entries" in table["classes"] for table in tables):
        app.add_js_file("entries.js", defer="defer")
        context["meta"] = (context["meta"] or {}) | {
            "html_theme.sidebar_secondary.remove": True
        }


def setup(app):
    app.add_css_file("entries.css")
    app.connect("html-page-context", widen, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
