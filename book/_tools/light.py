"""Sphinx extension: a page shows before its scripts and its figures have come.

- Scripts are deferred: they run, in order, once the page is parsed.
- Images say their size, so that nothing moves when they come, and those that a reader
  does not see at first come when the reader nears them.
- A script or style sheet that no page uses is not loaded. The other 20 style sheets
  become one file, without the rules that nothing on the site uses (PurgeCSS): the
  browser would match them against each of the many boxes of a formula.
- When a page has loaded, the theme measures every box of code, which lays the whole
  page out at once (sections.js does it in steps). That call is taken out of the
  theme's script; formulas.js does its work.
- Code has no `<span>` around tokens that are styled like plain text: half of them.
"""

import hashlib
import os
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

from formulas import PACKAGES
from PIL import Image
from pygments.formatters import HtmlFormatter
from pygments.styles import get_style_by_name
from pygments.token import Text
from sphinx.errors import ExtensionError
from sphinx.highlighting import PygmentsBridge

PURGE = Path(__file__).with_name("node") / "purge.cjs"

# sphinx-design's, which Jupyter Book always loads; no page uses its components.
UNUSED = ("design-tabs.js", "sphinx-design.min.css")
SHEET = r'<link\b(?=[^>]*\brel="stylesheet")[^>]*\bhref="([^"?]+)[^>]*>\s*'
# How the theme's script, in its one line, calls what measures boxes.
MEASURING = ',"complete"===document.readyState?O():window.addEventListener("load",O)'
STYLES = []  # of code, light and dark


def lighten_head(app, pagename, templatename, context, doctree):
    """Defer scripts and drop what is not used."""
    if templatename == "search.html":
        return  # its own scripts follow these and need them
    kept = []
    for script in context["script_files"]:
        if script.filename:  # a new object: the search page gets the original
            attributes = {"defer": "defer", **script.attributes}
            script = type(script)(
                script.filename, priority=script.priority, **attributes
            )
        # Only the theme's switch of versions reads the name, which we do not have.
        setting = script.attributes.get("body") or ""
        if not setting.startswith("DOCUMENTATION_OPTIONS.pagename"):
            kept.append(script)
    context["script_files"] = [s for s in kept if used(s)]
    context["css_files"] = [s for s in context["css_files"] if used(s)]
    # The list of algorithms would set an option of a script that is left out.
    context["collapse_index"] = False


def used(file):
    return not str(file.filename).endswith(UNUSED)


def size(path):
    """(width, height) of a picture in CSS pixels, or None for one without a size."""
    if path.suffix == ".svg":
        # of the element: its viewBox is in points
        sides = re.search(r'<svg[^>]* width="(\d+)" height="(\d+)"', path.read_text())
        return sides and tuple(map(int, sides.groups()))
    with Image.open(path) as image:
        return image.size


def settle_images(app, pagename, templatename, context, doctree):
    """Write sizes into the images of a page and let all but the first come late."""
    files = {name: path for path, name in getattr(app.builder, "images", {}).items()}
    first = True

    def settled(match):
        nonlocal first
        tag, lazy = match[0], "" if first else ' loading="lazy" decoding="async"'
        first = False
        name = unquote(match["src"].rsplit("/", 1)[-1])
        path = Path(app.srcdir, files[name]) if name in files else None
        if "width=" in tag or not path or not (sides := size(path)):
            return f"<img{lazy}{tag[4:]}"
        return f'<img{lazy} width="{sides[0]}" height="{sides[1]}"{tag[4:]}'

    image = r'<img(?=[^>]*\bsrc="(?P<src>[^"]*)")[^>]*>'
    context["body"] = re.sub(image, settled, context.get("body") or "")


def rules(sheet, static):
    """A style sheet with those that it imports, as it reads in the folder `static`."""
    text = re.sub(r"/\*.*?\*/|@charset[^;]*;", "", sheet.read_text(), flags=re.S)

    def moved(match):
        return f"url({os.path.relpath(sheet.parent / match[1], static)})"

    text = re.sub(r"url\((?![\"']?data:)[\"']?([^\"')]+)[\"']?\)", moved, text)
    imported = r'@import\s*"([^"]+)";'
    return re.sub(imported, lambda m: rules(sheet.parent / m[1], static), text)


def join_styles(app, exception):
    """Join the style sheets of each page into one and drop what no page uses."""
    if exception or app.builder.format != "html":
        return
    site, bundles = Path(app.outdir), {}
    static = site / "_static"
    for page in sorted(site.rglob("*.html")):
        names = re.findall(SHEET, page.read_text())
        if len(names) > 1 and static not in page.parents:
            sheets = tuple((page.parent / name).resolve() for name in names)
            bundles.setdefault(sheets, []).append(page)
    for number, sheets in enumerate(bundles):
        text = "\n".join(rules(sheet, static) for sheet in sheets)
        text = re.sub(r"\s*\n\s*", "\n", text)  # no indents
        text = re.sub(r"(?<=[{};,])\n", "", text)  # no line breaks that say nothing
        (static / f"page-{number}.css").write_text(text)
    env = {**os.environ, "NODE_PATH": str(PACKAGES)}
    subprocess.run(["node", PURGE, site], env=env, check=True)
    for number, pages in enumerate(bundles.values()):
        bundle = static / f"page-{number}.css"
        version = hashlib.sha256(bundle.read_bytes()).hexdigest()[:8]
        for page in pages:
            address = f"{os.path.relpath(bundle, page.parent)}?v={version}"
            first, rest = re.split(SHEET, page.read_text(), maxsplit=1)[::2]
            link = f'<link rel="stylesheet" href="{address}" />'
            page.write_text(first + link + re.sub(SHEET, "", rest))


def trim_script(app, exception):
    """Take the call that measures every box out of the theme's script."""
    if exception or app.builder.format != "html":
        return
    script = Path(app.outdir) / "_static/scripts/pydata-sphinx-theme.js"
    text = script.read_text()
    if MEASURING not in text:
        raise ExtensionError(f"light.py: the theme's script has no {MEASURING!r}")
    script.write_text(text.replace(MEASURING, ""))


class Formatter(HtmlFormatter):
    """Writes no `<span>` around a token that looks like plain text in both themes."""

    def _get_css_classes(self, kind):
        plain = all(s.style_for_token(kind) == s.style_for_token(Text) for s in STYLES)
        return "" if plain else super()._get_css_classes(kind)


def thin_code(app, config):
    """Highlight with the formatter above, for the styles of `_config.yml`."""
    theme = config.html_theme_options
    names = [theme[f"pygments_{mode}_style"] for mode in ("light", "dark")]
    STYLES[:] = [get_style_by_name(name) for name in names]
    PygmentsBridge.html_formatter = Formatter


def setup(app):
    app.connect("config-inited", thin_code)
    # After the theme has written the colors of code.
    app.connect("build-finished", join_styles, priority=990)
    app.connect("build-finished", trim_script)
    app.connect("html-page-context", lighten_head, priority=990)
    app.connect("html-page-context", settle_images, priority=990)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
