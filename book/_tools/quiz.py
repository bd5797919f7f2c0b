"""Sphinx extension: the quiz at the end of each chapter, and links to assignments.

    {quiz} <step>       the questions of book/quizzes/<step>.yml and the assignment
    {about} <step>      for the overview: time to read, progress in the quiz, assignment
    {assignments}       the table of all assignments with points and minutes

A file of questions is a YAML list. Questions and choices are one paragraph of Markdown
each, with math:

    - id: scale                          # unique in the file
      ask: Why are the scores divided by $\\sqrt d$?
      choices:                           # three or four
        - So that ...
        - right: So that ...             # the right one, once
        - So that ...
      read: eq-standard-unit-variance    # a label or heading of the same page
      answer: 4 * T**2                   # optional: tests/test_quiz.py evaluates it

The page has no answer, only a short hash of it, which hides the answer from a glance at
the source and no more. Nothing here counts for marks. `_static/quiz.js` does the rest
in the browser; without it the questions can be read, and each names what to reread.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

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


class Question(NamedTuple):
    """One question of a file."""

    id: str
    ask: str
    choices: list
    right: int  # from 1
    read: str
    answer: str | None

    @property
    def mark(self):
        """Changes with the question, so that an old answer is forgotten."""
        return hashed("\n".join([self.ask, *self.choices]))

    @property
    def key(self):
        """The hash of the right answer."""
        return hashed(f"{self.id}:{self.right}")


def question(step, raw, where):
    """The Question in one item of a file; ValueError if something is wrong with it."""

    def expect(condition, what, got):
        if not condition:
            raise ValueError(f"{where}: expected {what}, got {got!r}")

    def paragraph(key, value):
        expect(isinstance(value, str | int | float), f"a text for {key}", value)
        text = str(value).strip()
        one = text and not re.search(r"\n\s*\n", text)
        expect(one, f"one paragraph for {key}", value)
        return " ".join(text.split())

    keys = set(raw) if isinstance(raw, dict) else {type(raw).__name__}
    expect(keys | {"answer"} == KEYS, "the keys id, ask, choices, read (answer)", keys)
    expect(
        re.fullmatch(r"[a-z][a-z0-9-]*", str(raw["id"])), "an id like a-1", raw["id"]
    )
    listed = raw["choices"]
    several = isinstance(listed, list) and 3 <= len(listed) <= 4
    expect(several, "three or four choices", listed)
    marked = [n for n, choice in enumerate(listed, 1) if isinstance(choice, dict)]
    right = len(marked) == 1 and set(listed[marked[0] - 1]) == {"right"}
    expect(right, "exactly one choice with `right:`", listed)
    texts = [
        choice["right"] if isinstance(choice, dict) else choice for choice in listed
    ]
    choices = [paragraph("a choice", text) for text in texts]
    expect(len(set(choices)) == len(choices), "different choices", choices)
    ask, read = paragraph("ask", raw["ask"]), paragraph("read", raw["read"])
    return Question(
        f"{step}-{raw['id']}", ask, choices, marked[0], read, raw.get("answer")
    )


def questions(path):
    """The Questions of a file; ValueError, naming file and question, if it is wrong."""
    try:
        listed = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{path.name}: expected a list of questions")
    found = [
        question(path.stem, raw, f"{path.name}, question {n}")
        for n, raw in enumerate(listed, 1)
    ]
    if len({question.id for question in found}) != len(found):
        raise ValueError(f"{path.name}: two questions have the same id")
    return found


# -- From Markdown to nodes


class quiz_box(nodes.General, nodes.Element): ...  # the quiz of a page


class quiz_question(nodes.General, nodes.Element): ...  # ask, choices, again


class quiz_ask(nodes.Part, nodes.TextElement): ...


class quiz_choice(nodes.Part, nodes.TextElement): ...


class quiz_again(nodes.Part, nodes.TextElement): ...  # what to reread


class quiz_progress(nodes.Inline, nodes.TextElement): ...  # of a step, in the overview


class StepDirective(SphinxDirective):
    """A directive whose argument is a step of the book."""

    required_arguments = 1

    def step(self):
        step = self.arguments[0].strip()
        if step not in practice.STEPS:
            expected = ", ".join(practice.STEPS)
            message = f"{{{self.name}}}: expected one of {expected}, got {step!r}"
            raise ExtensionError(message)
        return step

    def path(self, step):
        return ROOT / "book/quizzes" / f"{step}.yml"

    def questions(self, step):
        self.env.note_dependency(str(self.path(step)))
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
            raise ExtensionError(f"quiz: expected one paragraph, got {text!r}")
        return kind("", "", *found[0].children, **attributes)


class Quiz(StepDirective):
    def run(self):
        step = self.step()
        box = quiz_box(step=step)
        for number, asked in enumerate(self.questions(step), 1):
            part = quiz_question(id=asked.id, mark=asked.mark, key=asked.key)
            part += self.inline(quiz_ask, asked.ask, number=number)
            for value, choice in enumerate(asked.choices, 1):
                part += self.inline(quiz_choice, choice, name=asked.id, value=value)
            part += quiz_again(target=asked.read, of=asked.id)
            box += part
        about = practice.about(step)
        if about is None:
            return [box]
        zipped = zip_link(step, f"{step}.zip")
        text = f"The assignment is *{about.title}* ({zipped}; {facts(about)})."
        return [box, *self.parsed(f"**Write it yourself.** {text}")]


class About(StepDirective):
    def run(self):
        step = self.step()
        if f"book/{step}" not in self.env.found_docs:
            return self.parsed("- This chapter is not written yet.")
        time = f"{{minutes}}`{step}`"
        lines = [f"- [The chapter]({step}.ipynb): {time}", "- Its quiz:"]
        if about := practice.about(step):
            zipped = zip_link(step, f"{step}.zip")
            lines.append(f"- Its assignment: {zipped}, {facts(about)}")
        (points,) = self.parsed("\n".join(lines))
        points["classes"].append("about-step")
        listed = self.questions(step)
        progress = [[asked.id, asked.mark, asked.key] for asked in listed]
        count = f"{len(listed)} questions"
        points[1][0] += [nodes.Text(" "), quiz_progress("", count, progress=progress)]
        return [points]


class Assignments(StepDirective):
    required_arguments = 0

    def run(self):
        found = {step: practice.about(step) for step in practice.STEPS}
        found = {step: about for step, about in found.items() if about}
        rows = [
            "| assignment | tasks | points | minutes |",
            "|---|--:|--:|--:|",
        ]
        for step, about in found.items():
            numbers = " | ".join(map(str, about[1:]))
            rows.append(f"| {zip_link(step, about.title)} `{step}` | {numbers} |")
        totals = map(sum, zip(*(about[1:] for about in found.values()), strict=True))
        rows.append("| all | " + " | ".join(map(str, totals)) + " |")
        return self.parsed("\n".join(rows))


def zip_link(step, text):
    """A link to a step's zip; HTML, for MyST takes an address for a source file."""
    return f'<a href="../assignments/{step}.zip" download>{text}</a>'


