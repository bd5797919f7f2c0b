"""Print the built book into one PDF with Debian's Chromium.

    python book/_tools/pdf.py _build/html _build/pdf/flashattention-book.pdf

The pages of `_toc.yml` are joined into one document with a cover and a table of
contents. Folded parts are open, links between pages become links inside the PDF, code
wraps, wide equations and tables shrink to fit. The outline of the PDF says on which
page each heading is; cover and contents are printed again with these numbers and
replace those of the book, so the whole book, which takes minutes, is printed once. The
site gets a copy, and its landing page a button for it. Raises RuntimeError when an
equation did not typeset or when something is still cut off at the edge.
"""

import argparse
import logging
import os
import posixpath
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pikepdf
import yaml
from bs4 import BeautifulSoup
from landing import PDF_PLACE
from playwright.sync_api import sync_playwright
from pypdf import PdfReader, PdfWriter
from pypdf.generic import NameObject, TextStringObject
from serve import start

# pypdf warns that it counts one object more than Chromium's trailer.
logging.getLogger("pypdf").setLevel(logging.ERROR)

ROOT = Path(__file__).resolve().parents[2]
# How equations were checked is on the web page alone.
NOT_PRINTED = ".mark, .checked > details"
MARGIN_MM = {"top": 18, "right": 18, "bottom": 20, "left": 18}
# Of A4, at 96 px an inch.
TEXT_WIDTH_PX = round((210 - MARGIN_MM["left"] - MARGIN_MM["right"]) / 25.4 * 96)
FOOTER = (
    '<div style="width: 100%; font: 9px sans-serif; color: #555; text-align: center">'
    '<span class="pageNumber"></span></div>'
)
STYLE = """
html { font-size: 13px; }
body { background: #fff; }
.bd-article { padding: 0 !important; }
.chapter, .contents { break-before: page; }
.cover { padding-top: 6rem; text-align: center; }
.cover img { width: 10rem; }
.contents .entry { display: flex; gap: 1rem; justify-content: space-between; }
.contents .depth-1 { padding-left: 1.5rem; }
.contents .page { min-width: 3rem; text-align: right; }
.contents .part { margin: 1rem 0 0.25rem; font-weight: bold; }
.contents a { color: inherit; text-decoration: none; }
.bd-article .headerlink, .bd-article .copybtn, .bd-article .toggle-button {
  display: none !important;
}
.bd-article pre {
  white-space: pre-wrap !important; overflow-wrap: anywhere;
  overflow: visible !important;
}
.bd-article pre, .bd-article .highlight {
  break-inside: auto !important; orphans: 4; widows: 4;
}
.bd-article .highlight, .bd-article div.math { overflow: visible !important; }
.bd-article .cell_output { overflow: visible !important; max-height: none !important; }
.bd-article .admonition, .bd-article details { box-shadow: none !important; }
.katex-mathml { display: none !important; }
"""
# Shrinks what is too wide, then reports what still is and what is not typeset.
FIT = """
async () => {
  await document.fonts.ready;
  await Promise.all([...document.images].map(image => image.decode().catch(() => {})));
  // Measure everything first: a style set in between would cost a layout of the book.
  const shrink = [];
  for (const formula of document.querySelectorAll('.katex-display')) {
    const scale = 0.98 * formula.clientWidth / formula.scrollWidth;
    if (scale < 0.98) shrink.push(() => formula.style.fontSize = `${100 * scale}%`);
  }
  for (const table of document.querySelectorAll('table')) {
    const room = table.parentElement.getBoundingClientRect().width;
    const scale = 0.98 * room / table.getBoundingClientRect().width;
    if (scale < 0.98) shrink.push(() => table.style.zoom = scale);
  }
  shrink.forEach(apply => apply());
  const faults = [];
  const start = element => element.textContent.trim().slice(0, 60);
  for (const box of document.querySelectorAll('.bd-article *')) {
    const edge = box.getBoundingClientRect().right;
    if (edge > innerWidth + 1 && !box.closest('.katex svg'))
      faults.push(`${box.tagName} ends at ${edge} of ${innerWidth} px: ${start(box)}`);
  }
  for (const formula of document.querySelectorAll('.math'))
    if (!formula.querySelector('.katex')) faults.push(`not typeset: ${start(formula)}`);
  return faults;
}
"""


