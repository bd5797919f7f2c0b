"""The book in Debian's Chromium, judged by axe and by the page itself.

The quick tests open every page but most of the depth, run axe on one page of each kind
and open the index in all modes. The slow tests judge all pages in all modes.
"""

import contextlib
import json
from functools import cache
from pathlib import Path

import axe_playwright_python
import built
import pytest
from built import PAGES, address, none, served
from playwright.sync_api import TimeoutError

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
FIRST_PAGE_BYTES = 1_500_000
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
MODES = {
    "light": {"color_scheme": "light", "viewport": WIDE},
    "dark": {"color_scheme": "dark", "viewport": WIDE},
    "phone": {"color_scheme": "light", "viewport": PHONE, "has_touch": True},
}
# The theme keeps the logo and the search outside every landmark; no page can mend it.
ALLOWED = {"region"}

# What the source of some page, and so one kind of page, contains.
MARKERS = "{live}", "{machine}", "{exercise}", "{assignments}", "{.entries}"


def one_of_each_kind():
    """The index, a chapter, a depth page, and a page with each marker."""
    pages = sorted(PAGES, key=lambda page: page != "standard")  # this one goes first
    found = {"index", next(page for page in pages if page in built.MAIN)}
    found.add(next(page for page in pages if page.startswith("depth/")))
    for marker in MARKERS:
        sources = ((page, built.source_file(page).read_text()) for page in pages)
        found.add(next(page for page, source in sources if marker in source))
    return found


KINDS = sorted(one_of_each_kind())


# -- Judging one page

# The page is judged as a whole, not only the sections near the window.
SETTLED = """() => {
  document.documentElement.classList.add('whole');
  return document.fonts.ready.then(() => {});
}"""

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

# Nine in ten elements are parts of formulas, which KaTeX answers for: a word stands in
# for each formula. Contrast, most of the time that axe takes, is judged on one visible
# text of each kind: of the same color, size and weight, on the same backgrounds.
MARK_TEXTS = """() => {
  for (const formula of document.querySelectorAll('.katex'))
    formula.replaceChildren('formula');
  const grounds = new Map([[document.documentElement, '']]), seen = new Set();
  for (const element of document.querySelectorAll('body, body *')) {
    const style = getComputedStyle(element);
    const own = [style.backgroundColor, style.backgroundImage, style.opacity].join();
    const clear = own === 'rgba(0, 0, 0, 0),none,1';
    const ground = grounds.get(element.parentElement) + (clear ? '' : '>' + own);
    grounds.set(element, ground);
    const texts = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!texts && !element.matches('input') || !element.checkVisibility()) continue;
    const kind = [ground, style.color, style.fontSize, style.fontWeight].join();
    if (!seen.has(kind)) element.setAttribute('data-judged', '');
    seen.add(kind);
  }
}"""
# Most of the other elements are colored words of code: most become plain text.
PLAIN_CODE = """() => {
  for (const token of document.querySelectorAll('pre span:not([data-judged])'))
    token.replaceWith(...token.childNodes);
  document.body.normalize();
  axe.configure({rules: [{id: 'color-contrast', selector: '[data-judged]'}]});
}"""
RUN_AXE = """async rule => {
  const options = {resultTypes: ['violations'], ...(rule && {runOnly: [rule]})};
  return (await axe.run(options)).violations;
}"""
THEME = "() => document.documentElement.dataset.theme"
IS_THEME = "scheme => document.documentElement.dataset.theme === scheme"
# test_plot.py judges the colors that this filter makes in the dark.
FIGURES = """theme => [...document.querySelectorAll('article figure img')]
  .filter(image => getComputedStyle(image).filter !==
    (theme === 'dark' ? 'invert(1) hue-rotate(180deg)' : 'none'))
  .map(image => `the filter of ${image.alt} is not that of the theme`)"""


