"""Sphinx extension: a quiz at the end of each chapter, and the links between chapters, quizzes, assignments.

    {quiz} <step>       the questions of book/quizzes/<step>.yml, then the link to the step's assignment
    {about} <step>      for the overview: time to read, progress in the quiz, the assignment
    {assignments}       the table of all assignments with points and minutes

A file of questions is a YAML list. Questions and choices are one paragraph of Markdown each, with maths:

    - id: scale                          # unique in the file
      ask: Why are the scores divided by $\\sqrt d$?
      choices:                           # three or four
        - So that ...
        - right: So that ...             # the right one, once
        - So that ...
      read: eq-standard-unit-variance    # what to read again: a label or a heading of the same page
      answer: 4 * T**2                   # optional: an expression that tests/test_quiz.py evaluates

The page holds no answer, only a short hash of it. That hides the answer from a glance at the source and no
more: four choices are tried in no time. Nothing here counts for marks. `_static/quiz.js` does the rest in the
reader's browser. Without it the questions can be read, and each names the place to read again.
"""

import json
import re
from pathlib import Path

import practice
import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.errors import ExtensionError
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"id", "ask", "choices", "read", "answer"}

log = logging.getLogger(__name__)


def hashed(text):
    """FNV-1a of a text, 32 bits in hexadecimal; quiz.js has the same."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:08x}"


class Question:
    """One question of a file: id, ask, choices, right (from 1), read, answer (None without one)."""

    def __init__(self, step, raw, where):
        if not isinstance(raw, dict) or set(raw) - KEYS or KEYS - {"answer"} - set(raw):
            found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
            raise ValueError(f"{where}: expected the keys id, ask, choices, read (and answer), got {found}")
        if not isinstance(raw["id"], str) or not re.fullmatch(r"[a-z][a-z0-9-]*", raw["id"]):
            raise ValueError(f"{where}: id must be lower-case letters, digits and hyphens, got {raw['id']!r}")
        self.id, where = f"{step}-{raw['id']}", f"{where} ({raw['id']})"
        self.ask = paragraph(raw["ask"], f"{where}: ask")
        self.read = paragraph(raw["read"], f"{where}: read")
        self.answer = raw.get("answer")
        listed = raw["choices"]
        if not isinstance(listed, list) or not 3 <= len(listed) <= 4:
            raise ValueError(f"{where}: expected three or four choices, got {listed!r}")
        marked = [number for number, choice in enumerate(listed, 1) if isinstance(choice, dict)]
        if len(marked) != 1 or set(listed[marked[0] - 1]) != {"right"}:
            raise ValueError(f"{where}: exactly one choice must be marked `right:`, got {len(marked)}")
        self.right = marked[0]
        texts = [choice["right"] if isinstance(choice, dict) else choice for choice in listed]
        self.choices = [paragraph(text, f"{where}: choice {number}") for number, text in enumerate(texts, 1)]
        if len(set(self.choices)) != len(self.choices):
            raise ValueError(f"{where}: two choices are the same")

    @property
    def mark(self):
        """Changes when the question does, so that an old answer is forgotten."""
        return hashed("\n".join([self.ask, *self.choices]))

    @property
    def key(self):
        """The hash of the right answer."""
        return hashed(f"{self.id}:{self.right}")


def paragraph(text, where):
    """The text as one paragraph; ValueError where it is none."""
    if not isinstance(text, str | int | float) or isinstance(text, bool) or not str(text).strip():
        raise ValueError(f"{where}: expected a text, got {text!r}")
    text = str(text).strip()
    if re.search(r"\n\s*\n", text):
        raise ValueError(f"{where}: expected one paragraph")
    return " ".join(text.split())


def questions(path):
    """The Questions of a file.

    Raises ValueError, naming the file and the question, for whatever is wrong with it.
    """
    step = path.stem
    if not path.is_file():
        raise ValueError(f"{path.name}: there is no such file in {path.parent.name}/")
    try:
        listed = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{path.name}: expected a list of questions")
    made = [Question(step, raw, f"{path.name}, question {n}") for n, raw in enumerate(listed, 1)]
    if len({question.id for question in made}) != len(made):
        raise ValueError(f"{path.name}: two questions have the same id")
    return made


# ----------------------------------------------------------------------------------------------------
# From Markdown to nodes


class quiz_box(nodes.General, nodes.Element):
    """The quiz of a page."""


class quiz_question(nodes.General, nodes.Element):
    """One question; its children are the text that asks, the choices, and the place to read again."""


class quiz_ask(nodes.Part, nodes.TextElement):
    """What is asked."""


class quiz_choice(nodes.Part, nodes.TextElement):
    """One choice."""


class quiz_again(nodes.Part, nodes.TextElement):
    """The place to read again; resolved when all labels are known."""


class quiz_progress(nodes.Inline, nodes.TextElement):
    """How many questions of a step there are; the script adds how many have been answered."""


class StepDirective(SphinxDirective):
    """A directive whose argument is a step of the book."""

    required_arguments = 1

    def step(self):
        step = self.arguments[0].strip()
        if step not in practice.STEPS:
            expected = ", ".join(practice.STEPS)
            raise ExtensionError(f"{{{self.name}}}: expected one of {expected}, got {step!r}")
        self.depends_on(self.path(step), practice.notebook_of(step))
        return step

    def depends_on(self, *paths):
        for path in paths:
            self.env.note_dependency(str(path))

    def path(self, step):
        return ROOT / "book/quizzes" / f"{step}.yml"

    def questions(self, step):
        try:
            return questions(self.path(step))
        except ValueError as error:
            raise ExtensionError(f"quiz: {error}") from None

    def parsed(self, text):
        """The nodes of a Markdown text."""
        box = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), "quiz"), self.lineno, box)
        return box.children

    def inline(self, kind, text, **attributes):
        """A node of a kind with the inline nodes of a Markdown paragraph."""
        found = self.parsed(text)
        if len(found) != 1 or not isinstance(found[0], nodes.paragraph):
            raise ExtensionError(f"quiz: expected one paragraph of plain Markdown, got {text!r}")
        return kind("", "", *found[0].children, **attributes)


class Quiz(StepDirective):
    def run(self):
        step = self.step()
        box = quiz_box(step=step)
        for number, question in enumerate(self.questions(step), 1):
            made = quiz_question(id=question.id, mark=question.mark, key=question.key)
            made += self.inline(quiz_ask, question.ask, number=number)
            for value, choice in enumerate(question.choices, 1):
                made += self.inline(quiz_choice, choice, name=question.id, value=value)
            again = quiz_again(target=question.read, of=question.id)
            again.source, again.line = str(self.path(step)), None
            made += again
            box += made
        about = practice.about(step)
        if about is None:
            return [box]
        zipped = zip_link(step, f"{step}.zip")
        text = f"**Write it yourself.** The assignment *{about.title}* is {zipped}: {facts(about)}."
        return [box, *self.parsed(text)]


class About(StepDirective):
    def run(self):
        step = self.step()
        source = f"book/{step}"
        if source not in self.env.found_docs:
            return self.parsed("- The chapter is not written yet.")
        self.depends_on(ROOT / f"{source}.ipynb")
        (points,) = self.parsed(
            f"- [The chapter]({step}.ipynb): {time_to_read(step)}\n- Its quiz:\n" + assignment_line(step)
        )
        points["classes"].append("about-step")
        listed = self.questions(step)
        progress = [[question.id, question.mark, question.key] for question in listed]
        points[1][0] += [nodes.Text(" "), quiz_progress("", f"{len(listed)} questions", progress=progress)]
        return [points]


class Assignments(StepDirective):
    required_arguments = 0

    def run(self):
        rows = ["| step | assignment | tasks | points | minutes |", "|---|---|--:|--:|--:|"]
        totals = [0, 0, 0]
        for step in practice.STEPS:
            about = practice.about(step)
            self.depends_on(practice.notebook_of(step))
            if about:
                numbers = " | ".join(map(str, about[1:]))
                rows.append(f"| `{step}` | {zip_link(step, about.title)} | {numbers} |")
                totals = [a + b for a, b in zip(totals, about[1:], strict=True)]
        rows.append("| all | | " + " | ".join(map(str, totals)) + " |")
        return self.parsed("\n".join(rows))


def zip_link(step, text):
    """A link to a step's zip, from a page of book/. HTML, since MyST takes an address for a source file."""
    return f'<a href="../assignments/{step}.zip" download>{text}</a>'


