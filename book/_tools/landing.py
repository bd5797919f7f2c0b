"""Sphinx extension: the landing page, which is the root of the book.

It has no contents on the right, so that kernel and chart fit side by side, and its row
of buttons gets one for the source repository where `_config.yml` names one. The button
of the PDF comes with the PDF (`pdf.py` puts it in the place of `PDF_PLACE`).
"""

CITE = '<a class="reference internal" href="#cite">'
PDF_PLACE = "<!-- the button of the PDF -->"


def buttons(body, repository):
    """The page's HTML with the buttons that depend on the build."""
    source = f'<a class="reference external" href="{repository}">Source</a> '
    return body.replace(CITE, (source if repository else "") + PDF_PLACE + CITE, 1)


def finish(app, pagename, templatename, context, doctree):
    if pagename != app.config.root_doc:
        return
    meta = context.get("meta") or {}
    context["meta"] = meta | {"html_theme.sidebar_secondary.remove": ""}
    repository = app.config.html_theme_options.get("repository_url")
    context["body"] = buttons(context["body"], repository)


def setup(app):
    app.connect("html-page-context", finish, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
