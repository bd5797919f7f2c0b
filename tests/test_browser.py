"""The book in a real browser: Debian's Chromium, driven by Playwright, judged by axe and by the page itself.

A `Visit` opens one page in one mode and gathers what is wrong with it. `make test` looks at every page in
one mode and at the index and one chapter in all of them; all pages in all modes are marked slow. The tests
at the end show the judges pages that are wrong and want the fault.
"""

import io
import json
from pathlib import Path

import axe_playwright_python
import built
import numpy as np
import pytest
import serve
from built import HTML, NOTEBOOKS, PAGES, ROOT
from PIL import Image

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
FIRST_PAGE_BYTES = 1_500_000
MODES = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True},
}
# Findings of axe that the theme causes and no page of ours can mend, with the reason.
ALLOWED = {"region": "the theme keeps the logo and the search outside every landmark"}

QUICK = [("index", mode) for mode in MODES] + [("standard", mode) for mode in MODES]
QUICK += [(page, "light") for page in PAGES if page not in ("index", "standard")]
SLOW = [(page, mode) for page in PAGES for mode in MODES if (page, mode) not in QUICK]
EVERY = QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.fixture(scope="session")
def site():
    """The address of the built book, served on this machine."""
    built.require_book()
    server = serve.start(HTML)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


# ----------------------------------------------------------------------------------------------------
# Judging one page

SETTLED = """async () => {
  if (document.querySelector('.math')) {
    if (!window.MathJax || !MathJax.startup) return;
    await MathJax.startup.promise;
  }
  await document.fonts.ready;
}"""

MATH = """() => {
  const faults = [];
  for (const math of document.querySelectorAll('.math')) {
    const text = math.textContent.slice(0, 60);
    if (!math.querySelector('mjx-container')) faults.push('not typeset: ' + text);
    else if (math.querySelector('mjx-merror, [data-mjx-error]')) faults.push('error in maths: ' + text);
    // MathJax prints a macro that it does not know in red.
    else if (math.querySelector('[style*="color: red"]')) faults.push('unknown macro: ' + math.textContent);
  }
  return faults;
}"""