def new_context(browser, mode):
    """A browser as a reader starts it, in a mode."""
    return browser.new_context(
        **MODES[mode],
        permissions=["clipboard-read", "clipboard-write"],
        reduced_motion="reduce",  # so that nothing is judged in the middle of a fade
    )


# Visits share it, so style sheets, scripts and fonts are loaded once.
shared_context = cache(new_context)


class Visit:
    """A page opened in a mode, alone with an empty cache, and what it complained of."""

    def __init__(self, browser, url, mode, alone=False):
        self.origin = "/".join(url.split("/")[:3]) + "/"
        self.mode = mode
        self.context = (new_context if alone else shared_context)(browser, mode)
        self.off_site, self.bad, self.errors, self.responses = [], [], [], []
        self.page = page = self.context.new_page()
        self.close = self.context.close if alone else self._leave
        page.on("request", self._request)
        page.on("response", self._response)
        page.on("requestfailed", lambda ask: self.bad.append(f"{ask.url} failed"))
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url, wait_until="load")
        page.evaluate(SETTLED)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _leave(self):
        self.page.evaluate("() => localStorage.clear()")
        self.page.close()

    def _request(self, request):
        if not request.url.startswith(self.origin):
            self.off_site.append(f"asks for {request.url}")

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
        """Everything wrong with the page, one line each. It is not to be used
        afterwards.
        """
        lines = self.complaints() + self.theme_faults(MODES[self.mode]["color_scheme"])
        return lines + self.page.evaluate(OVERFLOW) + self.axe_violations()

    def faults_in_all_modes(self):
        """Like `faults`, of a page opened in light mode: then in dark, on a phone."""
        page = self.page
        page.set_viewport_size(PHONE)
        lines = page.evaluate(OVERFLOW)
        page.set_viewport_size(WIDE)
        page.evaluate(MARK_TEXTS)
        self.emulate("dark")
        lines += self.theme_faults("dark") + self.axe_violations()
        self.emulate("light")
        lines += self.theme_faults("light") + self.axe_violations("color-contrast")
        return lines + self.complaints()

    def emulate(self, scheme):
        """Change the color scheme of the system, which the theme follows."""
        self.page.emulate_media(color_scheme=scheme)
        with contextlib.suppress(TimeoutError):  # theme_faults tells of it
            self.page.wait_for_function(IS_THEME, arg=scheme, timeout=2000)
        self.page.evaluate(NEXT_FRAME)

    def theme_faults(self, scheme):
        """What is not as this color scheme wants it."""
        theme = self.page.evaluate(THEME)
        lines = self.page.evaluate(FIGURES, theme)
        return lines if theme == scheme else [*lines, f"the theme is {theme}"]

    def axe_violations(self, rule=None):
        """What axe finds, a line for each rule. Only a later call may name one rule."""
        lines = []
        if rule is None:
            for script in (MARK_TEXTS, AXE.read_text(), PLAIN_CODE):
                self.page.evaluate(script)
        for found in self.page.evaluate(RUN_AXE, rule):
            if found["id"] not in ALLOWED:
                nodes = found["nodes"]
                first = nodes[0]["html"][:160]
                lines.append(f"axe {found['id']}, {len(nodes)} times: {first}")
        return lines


# -- What is cut, and how long a chapter is

NARROW = 390
WIDTHS = (WIDE["width"], 1024, NARROW)
SCREENS, SCREEN_HEIGHT = 18, 800
# Of fifty formulas one may scroll in a box of its own on a phone.
FORMULAS_PER_SCROLLING_ONE = 50

