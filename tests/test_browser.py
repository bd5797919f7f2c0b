"""The book in Debian's Chromium, judged by axe and by the page itself.

The quick tests open every page but most of the depth, run axe on one page of each kind
and open the index in all modes. The slow tests judge all pages in all modes.
"""

import json
from pathlib import Path

import built
import pytest
from built import PAGES, address, none, served
from visit import NEXT_FRAME, OVERFLOW, THEME, WIDE, Visit

FIRST_PAGE_BYTES = 1_500_000

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


# -- What is cut, and how long a chapter is

NARROW = 390
WIDTHS = (WIDE["width"], 1024, NARROW)
SCREENS, SCREEN_HEIGHT = 18, 800
# Of fifty formulas one may scroll in a box of its own on a phone.
FORMULAS_PER_SCROLLING_ONE = 50

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
