"""The two commands of an instructor.

    python -m exercises.grader release --course DIR [STEP ...]
    python -m exercises.grader grade --course DIR --submissions DIR [--student NAME]
                                     [--task NAME] [STEP ...]

``make assignments`` and ``make grade SUBMISSIONS=DIR`` call them.
"""

import argparse
import contextlib
import functools
import pathlib
import re
import sys
import warnings

from exercises.grader import (
    classlist,
    folder,
    gradebook,
    inbox,
    release,
    sandbox,
    tasks,
)


def release_all(course, steps):
    """Make the zips of these steps."""
    for number, step in enumerate(steps, 1):
        path = release.release(step, course)
        size = f"({path.stat().st_size // 1024} KiB)"
        print(f"[{number:2}/{len(steps)}] {path} {size}", flush=True)


def grade_all(course, submissions, steps, jobs, only, task):
    """Grade these steps, enter them into the gradebook, write ``marks.csv``."""
    everything = {step: inbox.collect(submissions, step) for step in tasks.STEPS}
    unread = told_unread(submissions, everything)
    found = [step for step in steps if any(e.parts for e in everything[step].values())]
    if not found:
        raise ValueError(inbox.NOBODY.format(submissions, step="<step>"))
    classlist.deadlines(course)  # a line that cannot be read is said before the work
    secret, before = release.secret_of(course), gradebook.everybody(course)
    handed_in = {}
    for step in found:
        handed_in[step] = {s: e.name for s, e in everything[step].items() if e.parts}
    if only:
        only = chosen(only, handed_in)
        found = [step for step in found if only & set(handed_in[step])]
    for step in found:
        release.require_same_numbers(step, course)
    people = {s: e.name for entries in everything.values() for s, e in entries.items()}
    people |= {student: name for student, name in before.items() if name is not None}
    students = classlist.matched(classlist.students(course), people)
    strangers = set().union(*handed_in.values()) - set(students)
    if students and strangers:
        print(f"not on the class list: {', '.join(sorted(strangers))}", flush=True)
    for step in found:
        print(f"== {step}: {len(handed_in[step])} submissions", flush=True)
        graded = folder.grade_all(
            step, submissions, course / "graded", secret, course / "received" / step,
            jobs, functools.partial(print, flush=True), students, only, task,
            unread[step],
        )  # fmt: skip
        gradebook.record(course, step, graded)
    gradebook.forget(course, set(before) - set(gradebook.everybody(course)))
    lines, others = gradebook.table(course, course / "marks.csv")
    for path in others:
        print(f"{path}: for the learning management system")
    print(f"{course / 'marks.csv'}: {lines} marks; feedback is in {course / 'graded'}")


def told_unread(submissions, everything):
    """{step: {student: files}} of what was handed in and cannot be graded, after a line
    about each; a file that names a step is for this one.
    """
    unread = {step: {} for step in everything}
    for student, path in inbox.left_over(submissions, everything.values()):
        if inbox.earlier(path, everything):
            print(f"not the last attempt: {path}", flush=True)
            continue
        print(f"not a submission, by its place or name: {path}", flush=True)
        words = re.findall("[a-z]+", path.rpartition("/")[2].lower())
        for step in set(words) & set(everything) or everything:
            if student:
                unread[step].setdefault(student, []).append(path)
    return unread


def chosen(students, handed_in):
    """Whom the instructor means, with or without the number of a system, of ``{step:
    {student: name}}``. Raises ValueError for a name of nobody.
    """
    known, found = {}, set()
    for entries in handed_in.values():
        known |= entries
    for student in students:
        same = classlist.meant(student, known)
        if not same:
            steps, who = " or ".join(handed_in), "somebody who has handed in"
            raise ValueError(f"--student: expected {who} {steps}, got {student}")
        found.update(same)
    return found


# {command: (what it does, {argument: how argparse takes it})}
COURSE = {"type": lambda x: pathlib.Path(x).expanduser(), "required": True}  # ~ after =
ALL = f"default: all of {', '.join(tasks.STEPS)}"
STEPS = {"nargs": "*", "metavar": "STEP", "help": ALL}
BOTH = {"--course": COURSE | {"help": "a folder outside of git"}, "steps": STEPS}
COMMANDS = {
    "release": ("make the zips", BOTH),
    "grade": ("mark what was handed in", BOTH | {
        "--submissions": COURSE | {"metavar": "DIR"},
        "--jobs": {"type": int, "default": 2, "choices": range(1, sandbox.SLOTS + 1),
                   "help": "submissions at a time"},
        "--student": {"action": "append", "default": [],
                      "help": "grade this student again, and nobody else"},
        "--task": {"help": "grade this task again and leave the others; with one STEP"},
    }),
}  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m exercises.grader", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, taken) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        for argument, how in taken.items():
            command.add_argument(argument, **how)
    options = parser.parse_args(arguments)
    # Python has remarks about a student's source, such as "\d" in a text.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    with contextlib.suppress(AttributeError):  # a terminal may not have every letter
        sys.stdout.reconfigure(errors="backslashreplace")
    steps = options.steps or tasks.STEPS
    if unknown := [step for step in steps if step not in tasks.STEPS]:
        known, unknown = ", ".join(tasks.STEPS), ", ".join(unknown)
        parser.error(f"STEP: expected some of {known}, got {unknown}")
    task = getattr(options, "task", None)
    known = tasks.assignment(steps[0]).tasks if len(options.steps) == 1 else ()
    if task and task not in [x.name for x in known]:
        parser.error(f"--task: name one STEP and one of its tasks, got {task}")
    try:
        release.outside(options.course)
        if options.command == "release":
            release_all(options.course, steps)
        elif not options.submissions.is_dir():
            parser.error(f"--submissions: there is no folder {options.submissions}")
        else:
            chosen = options.jobs, options.student, task
            grade_all(options.course, options.submissions, steps, *chosen)
    except (sandbox.SandboxMissing, ValueError, RuntimeError) as error:
        sys.exit(f"{options.command}: {error}")


if __name__ == "__main__":
    main()
