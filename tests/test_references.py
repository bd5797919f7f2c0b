"""Ways to a place in the book: the glossary, references in place, the search."""

import built
import terms
from built import address, none
from visit import Visit


def test_terms_are_found_as_whole_words():
    find = terms.finder(["SM", "lane", "thread block", "block"])
    text = "SMs, sm, Lanes and planes, thread blocks, a sub-block, lane.zip, a block."
    assert find.findall(text) == ["SM", "Lane", "thread block", "block"]


# The start of a reference, and what its tip must show.
SHOWN = {
    "#equation-": ".math",
    "standard.html#equation-": ".math",
    "#fig-": "img",
    "#alg-": ".proof p",
    "glossary.html#term-": "p",
    "bibliography.html#id": ".citation p",
}
# A page need not refer to a figure of its own, so the test writes the reference.
WRITE = """() => {
  const target = document.querySelector("figure[id^='fig-']");
  target.insertAdjacentHTML('afterend',
    `<p><a class="reference" href="#${target.id}">the figure</a></p>`);
}"""


def tip(page):
    return page.locator(".popover.tip")


def test_hovering_shows_the_target(browser, site):
    with Visit(browser, address(site, "gradients"), "light") as visit:
        page = visit.page
        page.evaluate(WRITE)
        page.clock.install()
        for href, inside in SHOWN.items():
            link = page.locator(f"article a.reference[href^='{href}']:visible").first
            link.hover()
            tip(page).wait_for()
            assert tip(page).locator(inside).first.is_visible(), href
            if inside == ".math":
                assert tip(page).locator(".eqno").inner_text() in link.inner_text()
            tip(page).hover()  # it stays while the pointer is on it
            page.clock.run_for(1000)
            assert tip(page).is_visible()
            page.mouse.move(0, 0)
            tip(page).wait_for(state="detached")
        none(visit.complaints())


def test_a_tip_works_by_keyboard_and_from_a_disk(browser):
    file = built.page_file("online")
    with Visit(browser, file.as_uri(), "light") as visit:
        page = visit.page
        link = page.locator("article a.reference[href^='bibliography.html#id']").first
        link.focus()
        tip(page).wait_for()
        assert link.get_attribute("aria-describedby") == tip(page).get_attribute("id")
        page.keyboard.press("Escape")
        tip(page).wait_for(state="detached")
        none(visit.errors)


# What is typed, and the start of the first results: a title, and its page in brackets.
FOUND = {
    "TMA": ["TMA (Glossary)"],
    "warp": ["warp (Glossary)", "warp group (Glossary)"],
    "ring": ["13. Ring attention", "13.D. Ring attention, in depth"],
    "P.1": ["Equation P.1 ("],
    "exercise 6.2": ["Exercise 6.2 ("],
    "causal masks": ["causal mask (Glossary)"],
    "softm": ["6. Softmax one block at a time"],
}


def test_search_finds_titles_and_terms_first(browser):
    file = built.HTML / "search.html"
    with Visit(browser, file.as_uri(), "light") as visit:
        page = visit.page
        for query, starts in FOUND.items():
            page.goto(f"{file.as_uri()}?q={query}")
            results = page.locator("#search-results li")
            results.nth(len(starts) - 1).wait_for()
            texts = [" ".join(text.split()) for text in results.all_inner_texts()]
            for text, start in zip(texts, starts, strict=False):
                assert text.startswith(start), (query, texts[:4])
        page.goto(f"{file.as_uri()}?q=TMA")
        results.first.wait_for()
        assert results.count() < 8  # not the pages with "softmax"
        results.first.locator("a").click()
        page.wait_for_url("**/book/glossary.html*")
        none(visit.errors)