def facts(about):
    return f"about {about.minutes} minutes, {about.tasks} tasks"


def assignment_line(step):
    """The item of a list that leads to a step's assignment, or nothing where there is none."""
    about = practice.about(step)
    return f"- Its assignment: {zip_link(step, f'{step}.zip')}, {facts(about)}" if about else ""


def time_to_read(step):
    """What a chapter says of the time it takes, for the middle of a line.

    Raises ExtensionError where it says nothing.
    """
    cells = json.loads((ROOT / f"book/{step}.ipynb").read_text())["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    found = re.search(r"\*\*How long it takes\.\*\* ([^.]+)\.", text)
    if not found:
        raise ExtensionError(f"{{about}} {step}: the chapter does not say **How long it takes.**")
    return found[1][0].lower() + found[1][1:]


class ReadAgain(SphinxPostTransform):
    """Turn the places to read again into links, or say which one is not on the page."""

    default_priority = 4  # before MyST resolves references

    def run(self, **kwargs):
        for again in list(self.document.findall(quiz_again)):
            found = place(self.env, self.document, again["target"])
            if found is None:
                log.warning(
                    "%s: there is no label or heading %r on this page to read again",
                    again["of"], again["target"], location=self.env.docname,
                )  # fmt: skip
                continue
            address, text = found
            again += [
                nodes.Text("To read again: "),
                nodes.reference("", text, internal=True, refuri=f"#{address}"),
            ]


def place(env, document, target):
    """(id, text) of a label or heading of a page, the text being the heading above it; None without one."""
    equation = env.get_domain("math").equations.get(target)
    if equation and equation[0] == env.docname:
        node, address = find(document, f"equation-{target}"), f"equation-{target}"
        return (address, f"{heading(node)} (equation {number_of(env, target)})") if node is not None else None
    node = find(document, target)
    if node is not None:
        return target, heading(node)
    for title in document.findall(nodes.title):
        if isinstance(title.parent, nodes.section) and title.astext() == target.replace("$", ""):
            return title.parent["ids"][0], title.astext()
    return None


def find(document, name):
    """The node of a document with an id, or None."""
    return next((node for node in document.findall(nodes.Element) if name in node.get("ids", ())), None)


def heading(node):
    """The text of the heading that a node stands under; a heading's own for its section."""
    while True:
        title = next((child for child in node.children if isinstance(child, nodes.title)), None)
        if title is not None and isinstance(node, nodes.section):
            return title.astext()
        node = node.parent


def number_of(env, label):
    """The number of an equation as the page shows it, such as 2.3."""
    docname, number = env.get_domain("math").equations[label]
    chapter = env.toc_fignumbers.get(docname, {}).get("displaymath", {}).get(f"equation-{label}")
    return ".".join(map(str, chapter)) if chapter else str(number)


# ----------------------------------------------------------------------------------------------------
# From nodes to HTML


def start_box(self, node):
    self.body.append(self.starttag(
        node, "div", CLASS="quiz", role="group", **{"aria-label": "Quiz", "data-quiz": node["step"]}
    ))  # fmt: skip


def start_question(self, node):
    data = {"data-id": node["id"], "data-mark": node["mark"], "data-key": node["key"]}
    self.body.append(self.starttag({}, "fieldset", CLASS="quiz-question", **data))


def start_ask(self, node):
    number = f'<span class="quiz-number">{node["number"]}. </span>'
    self.body.append(self.starttag({}, "legend", "", CLASS="quiz-ask") + number)


def start_choice(self, node):
    button = f'<input type="radio" name="{node["name"]}" value="{node["value"]}"/>'
    letter = f'<span class="quiz-letter">{"ABCD"[node["value"] - 1]}</span>'
    self.body.append(self.starttag({}, "label", "", CLASS="quiz-choice") + button + letter + "<span>")


def start_again(self, node):
    # The script writes what it has to say into the first of these two.
    self.body.append('<p class="quiz-said" role="status"></p>\n<p class="quiz-again">')


def start_progress(self, node):
    data = json.dumps(node["progress"], separators=(",", ":"))
    self.body.append(self.starttag({}, "span", "", CLASS="quiz-progress", **{"data-progress": data}))


def ends(text):
    return lambda self, node: self.body.append(text)


def setup(app):
    for node, start, end in (
        (quiz_box, start_box, "</div>\n"),
        (quiz_question, start_question, "</fieldset>\n"),
        (quiz_ask, start_ask, "</legend>\n"),
        (quiz_choice, start_choice, "</span></label>\n"),
        (quiz_again, start_again, "</p>\n"),
        (quiz_progress, start_progress, "</span>"),
    ):
        app.add_node(node, html=(start, ends(end)))
    app.add_directive("quiz", Quiz)
    app.add_directive("about", About)
    app.add_directive("assignments", Assignments)
    app.add_post_transform(ReadAgain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
