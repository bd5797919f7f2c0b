"""Sphinx extension: a page shows before its scripts and its figures have come.

- Scripts are deferred: they run, in order, once the page is parsed.
- Images say their size, so that nothing moves when they come, and those that a reader
  does not see at first come when the reader nears them.
- A style sheet or script that no page uses is not loaded, and PurgeCSS drops the rules
  of the theme that nothing uses: three quarters of 390 KB, which each of the many boxes
  of a formula would be matched against.
"""

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

from formulas import PACKAGES
from PIL import Image

PURGE = Path(__file__).with_name("node") / "purge.cjs"

# sphinx-design's, which Jupyter Book always loads; no page uses its components.
UNUSED = ("design-tabs.js", "sphinx-design.min.css")


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


def purge_styles(app, exception):
    """Drop what no page uses from the theme's style sheets."""
    if not exception and app.builder.format == "html":
        env = {**os.environ, "NODE_PATH": str(PACKAGES)}
        subprocess.run(["node", PURGE, app.outdir], env=env, check=True)


def setup(app):
    app.connect("build-finished", purge_styles)
    app.connect("html-page-context", lighten_head, priority=990)
    app.connect("html-page-context", settle_images, priority=990)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