# Observers of sizes run after the layout of a frame, so before the frame that follows.
NEXT_FRAME = """() => new Promise(done =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""
# {kind: [what is wider than its column]}; a formula that scrolls shows an edge, and on
# a phone code wraps.
MEASURE = """phone => {
  const article = document.querySelector('article');
  const right = article.getBoundingClientRect().right;
  const cut = {scrolls: [], wide: []};
  const said = element => element.textContent.trim().replace(/\\s+/g, ' ').slice(0, 60);
  const boxes =
    'p, li, div.math, .katex-display, table, figure, img, svg, pre, .highlight';
  for (const element of article.querySelectorAll(boxes)) {
    const box = element.getBoundingClientRect();
    const shown = element.checkVisibility({visibilityProperty: true});
    if (!box.width || !box.height || !shown)
      continue;
    if (element.closest('.katex-mathml, .katex-display .katex')) continue;
    const style = getComputedStyle(element);
    const code = element.matches('.highlight pre');
    if (phone && code && !style.whiteSpace.startsWith('pre-wrap'))
      cut.wide.push('code does not wrap: ' + said(element));
    const inside = element.scrollWidth - element.clientWidth;
    const over = Math.max(element.clientWidth ? inside : 0, box.right - right);
    if (over <= 1) continue;
    const name = `${element.tagName.toLowerCase()}.${element.className}`;
    const line = `${name}: ${Math.round(over)} px too wide: ${said(element)}`;
    const edge = style.boxShadow !== 'none' || style.borderRightWidth !== '0px';
    const own = style.overflowX === 'auto' && box.right - right <= 1;
    const formula = element.matches('.katex-display') && own && edge;
    cut[formula ? 'scrolls' : 'wide'].push(line);
  }
  return cut;
}"""
# Of what reading.py counts: without the quiz and the list of sources.
HEIGHT = """() => {
  const height = selector => [...document.querySelectorAll(selector)]
    .reduce((sum, element) => sum + element.getBoundingClientRect().height, 0);
  return height('article') - height('#check-yourself, #sources');
}"""


def width_faults(page, width):
    """What is cut on an open page when its window is this wide."""
    page.set_viewport_size({"width": width, "height": SCREEN_HEIGHT})
    page.evaluate(NEXT_FRAME)  # formulas.js marks what scrolls
    cut = page.evaluate(MEASURE, width == NARROW)
    formulas = page.locator("article div.math").count() if width == NARROW else 0
    allowed = -(-formulas // FORMULAS_PER_SCROLLING_ONE)
    lines = cut["wide"] + (cut["scrolls"] if len(cut["scrolls"]) > allowed else [])
    return [f"{width} px: {line}" for line in lines]


def measured_faults(page, name):
    """What is cut at all widths, and too many screens; leaves the page narrow."""
    screens = page.evaluate(HEIGHT) / SCREEN_HEIGHT
    lines = [line for width in WIDTHS for line in width_faults(page, width)]
    if name in built.MAIN and screens > SCREENS:
        lines.append(f"{screens:.1f} screens, more than {SCREENS}")
    return lines + page.evaluate(OVERFLOW)


QUICK = [page for page in PAGES if page in KINDS or not page.startswith("depth/")]
EACH_PAGE = [
    page if page in QUICK else pytest.param(page, marks=pytest.mark.slow)
    for page in PAGES
]


@pytest.mark.parametrize("page", EACH_PAGE)
def test_page_is_right(browser, site, page):
    first = page == "index"
    with Visit(browser, address(site, page), "light", alone=first) as visit:
        if first:
            sizes = [r.request.sizes()["responseBodySize"] for r in visit.responses]
            assert len(sizes) > 5 and sum(sizes) <= FIRST_PAGE_BYTES
        lines = visit.theme_faults("light") + measured_faults(visit.page, page)
        if page in KINDS:
            visit.page.set_viewport_size(WIDE)
            lines += visit.axe_violations()
        none(lines + visit.complaints())


IN_A_MODE = [("index", "dark"), ("index", "phone")]
IN_A_MODE += [
    pytest.param(page, "phone", marks=pytest.mark.slow)
    for page in KINDS
    if page != "index"
]


@pytest.mark.parametrize("page, mode", IN_A_MODE)
def test_page_is_right_when_opened_in_a_mode(browser, site, page, mode):
    with Visit(browser, address(site, page), mode) as visit:
        none(visit.faults())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_is_right_in_all_modes(browser, site, page):
    with Visit(browser, address(site, page), "light") as visit:
        none(visit.faults_in_all_modes())


@pytest.mark.parametrize("file", built.EXTRA)
def test_theme_page_is_right(browser, site, file):
    with Visit(browser, f"{site}/{file}", "light") as visit:
        none(visit.faults())


# -- The start of a page is laid out first

# No frame calls back, so that nothing is laid out after the start.
HELD = "requestAnimationFrame = () => {}"
WHOLE = "document.documentElement.classList.contains('whole')"
FAR = """() => {
  const links = [...document.querySelectorAll(".bd-toc .toc-h2 > .nav-link")];
  return links.at(0.7 * links.length).hash.slice(1);
}"""
LAID_OUT = """id => document.getElementById(id).firstElementChild
  .checkVisibility({contentVisibilityAuto: true})"""
# Where something is in the window, once the page has stopped moving.
PLACE = """id => new Promise(done => {
  const target = id ? document.getElementById(id) : getSelection().getRangeAt(0);
  let still = 0, before;
  const look = () => {
    const {top} = target.getBoundingClientRect();
    still = top === before ? still + 1 : 0;
    before = top;
    if (still < 30) setTimeout(look, 16); else done(top);
  };
  look();
})"""
FIND = """id => {
  const lines = [...document.querySelectorAll(`#${id} p`)]
    .flatMap(p => [...p.childNodes])
    .filter(node => node.nodeType === 3).map(node => node.data.trim().split('\\n')[0]);
  return window.find(lines.sort((a, b) => b.length - a.length)[0].slice(0, 60));
}"""
MARKED = """id => document.querySelector(`.bd-toc a[href='#${id}']`).closest('li')
  .classList.contains('active')"""


def test_what_is_far_away_waits_and_is_still_printed_and_found(browser, site):
    context = browser.new_context(viewport=WIDE)
    context.add_init_script(HELD)
    page = context.new_page()
    page.goto(address(site, "online"))
    far = page.evaluate(FAR)
    assert not page.evaluate(LAID_OUT, far), "it is laid out at once"
    page.emulate_media(media="print")
    page.wait_for_function(LAID_OUT, arg=far, polling=100)
    page.emulate_media(media="screen")
    assert page.evaluate(FIND, far), "it is not found"
    assert 0 <= page.evaluate(PLACE) < WIDE["height"], "the search ends elsewhere"
    context.close()


def test_links_end_at_their_target_and_the_contents_mark_it(browser, site):
    url = address(site, "online")
    context = browser.new_context(viewport=WIDE)  # scrolls smoothly, as most readers do
    page = context.new_page()
    page.goto(url)
    far = page.evaluate(FAR)
    page.wait_for_function(WHOLE)
    assert page.evaluate(LAID_OUT, far)
    page.locator(f".bd-toc a[href='#{far}']").click()
    assert 0 <= page.evaluate(PLACE, far) < 100, "the link ends elsewhere"
    page.wait_for_function(MARKED, arg=far)

    page.goto("about:blank")
    page.goto(f"{url}#{far}")
    assert 0 <= page.evaluate(PLACE, far) < 100, "the address ends elsewhere"
    context.close()


def test_a_link_into_a_closed_fold_opens_it(browser, site):
    page = browser.new_page()
    page.goto(address(site, "depth/backward"))
    formula = page.locator("#equation-eq-backward-flops")
    assert not formula.is_visible()
    page.evaluate("location.hash = 'equation-eq-backward-flops'")
    formula.wait_for()
    page.reload()
    formula.wait_for()
    page.close()


# -- What a reader does


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
        opens = ".admonition-title button, summary, .toggle-button"
        solution.locator(opens).first.click()
        content.wait_for(state="visible")


def test_errata_are_filtered_and_sorted(browser, site):
    with Visit(browser, address(site, "errata"), "light") as visit:
        page = visit.page
        rows = page.locator("table.entries tbody tr:visible")
        total = rows.count()
        page.get_by_label("Source").select_option("slides")
        page.get_by_label("Kind").select_option("undecided")
        page.reload()  # the address has the choice
        assert ["backward pass XVII" in row for row in rows.all_inner_texts()] == [True]
        assert page.locator(".entries-bar output").inner_text() == f"1 of {total}"

        page.get_by_label("Source").select_option("all")
        page.get_by_label("Kind").select_option("all")
        assert rows.count() == total > 50
        head = page.locator("table.entries th").filter(has_text="No.")
        for order, first in (("ascending", 1), ("descending", total)):
            head.get_by_role("button").press("Enter")
            assert head.get_attribute("aria-sort") == order
            assert rows.first.locator("td").first.inner_text() == str(first)
        none(visit.off_site + visit.errors)  # a reload breaks off its requests


# -- The judges fire

PAGE = """<!doctype html><html lang="en" data-theme="light"><head><title>A page</title>
<link rel="icon" href="data:,"></head>
<body><main><h1>A page</h1>{}</main></body></html>"""
WRONG = {
    "asks for https://example.org/": "<img alt='x' src='https://example.org/x.png'>",
    "gives 404": "<img alt='x' src='missing.png'>",
    "trouble": "<script>console.error('trouble')</script>",
    "broken": "<script>throw new Error('broken')</script>",
    "the page is": "<div style='width: 500px; height: 9px'></div>",
    "PRE": "<div style='overflow: hidden'><pre style='width: 500px'>x</pre></div>",
    "axe image-alt": "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>",
    "axe color-contrast": "<p style='color: #ccc; background: white'>pale</p>",
    "the theme is": "<script>document.documentElement.dataset.theme = 'dark'</script>",
}


def judged(browser, folder, texts, mode, judge):
    """What a judge of visits finds on a page with each of these texts."""
    found = []
    with served(folder) as url:
        for text in texts:
            (folder / "page.html").write_text(PAGE.format(text))
            with Visit(browser, f"{url}/page.html", mode) as visit:
                found.append(judge(visit))
    return found


def test_every_fault_of_a_wrong_page_is_found(browser, tmp_path):
    scrolls = "<div style='overflow-x: auto' tabindex='0'><pre style='width: 500px'>x"
    texts = f"<p>Fine.</p>{scrolls}</div>", "".join(WRONG.values())
    right, wrong = judged(browser, tmp_path, texts, "phone", Visit.faults)
    assert right == []
    assert not [fault for fault in WRONG if not any(fault in x for x in wrong)]


WRAP = "white-space: pre-wrap"
LONG = "<i style='display: block; width: 1500px'>x</i>"
SCROLLS = "class='katex-display' style='overflow: auto hidden; {}'"
RIGHT = [
    f"<div class='highlight'><pre style='{WRAP}'>a line of code</pre></div>",
    f"<div class='math'><div {SCROLLS.format('border: 1px solid')}>{LONG}</div></div>",
]
CUT = {
    "div.math": f"<div class='math'>{LONG}</div>",
    "div.katex-display": f"<div {SCROLLS.format('')}>{LONG}</div>",
    "table.": f"<table><tr><td>{LONG}</td></tr></table>",
    "p.": f"<p style='overflow: auto'>{LONG.replace('block', 'inline-block')}</p>",
    "figure.": f"<figure>{LONG}</figure>",
    "pre.": f"<pre style='overflow: auto'>{LONG}</pre>",
    "does not wrap": "<div class='highlight'><pre>x = 1</pre></div>",
}


def test_every_cut_is_found(browser, tmp_path):
    parts = RIGHT, [*RIGHT, *CUT.values()]
    texts = [f"<article>{''.join(part)}</article>" for part in parts]
    right, wrong = judged(
        browser,
        tmp_path,
        texts,
        "light",
        lambda visit: width_faults(visit.page, NARROW),
    )
    assert right == []
    assert not [fault for fault in CUT if not any(fault in x for x in wrong)]
