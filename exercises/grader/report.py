"""How a class did: a page of each task's points and failures, and equal submissions."""

import ast
import collections
import html

from exercises.grader import rules, submission

STYLE = (
    "body{font:16px sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
    "td,th{padding:.1em .6em;text-align:left;font-weight:normal}meter{width:20em}"
)
BARS = 5
HEAD = "<!DOCTYPE html>", '<html lang="en">', '<meta charset="utf-8">'
EQUAL = (
    "The same code, apart from comments, layout, chosen names and answers on paper. "
    "A solution that is public makes submissions equal too."
)
PUBLIC = "the public solution"
SAME = "the same code as "
NAMED = 3  # of those with the same code, in a remark; the page names all


def page(run, graded, states):
    """The bytes of ``statistics.html``; equal submissions get a remark in states."""
    equal = equals(run, graded)
    for names in equal:
        for name in set(names) - {PUBLIC}:
            others = [other for other in names if other != name]
            others = [PUBLIC] if PUBLIC in others else others
            more = f" and {len(others) - NAMED} more" * (len(others) > NAMED)
            kept = [r for r in states[name]["remarks"] if not r.startswith(SAME)]
            same = f"{SAME}{', '.join(others[:NAMED])}{more}"
            states[name]["remarks"] = [*kept, same]
    lines = [f"<h1>{run.assignment.step}: {len(graded)} submissions</h1>"]
    for number, task in enumerate(run.assignment.tasks):
        marks = [marks["tasks"][number] for marks in graded.values()]
        lines += section(task, marks)
    equal = [html.escape(", ".join(names)) for names in equal] or ["None."]
    lines.append("<h2>Equal submissions</h2>")
    lines += [f"<p>{paragraph}</p>" for paragraph in (EQUAL, *equal)]
    head = [*HEAD, f"<title>{run.assignment.step}</title>", f"<style>{STYLE}</style>"]
    text = "\n".join([*head, *lines, "</html>\n"])
    return text.encode(errors="backslashreplace")


def section(task, marks):
    """The lines of one task: how its points spread, and what failed most."""
    of = task.points
    shares = (int(BARS * mark["points"] / of) for mark in marks)
    counts = collections.Counter(min(BARS - 1, share) for share in shares)
    average = sum(mark["points"] for mark in marks) / max(1, len(marks))
    title = f"{html.escape(task.name)}: {average:.2f} of {of} points on average"
    lines = [f"<h2>{title}</h2>", "<table>"]
    for bar in range(BARS):
        low, high = of * bar / BARS, of * (bar + 1) / BARS
        end, count = "]" if bar == BARS - 1 else ")", counts[bar]
        drawn = f"<meter max='{len(marks)}' value='{count}'></meter>"
        lines.append(f"<tr><th>[{low:g}, {high:g}{end}<td>{count}<td>{drawn}")
    lines.append("</table>")
    notes = [note for mark in marks for note in dict.fromkeys(mark["notes"])]
    for note, count in collections.Counter(notes).most_common(3):
        lines.append(f"<p>{count} time{'s' * (count > 1)}: {html.escape(note)}</p>")
    return lines


def equals(run, graded):
    """[[students]] who have points for code and whose solution cells are one program,
    in all tasks together but those on paper, where everybody has other numbers.
    """
    wanted = [task.name for task in run.assignment.tasks if not task.paper]
    alike = collections.defaultdict(list)
    files = {}
    for name in sorted(graded):
        if any(m["points"] for m in graded[name]["tasks"] if m["task"] in wanted):
            files[name] = run.output / name / "received.ipynb"
    for student, path in {PUBLIC: run.assignment.notebook, **files}.items():
        try:
            cells = submission.read(path.read_bytes(), wanted).cells
            code = [f"{name} {program(cells[name])}" for name in sorted(cells)]
        except Exception:  # no file, or cells that are not Python
            continue
        alike["\n".join(code)].append(student)
    return [names for names in alike.values() if len(names) > 1]


def program(source):
    """What a cell means, whatever its comments, layout, docstrings and the names that
    it gives. Raises Refused for what is no Python, or too long.
    """
    tree, given = rules.tree_of(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            given.setdefault(node.arg, f"name {len(given)}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.setdefault(node.id, f"name {len(given)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = given[node.arg]
        elif isinstance(node, ast.Name):
            node.id = given.get(node.id, node.id)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            texts = [x for x in body if isinstance(x, ast.Expr)]
            texts = [x for x in texts if isinstance(x.value, ast.Constant)]
            node.body = [x for x in body if x not in texts]
    return ast.dump(tree)
