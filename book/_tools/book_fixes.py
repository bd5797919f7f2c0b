"""Sphinx extension: what Jupyter Book 1 lacks for this book.

- `[the scores](eq-standard-scores)` becomes a link that reads "the scores (1.2)".
- Repository, edit, issue and Colab buttons appear only when `repository: url:` in `_config.yml` is set.
- Pages carry no script of thebe (it declares the same constant twice, an error on every page), and no preview
  tags as long as `baseurl:` in `_config.yml` is empty.
- Bibliographies use roles that screen readers understand, and an empty corner of a table is no heading.
"""

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform


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
            equation = math.resolve_xref(
                self.env, self.env.docname, self.app.builder, "eq", label, link, nodes.inline()
            )
            number = equation.astext()
            words = link.children[0].children if link.children else []
            equation.clear()
            equation.extend(words)
            equation += nodes.Text(f"\N{NO-BREAK SPACE}{number}" if words else number)
            link.replace_self(equation)


def switch_buttons(app, config):
    """Show the buttons that need a repository where there is one."""
    theme = config.html_theme_options
    repository = theme.get("repository_url") or ""
    for button in ("use_repository_button", "use_edit_page_button", "use_issues_button"):
        theme[button] = bool(repository)
    launch = theme.setdefault("launch_buttons", {})
    if not repository:
        launch.clear()
    elif "github.com/" not in repository:
        launch["colab_url"] = ""  # Colab opens notebooks from GitHub only
    config.ogp_site_url = config.html_baseurl


def clean_page(app, pagename, templatename, context, doctree):
    """Take preview tags without an address, wrong roles and empty table heads out of one page."""
    if not app.config.html_baseurl:
        context["metatags"] = re.sub(r'<meta property="og:[^>]*>\s*', "", context.get("metatags", ""))
    if context.get("body"):
        context["body"] = (
            context["body"]
            .replace('<div role="list" class="citation-list">', '<div class="citation-list">')
            .replace(' role="doc-biblioentry"', "")
            .replace('<th class="head"><p></p></th>', "<td></td>")  # an empty header announces nothing
        )
        context["body"] = re.sub(r'<th class="head[^"]*">\s*(<p></p>)?\s*</th>', "<td></td>", context["body"])


def without_thebe(app):
    """Disconnect sphinx-thebe, which Jupyter Book always loads and which writes into every page."""
    for listeners in app.events.listeners.values():
        listeners[:] = [item for item in listeners if not item.handler.__module__.startswith("sphinx_thebe")]
    app.registry.css_files[:] = [file for file in app.registry.css_files if file[0] != "sphinx-thebe.css"]


def setup(app):
    without_thebe(app)
    app.setup_extension("sphinxext.opengraph")
    app.add_post_transform(EquationLinks)
    app.connect("config-inited", switch_buttons)
    app.connect("html-page-context", clean_page, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
