"""Nothing on a rewritten page is cut, at three widths; its main path is 18 screens."""

import built
import pytest
import serve
from built import PAGES, address, none
from test_browser import PAGE, Visit, site  # noqa: F401, a fixture
from test_size import MAIN

REWRITTEN = [page for page in PAGES if page not in built.first_edition()]
WIDTHS = (1280, 1024, 390)
PHONE = 390
SCREENS, SCREEN_HEIGHT = 18, 800
# Of fifty formulas one may scroll in a box of its own on a phone.
FORMULAS_PER_SCROLLING_ONE = 50

# {kind: [what is wider than its column]}; a formula that scrolls shows an edge.
MEASURE = """() => {
  const article = document.querySelector('article');
  const right = article.getBoundingClientRect().right;
  const cut = {scrolls: [], wide: []};
  const said = element => element.textContent.trim().replace(/\\s+/g, ' ').slice(0, 60);
  const boxes =
    'p, li, div.math, .katex-display, table, figure, img, svg, pre, .highlight';
  for (const element of article.querySelectorAll(boxes)) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || !element.checkVisibility({visibilityProperty: true}))
      continue;
    if (element.closest('.katex-mathml, .katex-display .katex')) continue;
    const inside = element.scrollWidth - element.clientWidth;
    const over = Math.max(element.clientWidth ? inside : 0, box.right - right);
    if (over <= 1) continue;
    const name = `${element.tagName.toLowerCase()}.${element.className}`;
    const line = `${name}: ${Math.round(over)} px too wide: ${said(element)}`;
    const style = getComputedStyle(element);
    const edge = style.boxShadow !== 'none' || style.borderRightWidth !== '0px';
    const own = style.overflowX === 'auto' && box.right - right <= 1;
    const formula = element.matches('.katex-display') && own && edge;
    cut[formula ? 'scrolls' : 'wide'].push(line);
  }
  return cut;
}"""
# On a phone code wraps.
CODE = """() => {
  const faults = [];
  for (const pre of document.querySelectorAll('article .highlight pre')) {
    if (!pre.checkVisibility()) continue;
    if (!getComputedStyle(pre).whiteSpace.startsWith('pre-wrap'))
      faults.push('code does not wrap: ' + pre.textContent.slice(0, 50));
  }
  return [...new Set(faults)];
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
    page.wait_for_timeout(200)  # formulas.js marks what scrolls
    cut = page.evaluate(MEASURE)
    allowed = 0
    if width == PHONE:
        formulas = page.locator("article div.math").count()
        allowed = -(-formulas // FORMULAS_PER_SCROLLING_ONE)
        print(*cut["scrolls"], sep="\n")
    lines = cut["wide"] + (cut["scrolls"] if len(cut["scrolls"]) > allowed else [])
    lines += page.evaluate(CODE) if width == PHONE else []
    return [f"{width} px: {line}" for line in lines]


@pytest.mark.parametrize("page", REWRITTEN)
def test_nothing_is_cut(browser, site, page):  # noqa: F811
    with Visit(browser, address(site, page), "light") as visit:
        lines = [line for w in WIDTHS for line in width_faults(visit.page, w)]
        if page in MAIN:
            visit.page.set_viewport_size({"width": 1280, "height": SCREEN_HEIGHT})
            screens = visit.page.evaluate(HEIGHT) / SCREEN_HEIGHT
            if screens > SCREENS:
                lines.append(f"{screens:.1f} screens, more than {SCREENS}")
    none(lines)


WRAP = "white-space: pre-wrap"
LONG = "<i style='display: block; width: 1500px'>x</i>"
SCROLLS = "class='katex-display' style='overflow: auto hidden; {}'"
RIGHT = [
    f"<div class='highlight'><pre style='{WRAP}'>a line of code</pre></div>",
    f"<div class='math'><div {SCROLLS.format('border: 1px solid')}>{LONG}</div></div>",
]
WRONG = {
    "div.math": f"<div class='math'>{LONG}</div>",
    "div.katex-display": f"<div {SCROLLS.format('')}>{LONG}</div>",
    "table.": f"<table><tr><td>{LONG}</td></tr></table>",
    "p.": f"<p style='overflow: auto'>{LONG.replace('block', 'inline-block')}</p>",
    "figure.": f"<figure>{LONG}</figure>",
    "pre.": f"<pre style='overflow: auto'>{LONG}</pre>",
    "does not wrap": "<div class='highlight'><pre>x = 1</pre></div>",
}


def test_every_cut_is_found(browser, tmp_path):
    for name, parts in (("right", RIGHT), ("wrong", [*RIGHT, *WRONG.values()])):
        text = PAGE.format(f"<article>{''.join(parts)}</article>")
        (tmp_path / f"{name}.html").write_text(text)
    server = serve.start(tmp_path)
    url = f"http://127.0.0.1:{server.server_port}"
    found = {}
    for name in ("right", "wrong"):
        with Visit(browser, f"{url}/{name}.html", "light") as visit:
            found[name] = width_faults(visit.page, PHONE)
    server.shutdown()
    assert found["right"] == []
    wrong = [f for f in WRONG if not any(f in line for line in found["wrong"])]
    assert wrong == []