# Whatever is wider than the window must scroll in a box of its own.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, faults = [];
  const page = document.scrollingElement.scrollWidth;
  if (page > width) faults.push(`the page is ${page} px wide in a window of ${width} px`);
  for (const element of document.querySelectorAll('main *')) {
    if (element.closest('mjx-assistive-mml, .visually-hidden, .bd-sidebar-secondary')) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || box.right <= width + 1) continue;
    if (getComputedStyle(element).visibility === 'hidden') continue;
    let scrolls = false;
    for (let up = element.parentElement; up && up !== document.body; up = up.parentElement) {
      const style = getComputedStyle(up);
      if (['auto', 'scroll'].includes(style.overflowX) && up.getBoundingClientRect().right <= width + 1) {
        scrolls = true;
        break;
      }
    }
    if (!scrolls) faults.push(`${element.tagName} ${element.className} reaches ${Math.round(box.right)} px`);
  }
  return faults.slice(0, 8);
}"""


# axe does not count MathML as text, so a table header that is a formula would pass for an empty one.
RUN_AXE = "() => axe.run({exclude: [['th:has(mjx-container)']]}, {resultTypes: ['violations']})"


class Visit:
    """A page opened in a mode, with everything that it asked for and complained about."""

    def __init__(self, browser, address, mode):
        self.origin = "/".join(address.split("/")[:3])
        self.mode = mode
        rights = ["clipboard-read", "clipboard-write"]
        # Without motion nothing is judged in the middle of a fade.
        self.context = browser.new_context(**MODES[mode], permissions=rights, reduced_motion="reduce")
        self.off_site, self.bad, self.errors, self.responses = [], [], [], []
        self.context.route("**/*", self._route)
        self.page = self.context.new_page()
        self.page.on("response", self._response)
        self.page.on("requestfailed", lambda request: self.bad.append(f"{request.url} failed"))
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(address, wait_until="load")
        self.page.evaluate(SETTLED)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def _route(self, route):
        if route.request.url.startswith(self.origin + "/"):
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

    def axe(self):
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate(RUN_AXE)["violations"]
        return [
            f"axe {rule['id']}: {rule['help']}, {len(rule['nodes'])} times: {rule['nodes'][0]['html'][:160]}"
            for rule in found
            if rule["id"] not in ALLOWED
        ]

    def faults(self):
        """Everything wrong with the page, one line each."""
        lines = self.off_site + self.bad + self.errors
        theme = self.page.evaluate("() => document.documentElement.dataset.theme")
        if theme != MODES[self.mode]["color_scheme"]:
            lines.append(f"the theme is {theme}")
        lines += self.page.evaluate(MATH)
        lines += self.page.evaluate(OVERFLOW)
        return lines + self.axe()


def none(lines):
    """Fail with these lines, if there are any."""
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def address(site, page):
    return f"{site}/book/{page}.html"


@pytest.mark.parametrize("page, mode", EVERY)
def test_page_is_right(browser, site, page, mode):
    with Visit(browser, address(site, page), mode) as visit:
        none(visit.faults())


@pytest.mark.parametrize("file", built.EXTRA)
def test_theme_page_is_right(browser, site, file):
    with Visit(browser, f"{site}/{file}", "light") as visit:
        none(visit.faults())


def test_first_page_is_small(browser, site):
    with Visit(browser, address(site, "index"), "light") as visit:
        sizes = {response.url: response.request.sizes()["responseBodySize"] for response in visit.responses}
    largest = sorted(sizes, key=sizes.get)[-5:]
    total = sum(sizes.values())
    assert len(sizes) > 5, "the page loaded almost nothing, so nothing was measured"
    assert total <= FIRST_PAGE_BYTES, f"{total} bytes compressed, most in {[(u, sizes[u]) for u in largest]}"


# ----------------------------------------------------------------------------------------------------
# Figures in the dark


def luminance(pixels):
    """Relative luminance of pixels [..., 3], 0 black to 1 white, as WCAG defines it."""
    value = np.asarray(pixels, dtype=float)[..., :3] / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def ink_contrast(light, dark):
    """How well ink reads in the dark: contrast with the ground there of what is near black in the light.

    light, dark: one figure in the two themes, as arrays [height, width, 3]. The median over the inked pixels;
    the ground is the most frequent colour.
    """
    colours, counts = np.unique(dark.reshape(-1, 3), axis=0, return_counts=True)
    ground = luminance(colours[counts.argmax()])
    ink = luminance(dark)[luminance(light) < 0.05]
    assert ink.size, "the figure has no dark ink in the light, so nothing was measured"
    high, low = np.maximum(ink, ground), np.minimum(ink, ground)
    return float(np.median((high + 0.05) / (low + 0.05)))


def figures(page):
    """The figures of an open page as it now looks, as arrays [height, width, 3]."""
    shots = [image.screenshot(animations="disabled") for image in page.locator("article figure img").all()]
    return [np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")) for shot in shots]


FIGURE_PAGES = [page for page in ("index", "standard") if page in PAGES]
FIGURE_PAGES += [pytest.param(page, marks=pytest.mark.slow) for page in NOTEBOOKS if page not in FIGURE_PAGES]


@pytest.mark.parametrize("page", FIGURE_PAGES)
def test_figures_are_readable_in_the_dark(browser, site, page):
    with Visit(browser, address(site, page), "light") as visit:
        # A frame in one theme only would shift the pixels against each other.
        visit.page.add_style_tag(content="article figure img { padding: 0 !important; }")
        light = figures(visit.page)
        visit.page.evaluate("() => { document.documentElement.dataset.theme = 'dark' }")
        dark = figures(visit.page)
    contrasts = [ink_contrast(*pair) for pair in zip(light, dark, strict=True)]
    assert all(value >= 4.5 for value in contrasts), contrasts


# ----------------------------------------------------------------------------------------------------
# What a reader does


def test_search_finds_a_word(browser, site):
    with Visit(browser, address(site, "index"), "light") as visit:
        visit.page.locator("button.search-button__button:visible").first.click()
        visit.page.locator("input[type=search]:visible").first.fill("softmax")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/search.html?q=softmax*")
        result = visit.page.locator("#search-results li a").first
        result.wait_for()
        visit.page.wait_for_load_state("networkidle")  # the search page fetches every page that it found
        result.click()
        visit.page.wait_for_url("**/book/*.html*")
        assert "softmax" in visit.page.locator("article").inner_text().lower()
        none(visit.off_site + visit.bad + visit.errors)


def test_dark_mode_can_be_switched_on_and_stays(browser, site):
    theme = "() => document.documentElement.dataset.theme"
    with Visit(browser, address(site, "index"), "light") as visit:
        button = visit.page.locator("button.theme-switch-button:visible").first
        for _ in range(3):  # auto, light, dark in turn
            button.click()
            if visit.page.evaluate(theme) == "dark":
                break
        assert visit.page.evaluate(theme) == "dark"
        visit.page.reload()
        assert visit.page.evaluate(theme) == "dark"
        none(visit.errors)


def test_code_can_be_copied(browser, site):
    with Visit(browser, address(site, "standard"), "light") as visit:
        block = visit.page.locator("div.cell_input div.highlight:visible").first
        block.hover()
        block.locator("button.copybtn").click()
        visit.page.wait_for_function("() => navigator.clipboard.readText().then(text => text.length > 0)")
        copied = visit.page.evaluate("() => navigator.clipboard.readText()")
        assert copied.strip() == block.locator("pre").inner_text().strip()


def test_notebook_can_be_downloaded(browser, site):
    with Visit(browser, address(site, "standard"), "light") as visit:
        visit.page.locator(".dropdown-download-buttons button").first.click()
        with visit.page.expect_download() as download:
            visit.page.locator("a.btn-download-source-button:visible").first.click()
        saved = json.loads(Path(download.value.path()).read_text())
    assert saved == json.loads((ROOT / "book/standard.ipynb").read_text())


def test_solution_unfolds(browser, site):
    with Visit(browser, address(site, "standard"), "light") as visit:
        solution = visit.page.locator(".solution.dropdown").first
        content = solution.locator("section, p:not(.admonition-title)").first
        assert not content.is_visible()
        solution.locator(".admonition-title button, summary, .toggle-button").first.click()
        content.wait_for(state="visible")


# ----------------------------------------------------------------------------------------------------
# The judges fire

SHELL = """<!doctype html><html lang="en" data-theme="light"><head><title>A page</title>
<link rel="icon" href="data:,"></head><body><main><h1>A page</h1>{}</main></body></html>"""
RED = '<span class="math"><mjx-container><span style="color: red">\\foo</span></mjx-container></span>'
WRONG = {
    "asks for https://example.org/": "<img alt='x' src='https://example.org/x.png'>",
    "gives 404": "<img alt='x' src='missing.png'>",
    "trouble": "<script>console.error('trouble')</script>",
    "broken": "<script>throw new Error('broken')</script>",
    "not typeset": "<span class='math'>\\(x\\)</span>",
    "error in maths": "<span class='math'><mjx-container><mjx-merror></mjx-merror></mjx-container></span>",
    "unknown macro": RED,
    "the page is": "<div style='width: 500px; height: 9px'></div>",
    "PRE": "<div style='overflow: hidden'><pre style='width: 500px'>x</pre></div>",
    "axe image-alt": "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>",
    "axe empty-table-header": "<table><tr><th></th><th>a</th></tr><tr><td>1</td><td>2</td></tr></table>",
    "axe color-contrast": "<p style='color: #ccc; background: white'>pale</p>",
    "the theme is": "<script>document.documentElement.dataset.theme = 'dark'</script>",
}


@pytest.fixture
def pages(tmp_path):
    """A function that writes a page and returns its address on a server of its own."""
    server = serve.start(tmp_path)

    def write(body):
        (tmp_path / "page.html").write_text(SHELL.format(body))
        return f"http://127.0.0.1:{server.server_port}/page.html"

    yield write
    server.shutdown()


def test_right_page_has_no_fault(browser, pages):
    wide = "<div style='overflow-x: auto' tabindex='0'><pre style='width: 500px'>x</pre></div>"
    with Visit(browser, pages(f"<p>Fine.</p>{wide}"), "phone") as visit:
        assert visit.faults() == []


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_page_is_found(browser, pages, fault):
    with Visit(browser, pages(WRONG[fault]), "phone") as visit:
        found = visit.faults()
    assert any(fault in line for line in found), found


def test_dark_ink_on_dark_ground_is_found():
    light, unreadable = np.full((20, 20, 3), 255), np.full((20, 20, 3), 18)
    light[:5, :5] = unreadable[:5, :5] = 20
    assert ink_contrast(light, light) > 10
    assert ink_contrast(light, unreadable) < 1.5
