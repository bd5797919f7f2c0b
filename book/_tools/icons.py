"""Sphinx extension: the icons of the theme as a font of a few kilobytes.

The theme draws its icons with Font Awesome: a script of 540 KB that blocks the page, or
a font of 150 KB. This takes the icons that the pages use out of the theme's own font
and puts them into a style sheet, so that they need no request at all. An icon that is
forgotten here still shows; the browser then fetches the theme's font.
"""

import base64
import io
import re
from pathlib import Path

import pydata_sphinx_theme
from fontTools import subset
from fontTools.ttLib import TTFont

STATIC = Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static"
# Classes in the theme's templates; titles of boxes take theirs from --pst-icon-....
CLASSES = [
    "angle-down", "angle-left", "angle-right", "arrow-up", "bars", "chevron-down",
    "circle-half-stroke", "download", "expand", "file", "file-pdf", "list",
    "magnifying-glass", "moon", "pencil", "sun", "xmark",
]  # fmt: skip


def codes():
    """The code points of the icons."""
    style = (STATIC / "styles/pydata-sphinx-theme.css").read_text()
    found = set(re.findall(r"--pst-icon-[\w-]+:\s*\"(.)\"", style))
    for name in CLASSES:
        code = re.search(rf'\.fa-{name}:before[^{{]*{{content:"\\(\w+)"', style)[1]
        found.add(chr(int(code, 16)))
    return {ord(sign) for sign in found}


def font(wanted):
    """The solid Font Awesome with these code points only, as WOFF."""
    whole = TTFont(STATIC / "vendor/fontawesome/webfonts/fa-solid-900.ttf")
    options = subset.Options(layout_features=[], name_IDs=[], flavor="woff")
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=wanted)
    cutter.subset(whole)
    out = io.BytesIO()
    subset.save_font(whole, out, options)
    return out.getvalue()


def write_style(app):
    wanted = codes()
    data = base64.b64encode(font(wanted)).decode()
    signs = ",".join(f"U+{code:x}" for code in sorted(wanted))
    target = Path(app.outdir) / "_static/icons.css"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        '@font-face { font-family: "Font Awesome 6 Free"; font-weight: 900;\n'
        f"unicode-range: {signs};\n"
        f'src: url(data:font/woff;base64,{data}) format("woff"); }}\n'
    )


def setup(app):
    app.add_css_file("icons.css", priority=900)
    app.connect("builder-inited", write_style)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
