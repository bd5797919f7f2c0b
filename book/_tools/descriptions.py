"""Sphinx extension: the description of a page, which search engines and previews show.

It is the page's first prose in whole sentences, without those that contain a formula.
A page that gives its own (`html_meta` with `description`) keeps it.
"""

import html
import re

from docutils import nodes

SHORT, LONG = 60, 160  # characters; result lists cut off what is longer


def plain(paragraph):
    """The text of a paragraph; a formula that has no plain form becomes "\\0"."""
    words = []
    for part in paragraph.children:
        text = re.sub(r"\s+", " ", part.astext())
        if isinstance(part, nodes.math):
            text = text.replace(r"\times", "×")
            text = "\0" if re.search(r"[\\_^{}]", text) else text
        words.append(text)
    return "".join(words)


def sentences(doctree):
    """The sentences of a page's running text, in order."""
    for paragraph in doctree.findall(nodes.paragraph):
        if not isinstance(paragraph.parent, (nodes.section, nodes.document)):
            continue
        first = next((part for part in paragraph.children if part.astext()), None)
        if isinstance(first, nodes.emphasis):  # minutes and prerequisites
            continue
        text = plain(paragraph)
        if isinstance(first, nodes.strong):  # "The question."
            text = text.removeprefix(first.astext())
        yield from re.split(r"(?<=[.?!]) (?=[A-Z])", text.strip())


def describe(doctree):
    """One or more whole sentences from the start of a page, "" where it has none."""
    text = ""
    for sentence in sentences(doctree):
        whole = "\0" not in sentence and sentence.endswith((".", "?", "!"))
        longer = f"{text} {sentence}".strip() if whole else text
        if len(text) >= SHORT and (not whole or len(longer) > LONG):
            break
        text = longer
    if len(text) > LONG:
        text = text[: LONG - 1].rsplit(" ", 1)[0] + "…"
    return text


def add_description(app, pagename, templatename, context, doctree):
    """Add the tag, and override what sphinxext-opengraph makes of the page."""
    text = describe(doctree) if doctree else ""
    if not text or 'name="description"' in context["metatags"]:
        return
    tag = f'<meta name="description" content="{html.escape(text)}" />\n'
    context["metatags"] += tag
    context["meta"] = {**(context["meta"] or {}), "og:description": html.escape(text)}


def setup(app):
    app.connect("html-page-context", add_description, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
