"""Sphinx extension: the search finds words of the glossary, and numbers.

It adds them ("Equation 6.1") to the titles in Sphinx's search index, which has words of
the glossary in lower case and exercises without their numbers. `_static/search.js`
ranks what is found.
"""

import re

TITLES = (
    (r'<dt id="(term-[^"]+)">([^<]+)', "{}"),
    (r'id="([^"]+)">\s*<span class="eqno">\(([^)<]+)\)', "Equation {}"),
    (r'<figure[^>]*id="([^"]+)"(?:(?!</figure>).)*?"caption-number">Fig\. ([^< ]+)',
     "Figure {}"),
    (r'id="([a-z0-9-]+)">\s*<p class="admonition-title">'
     r'<span class="caption-number">([^<]+)</span>([^<]*)', "{}{}"),
)  # fmt: skip


def titles(body):
    """The (title, id) pairs of what else can be found in the HTML of a page."""
    for regex, title in TITLES:
        for place, *parts in re.findall(regex, body, re.DOTALL):
            yield title.format(*parts), place


def note(app, pagename, templatename, context, doctree):
    """Keep a page's additional titles, and load the ranking where it is needed."""
    if pagename == "search":
        app.add_js_file("search.js", loading_method="defer")
    elif doctree:
        found = [(re.sub(r"\s+", " ", t), at) for t, at in titles(context["body"])]
        app.search_titles[pagename] = found


def extend_index(app):
    """Put them into the index, and take out the titles of solutions."""
    for page, found in app.search_titles.items():
        known = app.builder.indexer._all_titles.get(page, [])
        doubled = {place for _, place in found}
        known[:] = found + [
            (title, place)
            for title, place in known
            if place not in doubled and "-solution-" not in (place or "")
        ]
    return []


def setup(app):
    app.search_titles = {}
    app.connect("html-page-context", note, priority=950)
    app.connect("html-collect-pages", extend_index)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
