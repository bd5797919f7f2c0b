"""The quizzes of the built book in a real browser: answered, kept, forgotten, in every mode."""

import re
import zipfile

import built
import practice
import pytest
import quiz
import test_browser
from built import HTML, PAGES, ROOT
from test_browser import MODES, Visit, address, none

site = test_browser.site
CHAPTERS = [step for step in practice.STEPS if step in PAGES]
KEY = "flashattention-book-quizzes"


def questions(step):
    return quiz.questions(ROOT / f"book/quizzes/{step}.yml")


def wrong(question):
    """The number of a choice that is not right."""
    return question.right % len(question.choices) + 1


def field(page, question):
    return page.locator(f'.quiz-question[data-id="{question.id}"]')


def choose(page, question, number):
    field(page, question).locator(f'input[value="{number}"]').check()


def score(page):
    return page.locator(".quiz-tools span").inner_text()


@pytest.mark.parametrize(
    "step", ["online", *(pytest.param(s, marks=pytest.mark.slow) for s in CHAPTERS if s != "online")]
)
def test_the_right_choices_are_right(browser, site, step):
    with Visit(browser, address(site, step), "light") as visit:
        listed = questions(step)
        assert score(visit.page) == f"0 of {len(listed)} right"
        for number, question in enumerate(listed, 1):
            choose(visit.page, question, question.right)
            assert field(visit.page, question).locator(".quiz-said").inner_text() == "Right."
            assert score(visit.page) == f"{number} of {len(listed)} right"
        assert visit.page.locator(".quiz-again:visible").count() == 0
        none(visit.off_site + visit.bad + visit.errors)


def test_a_wrong_choice_leads_to_the_place_to_read_again(browser, site):
    with Visit(browser, address(site, "online"), "light") as visit:
        for question in questions("online"):
            box = field(visit.page, question)
            choose(visit.page, question, wrong(question))
            assert box.locator(".quiz-said").inner_text() == "Not this one."
            link = box.locator(".quiz-again a")
            assert link.is_visible()
            target = visit.page.locator(link.get_attribute("href"))
            assert target.count() == 1, question.id
        link.click()
        assert target.is_visible()
        assert score(visit.page).startswith("0 of")
        choose(visit.page, question, question.right)
        assert not link.is_visible() and score(visit.page).startswith("1 of")


def test_answers_stay_and_can_be_forgotten(browser, site):
    first, second, *_ = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        page = visit.page
        choose(page, first, first.right)
        choose(page, second, wrong(second))
        page.reload()
        page.evaluate(test_browser.SETTLED)
        assert field(page, first).locator("input:checked").get_attribute("value") == str(first.right)
        assert field(page, first).locator(".quiz-said").inner_text() == "Right."
        assert field(page, second).locator(".quiz-said").inner_text() == "Not this one."
        assert score(page).startswith("1 of")

        page.goto(address(site, "overview"))
        shown = page.locator(".quiz-progress").all_inner_texts()
        assert [text.split()[0] for text in shown] == ["1" if s == "online" else "0" for s in CHAPTERS]
        page.goto(address(site, "online"))
        page.get_by_role("button", name="Forget my answers").click()
        assert page.locator(".quiz input:checked").count() == 0 and score(page).startswith("0 of")
        assert page.evaluate(f"() => localStorage.getItem('{KEY}')") == "{}"

        choose(page, first, first.right)
        page.goto(address(site, "overview"))
        assert score(page).startswith("1 of")
        page.get_by_role("button", name="Forget all my answers").click()
        assert score(page).startswith("0 of")
        page.go_back()
        assert score(page).startswith("0 of"), "the page before shows an answer that was forgotten"
        none(visit.off_site + visit.bad + visit.errors)


def test_a_question_that_has_changed_is_asked_again(browser, site):
    first, *_ = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        old = {first.id: ["00000000", str(first.right)]}
        visit.page.evaluate("([key, old]) => localStorage.setItem(key, JSON.stringify(old))", [KEY, old])
        visit.page.reload()
        assert visit.page.locator(".quiz input:checked").count() == 0 and score(visit.page).startswith("0 of")
        visit.page.evaluate(f"() => localStorage.setItem('{KEY}', '[not ours')")
        visit.page.reload()
        choose(visit.page, first, first.right)
        assert score(visit.page).startswith("1 of")
        none(visit.errors)


def test_without_storage_answers_last_until_the_page_is_left(browser, site):
    first, *_ = questions("online")
    with Visit(browser, address(site, "online"), "light") as visit:
        refuse = "Storage.prototype[name] = () => { throw Error('no storage') };"
        visit.page.evaluate(f"() => {{ for (const name of ['getItem', 'setItem']) {refuse} }}")
        choose(visit.page, first, first.right)
        assert "1 of" in score(visit.page) and "until you leave" in score(visit.page)


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


@pytest.mark.parametrize("mode", MODES)
def test_an_answered_quiz_is_right_in_every_mode(browser, site, mode):
    with Visit(browser, address(site, "flash1" if "flash1" in PAGES else "online"), mode) as visit:
        step = visit.page.locator(".quiz").get_attribute("data-quiz")
        for number, question in enumerate(questions(step)):
            if number < 2:
                choose(visit.page, question, wrong(question) if number else question.right)
        none(visit.faults())
        box = visit.page.locator(".quiz").bounding_box()
        assert box["width"] <= MODES[mode]["viewport"]["width"]


def test_without_javascript_and_in_print_the_questions_can_be_read(browser, site):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address(site, "online"))
    listed = questions("online")
    for question in listed:
        box = field(page, question)
        assert box.locator("legend").is_visible() and box.locator(".quiz-again a").is_visible()
        assert box.locator("label").count() == len(question.choices)
    context.close()
    with Visit(browser, address(site, "online"), "light") as visit:
        choose(visit.page, listed[0], listed[0].right)
        visit.page.emulate_media(media="print")
        assert visit.page.locator(".quiz-again:visible").count() == len(listed)
        assert visit.page.locator(".quiz-tools:visible, .quiz-said:visible").count() == 0


def test_zips_of_assignments_can_be_downloaded(browser, site, tmp_path):
    steps = [step for step in practice.STEPS if practice.notebook_of(step).is_file()]
    with Visit(browser, address(site, "overview"), "light") as visit:
        links = visit.page.locator("article a[href$='.zip']")
        assert links.all_inner_texts() == [f"{step}.zip" for step in steps if step in PAGES]
        with visit.page.expect_download() as download:
            links.first.click()
        download.value.save_as(tmp_path / "one.zip")
    with zipfile.ZipFile(tmp_path / "one.zip") as zipped:
        assert f"{steps[0]}/{steps[0]}.ipynb" in zipped.namelist()
    for step in set(steps) & set(PAGES):
        text = built.article(built.parsed(built.page_file(step))).get_text()
        assert f"about {practice.about(step).minutes} minutes" in text


def test_the_site_holds_no_solution_of_an_assignment():
    built.require_book()
    marks = re.compile(rb"BEGIN SOLUTION|BEGIN HIDDEN")
    kinds = (".html", ".ipynb", ".js", ".py", ".txt", ".yml")
    texts = [path for path in HTML.rglob("*") if path.suffix in kinds]
    assert texts and not [path for path in texts if marks.search(path.read_bytes())]
    zips = sorted((HTML / "assignments").glob("*.zip"))
    steps = [step for step in practice.STEPS if practice.notebook_of(step).is_file()]
    assert [path.stem for path in zips] == sorted(steps)
    for path in zips:
        with zipfile.ZipFile(path) as zipped:
            assert not [name for name in zipped.namelist() if marks.search(zipped.read(name))]
