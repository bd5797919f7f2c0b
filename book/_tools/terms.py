"""Sphinx extension: each page links a term of the glossary where it first uses it.

Nobody writes these links, so a rewritten page keeps them. Headings, formulas, code,
outputs and links stay as they are. A term that an author links with `{term}` is not
linked again.
"""

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

WITHOUT_LINKS = {
    f"book/{page}"
    for page in ("index", "glossary", "bibliography", "how-to-run", "teaching")
}
# Words that a page uses in another sense.
OTHER_SENSE = {"book/machine": {"block"}, "book/online": {"producer", "consumer"}}
CLOSED = (nodes.reference, pending_xref, nodes.literal, nodes.math, nodes.raw)


def finder(terms):
    """A regex for these terms and their plurals, but not for those in the name of a
    file; only abbreviations mind the case.
    """
    longest_first = sorted(terms, key=len, reverse=True)
    ways = [re.escape(w) if w != w.lower() else f"(?i:{w})" for w in longest_first]
    return re.compile(rf"(?<![\w-])({'|'.join(ways)})(?:e?s)?(?![\w-]|\.\w)")


def texts(document):
    """The pieces of running text in which a link may be put, in order."""
    for paragraph in document.findall(nodes.paragraph):
        for text in list(paragraph.findall(nodes.Text)):
            above = text.parent
            while above is not paragraph and not isinstance(above, CLOSED):
                above = above.parent
            if above is paragraph:
                yield text


class FirstUse(SphinxPostTransform):
    """Put references to the glossary into the text of a page."""

    default_priority = 6  # while links by `{term}` are still to be seen

    def run(self, **kwargs):
        objects = self.env.get_domain("std").objects
        terms = {name: at for (kind, name), at in objects.items() if kind == "term"}
        if self.env.docname in WITHOUT_LINKS or not terms:
            return
        left = {name.lower(): at for name, at in terms.items()}
        for name in OTHER_SENSE.get(self.env.docname, ()):
            del left[name]
        for link in self.document.findall(pending_xref):
            if link["reftype"] == "term":
                left.pop(link["reftarget"].lower(), None)
        find = finder(terms)
        for text in list(texts(self.document)):
            parts, end = [], 0
            for match in find.finditer(text):
                at = left.pop(match[1].lower(), None)
                if at:
                    parts.append(nodes.Text(text[end : match.start()]))
                    parts.append(self.link(match[0], *at))
                    end = match.end()
            if parts:
                text.parent.replace(text, [*parts, nodes.Text(text[end:])])

    def link(self, word, page, place):
        inside = nodes.inline(word, word, classes=["std-term"])
        return make_refnode(self.app.builder, self.env.docname, page, place, inside)


def setup(app):
    app.add_post_transform(FirstUse)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