def facts(about):
    return f"about {about.minutes} minutes, {about.tasks} tasks"


class ReadAgain(SphinxPostTransform):
    """Turn what to reread into links, or warn that it is not on the page."""

    default_priority = 4  # before MyST resolves references

    def run(self, **kwargs):
        for again in list(self.document.findall(quiz_again)):
            address, text = place(self.env, self.document, again["target"])
            if address is None:
                log.warning(
                    "%s: there is no label or heading %r on this page to reread",
                    again["of"],
                    again["target"],
                    location=self.env.docname,
                )
                continue
            link = nodes.reference("", text, internal=True, refuri=f"#{address}")
            again += [nodes.Text("Reread: "), link]


def place(env, document, target):
    """(id, text) of a label or heading of a page, (None, None) without one."""
    ids = {
        i: node for node in document.findall(nodes.Element) for i in node.get("ids", ())
    }
    equation = f"equation-{target}"
    if target in env.get_domain("math").equations and equation in ids:
        numbers = env.toc_fignumbers.get(env.docname, {}).get("displaymath", {})
        _, number = env.get_domain("math").equations[target]
        number = ".".join(map(str, numbers.get(equation, [number])))
        return equation, f"{heading(ids[equation])} (equation {number})"
    if target in ids:
        return target, heading(ids[target])
    for title in document.findall(nodes.title):
        same = title.astext() == target.replace("$", "")
        if same and isinstance(title.parent, nodes.section):
            return title.parent["ids"][0], title.astext()
    return None, None


def heading(node):
    """The text of the heading above a node; for a section its own."""
    while not isinstance(node, nodes.section):
        node = node.parent
    return next(node.findall(nodes.title)).astext()


# -- From nodes to HTML


def start_box(self, node):
    data = {"aria-label": "Quiz", "data-quiz": node["step"]}
    self.body.append(self.starttag(node, "div", CLASS="quiz", role="group", **data))


def start_question(self, node):
    data = {"data-id": node["id"], "data-mark": node["mark"], "data-key": node["key"]}
    self.body.append(self.starttag({}, "fieldset", CLASS="quiz-question", **data))


def start_ask(self, node):
    number = f'<span class="quiz-number">{node["number"]}. </span>'
    self.body.append(self.starttag({}, "legend", "", CLASS="quiz-ask") + number)


def start_choice(self, node):
    button = f'<input type="radio" name="{node["name"]}" value="{node["value"]}"/>'
    letter = f'<span class="quiz-letter">{"ABCD"[node["value"] - 1]}</span>'
    self.body.append(
        self.starttag({}, "label", "", CLASS="quiz-choice") + button + letter + "<span>"
    )


def start_again(self, node):
    # The script writes what it has to say into the first of these two.
    self.body.append('<p class="quiz-said" role="status"></p>\n<p class="quiz-again">')


def start_progress(self, node):
    data = json.dumps(node["progress"], separators=(",", ":"))
    self.body.append(
        self.starttag({}, "span", "", CLASS="quiz-progress", **{"data-progress": data})
    )


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
