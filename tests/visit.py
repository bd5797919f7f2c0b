"""A page of the book in a browser, judged by axe and by the page itself."""

import contextlib
from functools import cache
from pathlib import Path

import axe_playwright_python
from playwright.sync_api import TimeoutError

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
MODES = {
    "light": {"color_scheme": "light", "viewport": WIDE},
    "dark": {"color_scheme": "dark", "viewport": WIDE},
    "phone": {"color_scheme": "light", "viewport": PHONE, "has_touch": True},
}
# The theme keeps the logo and the search outside every landmark; no page can mend it.
ALLOWED = {"region"}

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


# Observers of sizes run after the layout of a frame, so before the frame that follows.
NEXT_FRAME = """() => new Promise(done =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""