def launch(playwright):
    """Start Debian's Chromium."""
    executable = shutil.which("chromium")
    if not executable:
        raise RuntimeError("chromium is missing: sudo apt-get install -y chromium")
    quiet = ["gpu", "quic", "background-networking", "component-update", "sync"]
    flags = [f"--disable-{name}" for name in quiet]
    # Pages are of this machine; what they ask of others fails at once.
    flags.append(
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
    )
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
    return playwright.chromium.launch(executable_path=executable, args=flags)


def read(name):
    """Return a YAML file of the repository's root as Python values."""
    return yaml.safe_load((ROOT / name).read_text())


def contents_of_toc(toc):
    """List (part caption or None, page's path without ending) in reading order."""
    pages = [(None, toc["root"])]
    for part in toc["parts"]:
        for chapter in part["chapters"]:
            depth = chapter.get("sections", [])
            pages += [(part["caption"], page["file"]) for page in [chapter, *depth]]
    return pages


def anchor(page, fragment=""):
    """Name a place of a page inside the joined document, where ids would repeat."""
    name = page.removeprefix("book/").replace("/", "-")
    return name + (f"--{fragment}" if fragment else "")


def join(site):
    """Return what the print document is made of, all in order: links to style sheets,
    the HTML of each chapter, and headings h1 and h2 as (part, depth, id, HTML) and as
    text.
    """
    toc = contents_of_toc(read("_toc.yml"))
    names, sheets = {page for _, page in toc}, ""
    chapters, headings, titles = [], [], []
    for part, page in toc:
        soup = BeautifulSoup((site / f"{page}.html").read_text(), "html.parser")
        sheets = sheets or "".join(map(str, soup.select("head link[rel=stylesheet]")))
        article = soup.find("article", class_="bd-article")
        for element in article.find_all(id=True):
            element["id"] = anchor(page, element["id"])
        for link in article.find_all("a", href=True):
            target = urlsplit(link["href"])
            if target.scheme:
                continue
            relative = target.path or posixpath.basename(page)
            path = posixpath.join(posixpath.dirname(page), relative)
            path = posixpath.normpath(path).removesuffix(".html")
            if path in names:
                link["href"] = "#" + anchor(path, target.fragment)
            else:
                link.unwrap()  # a file beside the book, not inside the PDF
        for image in article.find_all("img", loading="lazy"):
            del image["loading"]  # what is out of sight is printed, too
        for details in article.select(NOT_PRINTED):
            details.decompose()
        for details in article.find_all("details"):
            details["open"] = ""
            if "fold" in details.get("class", []):  # the handle of a folded cell
                details.summary.decompose()
                details.name = "div"
        chapter = soup.new_tag("div", id=anchor(page), attrs={"class": "chapter"})
        chapter.extend(list(article.children))
        for number, heading in enumerate(chapter.find_all(["h1", "h2"])):
            heading["id"] = heading.get("id") or anchor(page, f"heading-{number}")
            words = BeautifulSoup(str(heading), "html.parser")
            for sign in words.find_all("a", class_="headerlink"):
                sign.decompose()
            inner = words.find(heading.name)
            depth = int(heading.name[1]) - 1
            headings.append((part, depth, heading["id"], inner.decode_contents()))
            for formula in words.select(".katex"):
                formula.replace_with(formula.annotation.string)  # its TeX
            titles.append(re.sub(r"[\\{}]", "", words.get_text()).strip())
        chapters.append(str(chapter))
    return sheets, chapters, headings, titles


def page_around(sheets, chapters, headings, numbers):
    """Put head, cover and contents, with these page numbers, around chapters."""
    config = read("_config.yml")
    entries, last_part = [], None
    for (part, depth, target, inner), number in zip(headings, numbers, strict=True):
        if part != last_part:
            entries.append(f'<div class="part">{part}</div>')
            last_part = part
        link = f'<a href="#{target}">{inner}</a><span class="page">{number}</span>'
        entries.append(f'<div class="entry depth-{depth}">{link}</div>')
    logo = posixpath.join("../_static", posixpath.basename(config["logo"]))
    return f"""<!DOCTYPE html>
<html lang="en" data-theme="light"><head><meta charset="utf-8">
<title>{config["title"]}</title>
{sheets}<style>{STYLE}</style></head><body>
<div class="cover"><img src="{logo}" alt="">
<p style="font-size: 3rem">{config["title"]}</p>
<p style="font-size: 1.3rem">{config["author"]}</p></div>
<div class="bd-article contents"><p style="font-size: 2rem">Contents</p>
{"".join(entries)}</div>
<section class="bd-article">{"".join(chapters)}</section></body></html>"""


