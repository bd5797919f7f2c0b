"""The book in Debian's Chromium, judged by axe and by the page itself.

A `Visit` opens a page in one mode and gathers what is wrong with it. `make test` visits
every page in one mode, the index and one chapter in all modes; `make test-all` visits
all pages in all modes.
"""

import io
import json
from pathlib import Path

import axe_playwright_python
import built
import numpy as np
import pytest
import serve
from built import HTML, NOTEBOOKS, PAGES, address, none
from PIL import Image

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
FIRST_PAGE_BYTES = 1_500_000
WIDE = {"width": 1280, "height": 900}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
MODES = {
    "light": {"color_scheme": "light", "viewport": WIDE},
    "dark": {"color_scheme": "dark", "viewport": WIDE},
    "phone": {"color_scheme": "light", **PHONE},
}
# The theme keeps the logo and the search outside every landmark; no page can mend it.
ALLOWED = {"region"}

THOROUGH = ("index", "standard")
VISITS = [
    (page, mode)
    if mode == "light" or page in THOROUGH
    else pytest.param(page, mode, marks=pytest.mark.slow)
    for page in PAGES
    for mode in MODES
]


@pytest.fixture(scope="session")
def site():
    """The address of the built book, served on this machine."""
    built.require_book()
    server = serve.start(HTML)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


# -- Judging one page

SETTLED = "() => document.fonts.ready.then(() => {})"

MATH = """() => [...document.querySelectorAll('.math')]
  .filter(math => !math.querySelector('.katex math'))
  .map(math => 'not typeset: ' + math.textContent.slice(0, 60))"""

