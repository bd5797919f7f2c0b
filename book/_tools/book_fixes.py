"""Sphinx extension: what Jupyter Book 1 lacks for this book.

- `[the scores](eq-standard-scores)` becomes a link that reads "the scores (1.2)".
- The file name below code of the library is a link to the repository.
- Repository, edit, issue and Colab buttons appear only where `repository: url:` in
  `_config.yml` is set, preview tags only where `baseurl:` is.
- The address of that repository replaces ADDRESS in the sources of pages.
- Pages load no thebe, whose script declares a constant twice, an error on every page.
- Bibliographies use roles that screen readers know, and an empty corner of a table is
  not a heading.
- The sidebar's arrows have a name for screen readers.
- The bodies of exercises, solutions and proofs lose the ids that they all share.
"""

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

# The line that `notebook.show` writes below code of the library.
SHOWN_FILE = (
    r'<p>(<code[^>]*><span class="pre">(flashlib/[\w/]+\.py)</span></code>)</p>'
)


# What a page writes where the address of the repository belongs.
ADDRESS = "<address of the repository>"


class EquationLinks(SphinxPostTransform):
    """Resolve Markdown links whose target is an equation label, keeping their text.

    Runs before MyST's own resolver, which would replace the text by the number.
    """

    default_priority = 5

    def run(self, **kwargs):
        math = self.env.get_domain("math")
        for link in list(self.document.findall(pending_xref)):
            label = link["reftarget"]
            if link["reftype"] != "myst" or label not in math.equations:
                continue
            builder, page = self.app.builder, self.env.docname
            equation = math.resolve_xref(
                self.env, page, builder, "eq", label, link, nodes.inline()
            )
            number = equation.astext()
            words = link.children[0].children if link.children else []
            equation.clear()
            equation.extend(words)
            equation += nodes.Text(f"\N{NO-BREAK SPACE}{number}" if words else number)
            link.replace_self(equation)


class UniqueIds(SphinxPostTransform):
    """Remove the ids that sphinx-exercise and sphinx-proof give to every body."""

    default_priority = 900

    def run(self, **kwargs):
        for section in self.document.findall(nodes.section):
            shared = [place for place in section["ids"] if place.endswith("-content")]
            if shared and not isinstance(section.parent, nodes.section):
                section["ids"] = []


def switch_buttons(app, config):
    """Show the buttons that need a repository where there is one."""
    theme = config.html_theme_options
    repository = theme.get("repository_url") or ""
    for button in ("repository", "edit_page", "issues"):
        theme[f"use_{button}_button"] = bool(repository)
    launch = theme.setdefault("launch_buttons", {})
    if not repository:
        launch.clear()
    elif "github.com/" not in repository:
        launch["colab_url"] = ""  # Colab opens notebooks from GitHub only
    config.ogp_site_url = config.html_baseurl


def name_repository(app, pagename, source):
    """Write the repository's address into a page, where there is one."""
    if repository := app.config.html_theme_options.get("repository_url"):
        source[0] = source[0].replace(ADDRESS, repository)


def clean_page(app, pagename, templatename, context, doctree):
    """Mend preview tags, roles and table heads of one page."""
    if not app.config.html_baseurl:
        preview = r'<meta property="og:[^>]*>\s*'
        context["metatags"] = re.sub(preview, "", context.get("metatags", ""))
    body = context.get("body") or ""
    body = body.replace(
        '<div role="list" class="citation-list">', '<div class="citation-list">'
    )
    body = body.replace(' role="doc-biblioentry"', "")
    body = re.sub(r"<th\b[^>]*>\s*(<p></p>)?\s*</th>", "<td></td>", body)
    theme = app.config.html_theme_options
    if repository := theme.get("repository_url"):
        tree = f"{repository}/blob/{theme['repository_branch']}"
        link = rf'<p><a href="{tree}/\2">\1</a></p>'
        body = re.sub(SHOWN_FILE, link, body)
    context["body"] = body
    contents = context["generate_toctree_html"]
    arrow = '<summary aria-label="Pages below">'
    context["generate_toctree_html"] = lambda *args, **options: str(
        contents(*args, **options)
    ).replace("<summary>", arrow)


def without_thebe(app):
    """Disconnect sphinx-thebe, which Jupyter Book always loads."""
    for listeners in app.events.listeners.values():
        listeners[:] = [
            item for item in listeners if "sphinx_thebe" not in item.handler.__module__
        ]
    files = app.registry.css_files
    files[:] = [file for file in files if file[0] != "sphinx-thebe.css"]


def setup(app):
    without_thebe(app)
    app.setup_extension("sphinxext.opengraph")
    app.add_post_transform(EquationLinks)
    app.add_post_transform(UniqueIds)
    app.connect("config-inited", switch_buttons)
    app.connect("source-read", name_repository)
    app.connect("html-page-context", clean_page, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
