"""The quizzes of the built book in a browser: answered, kept, forgotten, downloaded."""

import re
import zipfile

import built
import practice
import quiz
from built import HTML, PAGES, ROOT, address, none
from visit import PHONE, Visit

CHAPTERS = [step for step in practice.STEPS if step in PAGES]
ASSIGNED = [step for step in practice.STEPS if practice.notebook_of(step).is_file()]
KEY = "flashattention-book-quizzes"


def questions(step):
    return quiz.questions(ROOT / f"book/quizzes/{step}.yml")


def wrong(question):
    """The number of a choice that is not right."""
    return question.right % len(question.choices) + 1


def field(page, question):
    return page.locator(f'.quiz-question[data-id="{question.id}"]')


def choose(page, question, number):
    """Choose an answer; returns what the quiz says about it."""
    box = field(page, question)
    box.locator(f'input[value="{number}"]').check()
    return box.locator(".quiz-said").inner_text()


def score(page):
    return page.locator(".quiz-tools span").inner_text()


def test_wrong_choices_lead_to_the_text_and_right_ones_count(browser, site):
    listed = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        page = visit.page
        for question in listed:
            assert choose(page, question, wrong(question)) == "Not this one."
            link = field(page, question).locator(".quiz-again a")
            assert link.is_visible()
            target = page.locator(link.get_attribute("href"))
            assert target.count() == 1, question.id
        link.click()
        assert target.is_visible()
        for number, question in enumerate(listed):
            assert score(page) == f"{number} of {len(listed)} right"
            assert choose(page, question, question.right) == "Right."
        assert score(page) == f"{len(listed)} of {len(listed)} right"
        assert page.locator(".quiz-again:visible").count() == 0
        none(visit.complaints())


def test_answers_stay_and_can_be_forgotten(browser, site):
    first, second, *_ = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        page = visit.page
        choose(page, first, first.right)
        choose(page, second, wrong(second))
        page.reload()
        checked = field(page, first).locator("input:checked")
        assert checked.get_attribute("value") == str(first.right)
        assert field(page, second).locator(".quiz-said").inner_text() == "Not this one."
        assert score(page).startswith("1 of")

        page.goto(address(site, "overview"))
        shown = page.locator(".quiz-progress").all_text_contents()
        counts = ["1" if step == "online" else "0" for step in CHAPTERS]
        assert [text.split()[0] for text in shown] == counts
        page.goto(address(site, "online"))
        page.get_by_role("button", name="Forget my answers").click()
        assert page.locator(".quiz input:checked").count() == 0
        assert score(page).startswith("0 of")
        assert page.evaluate(f"() => localStorage.getItem('{KEY}')") == "{}"

        choose(page, first, first.right)
        page.goto(address(site, "overview"))
        page.get_by_role("button", name="Forget all my answers").click()
        assert score(page).startswith("0 of")
        page.go_back()
        assert score(page).startswith("0 of"), "a forgotten answer is back"
        none(visit.errors)  # leaving a page breaks off its requests


def test_strange_answers_are_ignored_and_storage_is_not_needed(browser, site):
    first, *_ = questions("online")
    old = f'{{"{first.id}": ["00000000", "{first.right}"]}}'  # of a changed question
    with Visit(browser, address(site, "online"), "light") as visit:
        page = visit.page
        for stored in (old, "[not ours"):
            page.evaluate(f"text => localStorage.setItem('{KEY}', text)", stored)
            page.reload()
            assert page.locator(".quiz input:checked").count() == 0
            assert score(page).startswith("0 of")
        refuse = "Storage.prototype[name] = () => { throw Error('no storage') }"
        names = "const name of ['getItem', 'setItem']"
        page.evaluate(f"() => {{ for ({names}) {refuse} }}")
        choose(page, first, first.right)
        assert "1 of" in score(page) and "until you leave" in score(page)


def test_the_keyboard_is_enough(browser, site):
    first, *_ = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        page = visit.page
        page.locator(".quiz input").first.focus()
        page.keyboard.press("Space")
        for _ in range(first.right - 1):
            page.keyboard.press("ArrowDown")
        assert field(page, first).locator(".quiz-said").inner_text() == "Right."
        outline = "() => getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid", "the focus does not show"
        page.locator(".quiz-forget").focus()
        page.keyboard.press("Enter")
        assert score(page).startswith("0 of")


def test_an_answered_quiz_is_right_in_every_mode(browser, site):
    first, second, *_ = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        choose(visit.page, first, first.right)
        choose(visit.page, second, wrong(second))
        none(visit.faults_in_all_modes())
        visit.page.set_viewport_size(PHONE)
        width = visit.page.locator(".quiz").bounding_box()["width"]
        assert width <= PHONE["width"]


def test_questions_can_be_read_without_javascript_and_in_print(browser, site):
    listed = questions("online")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address(site, "online"))
    for question in listed:
        box = field(page, question)
        assert box.locator("legend").is_visible()
        assert box.locator(".quiz-again a").is_visible()
        assert box.locator("label").count() == len(question.choices)
    context.close()
    with Visit(browser, address(site, "online"), "light") as visit:
        choose(visit.page, listed[0], listed[0].right)
        visit.page.emulate_media(media="print")
        assert visit.page.locator(".quiz-again:visible").count() == len(listed)
        hidden = visit.page.locator(".quiz-tools:visible, .quiz-said:visible")
        assert hidden.count() == 0


def test_the_site_links_the_zips_of_assignments_and_holds_no_solution():
    built.require_book()
    marks = re.compile(rb"BEGIN SOLUTION|BEGIN HIDDEN")
    kinds = (".html", ".ipynb", ".js", ".py", ".txt", ".yml")
    texts = [path for path in HTML.rglob("*") if path.suffix in kinds]
    assert texts and not [path for path in texts if marks.search(path.read_bytes())]
    zips = sorted((HTML / "assignments").glob("*.zip"))
    assert [path.stem for path in zips] == sorted(ASSIGNED)
    overview = built.page_file("overview").read_text()
    linked = re.findall(r'href="\.\./assignments/(\w+)\.zip"', overview)
    assert linked == [step for step in ASSIGNED if step in PAGES]
    for path in zips:
        with zipfile.ZipFile(path) as zipped:
            for name in zipped.namelist():
                assert not marks.search(zipped.read(name)), name
