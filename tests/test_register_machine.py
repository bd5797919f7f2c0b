"""The register machine on its page: the judge of its exercises, and the figure."""

import json

import bench
import built
import nbformat
import numpy as np
import pytest
import register_machine
from built import HTML, address, none
from visit import PHONE, Visit

from flashlib.machine import Machine, assemble, disassemble, programs
from flashlib.machine.exercises import EXERCISES, examples, judge
from flashlib.machine.search import min_cycles

KEY = "flashattention-book-machine"
# What the cells of some published solutions define.
SOLVED = {"assemble": assemble, "programs": programs, "Machine": Machine, "np": np}
for cell in nbformat.read(built.source_file("depth/machine"), as_version=4).cells:
    if cell.id in (
        "machine-depth-masked-check",
        "machine-depth-turn-run",
        "machine-depth-three-online-run",
    ):
        exec(cell.source.split("\nfor ")[0], SOLVED)
THREE = disassemble(SOLVED["step"])
WELFORD = disassemble(programs.welford_step(1))
# z + n m^2 + x^2 - n' m'^2: right on paper, but the squares cancel
SQUARES = """LOAD x[1], R0
MUL R1, R2, R4
MUL R4, R2, R2
ADD R3, R2, R3
ADD R4, R0, R4
MUL R0, R0, R0
ADD R3, R0, R3
LOAD one, R0
ADD R1, R0, R1
DIV R4, R1, R2
MUL R4, R2, R4
SUB R3, R4, R3
"""
SOLUTIONS = {
    "c00": disassemble(programs.dot(2)),
    "locality": disassemble(programs.inner_product(2)),
    "outer": disassemble(programs.outer_product(2)),
    "inner-six": disassemble(min_cycles(6, "any", sums=1).program),
    "safe": disassemble(programs.safe_softmax(3)),
    "online": disassemble(programs.online_step(1)),
    "eight": disassemble(SOLVED["two_steps"]),
    "turn": disassemble(SOLVED["turning_softmax"](4)),
    "three-online": THREE,
    "welford-program": WELFORD,
}
SEPARATE = "".join(disassemble(programs.dot(2, i, j)) for i in (0, 1) for j in (0, 1))
NINE = disassemble(programs.online_step(1) + programs.online_step(2))
# {(exercise, wrong program): what the judge says about it}
WRONG = {
    ("c00", SOLUTIONS["c00"].replace("b[1][0]", "b[0][1]")): "c[0][0] holds 17",
    ("c00", SOLUTIONS["c00"].replace("c[0][0]", "c[1][0]")): "Nothing is stored",
    ("c00", "LOAD a[0][0], R2\n" + SOLUTIONS["c00"]): "at most 7",
    ("locality", SEPARATE): "28 cycles; find a program with at most 27",
    ("outer", SOLUTIONS["locality"]): "25 cycles",
    ("inner-six", disassemble(min_cycles(6, "any").program)): "begins before",
    ("safe", SOLUTIONS["safe"].replace("MAX R0, R1, R1\n", "")): "holds",
    ("online", SOLUTIONS["online"].replace("MUL R2, R3, R2\n", "")): "R2 holds",
    ("eight", NINE): "18 cycles",
    ("turn", disassemble(programs.safe_softmax(4))): "12 loads",
    ("three-online", "LOAD x[1], R0\n" + THREE): "3 loads",
    ("welford-program", WELFORD.replace("MUL R0, R4", "MUL R4, R4")): (
        "R3 holds 78, expected 90, for x[1] = 16, one = 1, "
        "starting with R1 = 3, R2 = 8, R3 = 42."
    ),  # the new mean twice
    ("welford-program", SQUARES): (
        "R3 holds -512, expected 90, for x[1] = 1000000016, one = 1, "
        "starting with R1 = 3, R2 = 1000000008, R3 = 42."
    ),
    (
        "welford-program",
        WELFORD.replace("SUB R0, R4, R4", "LOAD x[1], R4\nSUB R4, R2, R4"),
    ): "The result is right. It takes 10 cycles; find a program with at most 9.",
}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_is_accepted(name):
    assert judge(EXERCISES[name], assemble(SOLUTIONS[name])) == ""


@pytest.mark.parametrize("name, text", WRONG)
def test_a_wrong_program_is_told_why(name, text):
    assert WRONG[name, text] in judge(EXERCISES[name], assemble(text))


def test_every_exercise_is_in_the_book():
    built.require_book()
    for name, shown in register_machine.exercises().items():
        page, _, label = shown["address"].partition("#")
        file = HTML / "book" / (page or "machine.html")
        assert f'id="{label}"' in file.read_text(), name
        assert not json.loads(bench.answer(name, shown["start"])).get("solved")


@pytest.mark.parametrize(
    "text, line, said",
    [
        ("# sum\n\nLOAD a[0][0], R0\nMAC R0", 4, "Line 4 (MAC R0): MAC takes 4"),
        ("LOAD x[0], R3", 1, "Line 1 (LOAD x[0], R3): expected a register"),
        ("# nothing", None, "There is no instruction yet."),
        ("LOAD x[0], R0\n" * 401, None, "at most 400 steps"),
    ],
)
def test_an_error_names_the_line(text, line, said):
    found = json.loads(bench.answer("", text))
    assert found["line"] == line and said in found["said"]


def test_a_machine_that_cannot_be_built_is_refused():
    for registers in (0, float("nan")):  # NaN is an empty field
        found = json.loads(bench.answer("", "LOAD x[0], R0", registers))
        assert found["line"] is None and found["said"].startswith("registers: expected")


# -- In the browser


