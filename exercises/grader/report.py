"""How a class did: a page with each task's points and most frequent failures, and which
submissions are equal.
"""

import ast
import collections
import html

from exercises.grader import rules, submission

STYLE = (
    "body{font:16px sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
    "td,th{padding:.1em .6em;text-align:left;font-weight:normal}"
    "i{display:inline-block;background:#38c;height:.8em}"
)
BARS = 5


PUBLIC = "the public solution"
SAME = "the same code as "


def page(run, graded, states):
    """The bytes of ``statistics.html``; puts a remark to the states of equal submissions."""
    equal = equals(run, graded)
    for names in equal:
        for name in set(names) - {PUBLIC}:
            others = ", ".join(other for other in names if other != name)
            kept = [r for r in states[name]["remarks"] if not r.startswith(SAME)]
            states[name]["remarks"] = [*kept, f"{SAME}{others}"]
    lines = [f"<h1>{run.assignment.step}: {len(graded)} submissions</h1>"]
    for number, task in enumerate(run.assignment.tasks):
        marks = [marks["tasks"][number] for marks in graded.values()]
        lines += section(task, marks)
    lines.append("<h2>Equal submissions</h2>")
    lines.append("<p>The same code, apart from comments and layout. A solution that is public makes "
                "submissions equal too.</p>")  # fmt: skip
    lines += [f"<p>{html.escape(', '.join(names))}</p>" for names in equal] or ["<p>None.</p>"]  # fmt: skip
    head = f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{run.assignment.step}</title>'
    text = "\n".join([head, f"<style>{STYLE}</style>", *lines, "</html>\n"])
    return text.encode(errors="backslashreplace")


def section(task, marks):
    """The lines of one task: how many got which share of the points, and what failed
    most often.
    """
    of = task.points
    counts = collections.Counter(
        min(BARS - 1, int(BARS * mark["points"] / of)) for mark in marks
    )
    average = sum(mark["points"] for mark in marks) / max(1, len(marks))
    lines = [f"<h2>{html.escape(task.name)}: {average:.2f} of {of} points on average</h2>", "<table>"]  # fmt: skip
    for bar in range(BARS):
        low, high = of * bar / BARS, of * (bar + 1) / BARS
        width = 20 * counts[bar] / max(1, len(marks))
        end = "]" if bar == BARS - 1 else ")"
        lines.append(
            f"<tr><th>[{low:g}, {high:g}{end}<td>{counts[bar]}<td><i style='width:{width:.1f}em'></i>"
        )
    lines.append("</table>")
    failures = collections.Counter(
        note for mark in marks for note in dict.fromkeys(mark["notes"])
    )
    for note, count in failures.most_common(3):
        lines.append(f"<p>{count} time{'s' * (count > 1)}: {html.escape(note)}</p>")
    return lines


def equals(run, graded):
    """[[students]] whose solution cells are the same program, in all tasks together; of
    those who have points.
    """
    wanted = [task.name for task in run.assignment.tasks]
    alike = collections.defaultdict(list)
    files = {name: run.output / name / "received.ipynb" for name in sorted(graded)}
    files = {name: path for name, path in files.items() if graded[name]["points"]}
    for student, path in {PUBLIC: run.assignment.notebook, **files}.items():
        try:
            cells = submission.read(path.read_bytes(), wanted).cells
            code = [f"{name} {program(cells[name])}" for name in sorted(cells)]
        except Exception:  # no file, or cells that are not Python
            continue
        alike["\n".join(code)].append(student)
    return [names for names in alike.values() if len(names) > 1]


def program(source):
    """What a cell means, whatever its comments, layout and docstrings. Raises
    ValueError for what is longer than any solution.
    """
    if len(source) > rules.LONGEST_CELL:
        raise ValueError("too long to be compared")
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]  # fmt: skip
    return ast.dump(tree)