def outline_entries(items, depth=0):
    """Yield the chapters and sections of an outline in order."""
    for item in items:
        if isinstance(item, list):
            yield from outline_entries(item, depth + 1)
        elif depth < 2:
            yield item


def page_numbers(pdf):
    """Return the page number, from 1, of every chapter and section in the outline."""
    reader = PdfReader(pdf)
    entries = outline_entries(reader.outline)
    return [reader.get_destination_page_number(entry) + 1 for entry in entries]


def name_outline(pdf, titles, author):
    """Write `titles` into the outline, where Chromium loses formulas."""
    writer = PdfWriter(clone_from=pdf)
    for entry, title in zip(outline_entries(writer.outline), titles, strict=True):
        entry.node[NameObject("/Title")] = TextStringObject(title)
    writer.add_metadata({"/Author": author})
    writer.write(pdf)
    # The tags of the formulas are two thirds of the file, and compress well.
    with pikepdf.open(pdf, allow_overwriting_input=True) as whole:
        whole.save(object_stream_mode=pikepdf.ObjectStreamMode.generate)


def replace_pages(pdf, front, count):
    """Replace what is drawn on the first pages, cover and contents, by that of another
    PDF. Links and tags stay, so both must draw the same pieces in the same order.
    """
    with pikepdf.open(pdf, allow_overwriting_input=True) as book:
        with pikepdf.open(front) as other:
            for old, new in zip(book.pages[:count], other.pages[:count], strict=True):
                texts = (page.Contents.read_bytes() for page in (old, new))
                tags, wanted = (re.findall(rb"/MCID \d+", text) for text in texts)
                if tags != wanted:
                    raise RuntimeError("the contents, printed again, have other tags")
                old.Contents = book.copy_foreign(new.Contents)
                old.Resources = book.copy_foreign(other.make_indirect(new.Resources))
        book.save(pdf)


def print_html(browser, address, html, target):
    """Print a document, which has this address, on a fresh page."""
    page = browser.new_page(viewport={"width": TEXT_WIDTH_PX, "height": 1000})
    page.set_default_timeout(300_000)
    page.emulate_media(media="print", color_scheme="light")
    content = {"body": html, "content_type": "text/html; charset=utf-8"}
    page.route(address, lambda route: route.fulfill(**content))
    page.goto(address)
    faults = page.evaluate(FIT)
    if faults:
        raise RuntimeError("the PDF would be faulty:\n  " + "\n  ".join(faults))
    page.pdf(
        path=target,
        format="A4",
        margin={side: f"{size}mm" for side, size in MARGIN_MM.items()},
        display_header_footer=True,
        header_template="<span></span>",
        footer_template=FOOTER,
        print_background=True,
        tagged=True,
        outline=True,
    )
    page.close()


def print_book(site, target):
    """Print the site folder into the file `target`; RuntimeError if it has a fault."""
    sheets, chapters, headings, titles = join(site)
    zeros = [0] * len(titles)
    server = start(site)
    address = f"http://localhost:{server.server_port}/book/print.html"
    try:
        with sync_playwright() as playwright, TemporaryDirectory() as folder:
            browser = launch(playwright)
            print("typesetting and printing the book ...", flush=True)
            html = page_around(sheets, chapters, headings, zeros)
            print_html(browser, address, html, target)
            numbers = page_numbers(target)
            if len(numbers) != len(titles):
                counts = f"{len(numbers)} entries for {len(titles)} headings"
                raise RuntimeError(f"the outline has {counts}")
            # With a chapter: what begins on the next page has tags on the last of
            # these.
            html = page_around(sheets, chapters[:1], headings, numbers)
            print_html(browser, address, html, front := Path(folder, "front.pdf"))
            browser.close()
            replace_pages(target, front, numbers[0] - 1)
        name_outline(target, titles, read("_config.yml")["author"])
    finally:
        server.shutdown()


def publish(pdf, site):
    """Copy the PDF into the site and give the landing page a button for it."""
    shutil.copy(pdf, site / pdf.name)
    page = site / f"{read('_toc.yml')['root']}.html"
    size = f"{pdf.stat().st_size / 1e6:.0f} MB"
    link = f'<a class="reference external" href="../{pdf.name}">PDF, {size}</a> '
    page.write_text(page.read_text().replace(PDF_PLACE, link))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    print_book(arguments.site, arguments.target)
    publish(arguments.target, arguments.site)


if __name__ == "__main__":
    main()