# Whatever is wider than the window must scroll in a box of its own.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, faults = [];
  const page = document.scrollingElement.scrollWidth;
  if (page > width) faults.push(`the page is ${page} px wide, the window ${width} px`);
  for (const element of document.querySelectorAll('main *')) {
    // KaTeX cuts braces and roots from pictures of 400 em.
    const apart = '.katex-mathml, .katex svg, .visually-hidden, .bd-sidebar-secondary';
    if (element.closest(apart)) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || box.right <= width + 1) continue;
    if (getComputedStyle(element).visibility === 'hidden') continue;
    let scrolls = false;
    for (let up = element.parentElement; up && up !== document.body && !scrolls;
         up = up.parentElement)
      scrolls = ['auto', 'scroll'].includes(getComputedStyle(up).overflowX)
        && up.getBoundingClientRect().right <= width + 1;
    if (!scrolls)
      faults.push(`${element.tagName} ${element.className} reaches ${box.right} px`);
  }
  return faults.slice(0, 8);
}"""

# Nine in ten elements are parts of formulas, which KaTeX answers for, and colored
# words of code. A word in place of each formula and one code word of each kind say the
# same in a fifth of the time.
RUN_AXE = """async () => {
  for (const formula of document.querySelectorAll('.katex'))
    formula.replaceChildren('formula');
  const seen = new Set();
  for (const token of document.querySelectorAll('pre span')) {
    const around = token.closest('pre').parentElement.parentElement;
    const kind = around.className + ' ' + token.className;
    if (seen.has(kind)) token.replaceWith(...token.childNodes);
    seen.add(kind);
  }
  document.body.normalize();
  return (await axe.run({resultTypes: ['violations']})).violations;
}"""
THEME = "() => document.documentElement.dataset.theme"


class Visit:
    """A page opened in a mode, with what it asked for and complained about."""

    def __init__(self, browser, url, mode):
        self.origin = "/".join(url.split("/")[:3]) + "/"
        self.mode = mode
        self.context = browser.new_context(
            **MODES[mode],
            permissions=["clipboard-read", "clipboard-write"],
            reduced_motion="reduce",  # so that nothing is judged in the middle of a fade
        )
        self.off_site, self.bad, self.errors, self.responses = [], [], [], []
        self.context.route("**/*", self._route)
        self.page = page = self.context.new_page()
        page.on("response", self._response)
        page.on("requestfailed", lambda ask: self.bad.append(f"{ask.url} failed"))
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url, wait_until="load")
        page.evaluate(SETTLED)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def _route(self, route):
        if route.request.url.startswith(self.origin):
            route.continue_()
        else:
            self.off_site.append(f"asks for {route.request.url}")
            route.abort()

    def _response(self, response):
        self.responses.append(response)
        if response.status >= 400:
            self.bad.append(f"{response.url} gives {response.status}")

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def complaints(self):
        """What the page asked for in vain, and its messages on the console."""
        return self.off_site + self.bad + self.errors

    def faults(self):
        """Everything wrong with the page, one line each. It is not to be used after."""
        lines = self.complaints()
        theme = self.page.evaluate(THEME)
        if theme != MODES[self.mode]["color_scheme"]:
            lines.append(f"the theme is {theme}")
        lines += self.page.evaluate(MATH) + self.page.evaluate(OVERFLOW)
        self.page.evaluate(AXE.read_text())
        for rule in self.page.evaluate(RUN_AXE):
            if rule["id"] not in ALLOWED:
                nodes = rule["nodes"]
                first = nodes[0]["html"][:160]
                lines.append(f"axe {rule['id']}, {len(nodes)} times: {first}")
        return lines


@pytest.mark.parametrize("page, mode", VISITS)
def test_page_is_right(browser, site, page, mode):
    with Visit(browser, address(site, page), mode) as visit:
        if (page, mode) == ("index", "light"):
            sizes = [r.request.sizes()["responseBodySize"] for r in visit.responses]
            assert len(sizes) > 5 and sum(sizes) <= FIRST_PAGE_BYTES
        none(visit.faults())


@pytest.mark.parametrize("file", built.EXTRA)
def test_theme_page_is_right(browser, site, file):
    with Visit(browser, f"{site}/{file}", "light") as visit:
        none(visit.faults())


# -- Figures in the dark


def luminance(pixels):
    """Relative luminance of pixels [..., 3], 0 black to 1 white, as WCAG defines it."""
    value = np.asarray(pixels, dtype=float)[..., :3] / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


# Pictures further down load when they are scrolled to; a screenshot does not wait.
LOAD_PICTURES = """() => Promise.all([...document.images].map(image => {
  image.loading = 'eager';
  return image.decode().catch(() => {});
}))"""


def ink_contrast(light, dark):
    """Contrast, in the dark, of the ink that is near black in the light.

    light, dark: one figure in the two themes, as arrays [height, width, 3]. The median
    over the inked pixels; the ground is the most frequent color.
    """
    # Where a figure ends between two pixels, one picture may have a row more.
    rows = min(len(light), len(dark))
    light, dark = light[:rows], dark[:rows]
    colors, counts = np.unique(dark.reshape(-1, 3), axis=0, return_counts=True)
    ground = luminance(colors[counts.argmax()])
    ink = luminance(dark)[luminance(light) < 0.05]
    assert ink.size, "the figure has no dark ink in the light, so nothing was measured"
    high, low = np.maximum(ink, ground), np.minimum(ink, ground)
    return float(np.median((high + 0.05) / (low + 0.05)))


def figures(page):
    """The figures of an open page as it now looks, as arrays [height, width, 3]."""
    images = page.locator("article figure img").all()
    shots = [io.BytesIO(image.screenshot(animations="disabled")) for image in images]
    return [np.asarray(Image.open(shot).convert("RGB")) for shot in shots]


@pytest.mark.parametrize(
    "page",
    [
        p if p in THOROUGH else pytest.param(p, marks=pytest.mark.slow)
        for p in NOTEBOOKS
    ],
)
def test_figures_are_readable_in_the_dark(browser, site, page):
    with Visit(browser, address(site, page), "light") as visit:
        # A frame in one theme only would shift the pixels against each other.
        frameless = "article figure img { padding: 0 !important; }"
        visit.page.add_style_tag(content=frameless)
        visit.page.evaluate(LOAD_PICTURES)
        light = figures(visit.page)
        visit.page.evaluate("() => { document.documentElement.dataset.theme = 'dark' }")
        dark = figures(visit.page)
    contrasts = [ink_contrast(*pair) for pair in zip(light, dark, strict=True)]
    assert all(value >= 4.5 for value in contrasts), contrasts


# -- What a reader does


def test_search_finds_a_word(browser, site):
    with Visit(browser, address(site, "index"), "light") as visit:
        page = visit.page
        page.locator("button.search-button__button:visible").first.click()
        page.locator("input[type=search]:visible").first.fill("softmax")
        page.keyboard.press("Enter")
        page.wait_for_url("**/search.html?q=softmax*")
        result = page.locator("#search-results li a").first
        result.wait_for()
        page.wait_for_load_state("networkidle")  # it fetches every page that it found
        result.click()
        page.wait_for_url("**/book/**.html*")
        assert "softmax" in page.locator("article").inner_text().lower()
        none(visit.complaints())


def test_dark_mode_can_be_switched_on_and_stays(browser, site):
    with Visit(browser, address(site, "index"), "light") as visit:
        button = visit.page.locator("button.theme-switch-button:visible").first
        for _ in range(3):  # auto, light, dark in turn
            button.click()
            if visit.page.evaluate(THEME) == "dark":
                break
        visit.page.reload()
        assert visit.page.evaluate(THEME) == "dark"


def test_code_is_copied_a_notebook_downloaded_a_solution_unfolded(browser, site):
    with Visit(browser, address(site, "online"), "light") as visit:
        page = visit.page
        block = page.locator("div.cell_input div.highlight:visible").first
        block.hover()
        block.locator("button.copybtn").click()
        read = "() => navigator.clipboard.readText()"
        page.wait_for_function(f"{read}.then(text => text.length > 0)")
        copied = page.evaluate(read).strip()
        assert copied == block.locator("pre").inner_text().strip()

        page.locator(".dropdown-download-buttons button").first.click()
        with page.expect_download() as download:
            page.locator("a.btn-download-source-button:visible").first.click()
        saved = json.loads(Path(download.value.path()).read_text())
        assert saved == json.loads(built.source_file("online").read_text())

        solution = page.locator(".solution.dropdown").first
        content = solution.locator("section, p:not(.admonition-title)").first
        assert not content.is_visible()
        solution.locator(
            ".admonition-title button, summary, .toggle-button"
        ).first.click()
        content.wait_for(state="visible")


# -- The judges fire

PAGE = """<!doctype html><html lang="en" data-theme="light"><head><title>A page</title>
<link rel="icon" href="data:,"></head><body><main><h1>A page</h1>{}</main></body></html>"""
WRONG = {
    "asks for https://example.org/": "<img alt='x' src='https://example.org/x.png'>",
    "gives 404": "<img alt='x' src='missing.png'>",
    "trouble": "<script>console.error('trouble')</script>",
    "broken": "<script>throw new Error('broken')</script>",
    "not typeset": "<span class='math'>\\(x\\)</span>",
    "the page is": "<div style='width: 500px; height: 9px'></div>",
    "PRE": "<div style='overflow: hidden'><pre style='width: 500px'>x</pre></div>",
    "axe image-alt": "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>",
    "axe empty-table-header": "<table><tr><th></th><th>a</th></tr></table>",
    "axe color-contrast": "<p style='color: #ccc; background: white'>pale</p>",
    "the theme is": "<script>document.documentElement.dataset.theme = 'dark'</script>",
}


def test_every_fault_of_a_wrong_page_is_found(browser, tmp_path):
    scrolls = "<div style='overflow-x: auto' tabindex='0'><pre style='width: 500px'>x"
    (tmp_path / "right.html").write_text(PAGE.format(f"<p>Fine.</p>{scrolls}</div>"))
    (tmp_path / "wrong.html").write_text(PAGE.format("".join(WRONG.values())))
    server = serve.start(tmp_path)
    url = f"http://127.0.0.1:{server.server_port}"
    with Visit(browser, f"{url}/right.html", "phone") as visit:
        assert visit.faults() == []
    with Visit(browser, f"{url}/wrong.html", "phone") as visit:
        found = visit.faults()
    server.shutdown()
    assert not [fault for fault in WRONG if not any(fault in line for line in found)]