class Bench:
    """The figure on a page."""

    def __init__(self, page):
        self.page, self.figure = page, page.locator("#machine-live")
        self.exercise = self.figure.get_by_label("exercise")
        self.editor = self.figure.get_by_role("textbox", name="program")
        self.stop = self.figure.get_by_role("button", name="Stop")

    def wait(self):
        """What the machine says about the program that runs."""
        stopped = "() => document.querySelector('.bench-stop').disabled"
        self.page.wait_for_function(stopped)
        return self.figure.get_by_role("status").first.inner_text()

    def run(self, text):
        self.editor.fill(text)
        self.figure.locator(".bench-run").click()
        return self.wait()

    @property
    def progress(self):
        return self.figure.locator(".bench-progress span").inner_text()


@pytest.fixture(scope="module")
def visit(browser, site):
    """The chapter, alone, with a machine that has been started."""
    visit = Visit(browser, address(site, "machine"), "light", alone=True)
    visit.page.wait_for_load_state("networkidle")
    asked = [response.url for response in visit.responses]
    assert not [url for url in asked if "pyodide" in url or "worker" in url]
    started = Bench(visit.page)
    visit.page.get_by_role("link", name="Try it").first.click()  # opens the figure
    started.figure.get_by_role("button", name="Start the machine (14 MB)").click()
    assert started.wait() == "7 cycles, 4 loads, 1 store."
    yield visit
    none(visit.complaints())
    visit.close()


@pytest.mark.parametrize(
    "program, registers, ports",
    [
        (programs.blocked_product(2, 2), 7, "any"),
        (programs.online_softmax(4), 4, "fixed"),
    ],
)
def test_the_page_counts_what_the_library_counts(visit, program, registers, ports):
    page = Bench(visit.page)
    page.exercise.select_option("")
    page.figure.locator(".bench-registers").fill(str(registers))
    page.figure.locator(".bench-ports").select_option(ports)
    said = page.run(disassemble(program))
    run = Machine(registers, ports).run(program, examples(0))
    assert said == f"{run.cycles} cycles, {run.loads} loads, {run.stores} stores."
    stepper = page.figure.locator("figure.stepper .stepper-live")
    assert stepper.get_by_text(f"0 / {run.cycles}").is_visible()


def test_an_error_is_shown_at_its_line(visit):
    page = Bench(visit.page)
    page.exercise.select_option("online")
    said = page.run("# one element\nLOAD x[1], R0\nMAX R0, R1\n")
    assert said.startswith("Line 3 (MAX R0, R1): MAX takes 3 operands")
    assert page.figure.locator("mark").inner_text().strip() == "3"
    assert page.editor.get_attribute("aria-invalid") is not None


def test_a_solved_exercise_is_remembered(visit):
    page = Bench(visit.page)
    page.exercise.select_option("locality")
    assert page.run(SEPARATE).endswith("find a program with at most 27.")
    assert page.progress == "0 of 10 solved, kept in this browser"
    said = page.run(SOLUTIONS["locality"])
    assert said == "25 cycles, 13 loads, 4 stores. Solved."
    assert page.progress == "1 of 10 solved, kept in this browser"
    visit.page.reload()  # its address opens the figure
    assert page.progress == "1 of 10 solved, kept in this browser"
    page.exercise.select_option("locality")
    assert page.editor.input_value() == SOLUTIONS["locality"]
    page.figure.get_by_role("button", name="Forget my programs").click()
    assert page.progress == "0 of 10 solved, kept in this browser"
    assert visit.page.evaluate(f"() => localStorage.getItem('{KEY}')") is None


def test_the_keyboard_is_enough_and_a_run_can_be_stopped(visit):
    """After a reload: the machine starts anew, from the browser's cache."""
    page, keys = Bench(visit.page), visit.page.keyboard
    visit.page.goto(visit.page.url.split("#")[0])
    page.figure.locator("summary").first.focus()
    keys.press("Enter")
    keys.press("Tab")
    keys.press("ArrowDown")
    assert page.exercise.input_value() == "c00"
    for _ in range(2):  # over the link to the exercise
        keys.press("Tab")
    assert page.editor.evaluate("editor => editor === document.activeElement")
    keys.press("Control+A")
    keys.insert_text(SOLUTIONS["c00"])
    keys.press("Control+Enter")
    keys.press("Tab")
    keys.press("Tab")
    assert page.stop.evaluate("stop => stop === document.activeElement")
    keys.press("Enter")
    assert page.wait() == "Stopped."
    keys.press("Enter")  # the focus is on the other button again
    assert page.wait() == "7 cycles, 4 loads, 1 store. Solved."
    page.figure.locator(".stepper-live").focus()
    keys.press("End")
    assert page.figure.get_by_text("7 / 7").is_visible()


def test_the_figure_is_right_in_all_modes(browser, site):
    """The result of a run is put on a page of its own: no second start."""
    with Visit(browser, address(site, "machine"), "light") as other:
        html = json.loads(bench.answer("", SOLUTIONS["locality"]))["figure"]
        other.page.evaluate(
            """html => {
              document.querySelector('.bench details').open = true;
              document.querySelector('.bench-result').innerHTML = html;
              document.dispatchEvent(new Event('stepper'));
            }""",
            html,
        )
        none(other.faults_in_all_modes())
        other.page.set_viewport_size(PHONE)
        width = other.page.locator("#machine-live").bounding_box()["width"]
        assert width <= PHONE["width"]


def test_a_page_without_the_machine_says_why(browser, site):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address(site, "machine"))
    page.locator(".bench summary").first.click()
    assert page.get_by_text("The machine needs JavaScript.").is_visible()
    assert page.locator("#machine-live textarea").is_disabled()
    context.close()
    page = browser.new_page()
    page.goto(built.page_file("machine").as_uri() + "#machine-live")
    assert "make serve" in page.locator(".bench-said").inner_text()
    assert page.locator(".bench-run").is_disabled()
    page.close()
