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

from . import classlist, folder, gradebook, inbox, release, sandbox, tasks


def grade_all(options):
    """Grade some steps, enter them into the gradebook, write ``marks.csv``."""
    course, submissions, only = options.course, options.submissions, options.student
    if not submissions.is_dir():
        raise ValueError(f"--submissions: there is no folder {submissions}")
    known = tasks.assignment(options.steps[0]).tasks if len(options.steps) == 1 else ()
    if options.task and options.task not in [task.name for task in known]:
        named = f"name one STEP and one of its tasks, got {options.task}"
        raise ValueError(f"--task: {named}")
    everything = {step: inbox.collect(submissions, step) for step in tasks.STEPS}
    unread = told_unread(submissions, everything)
    handed_in = {}
    for step in options.steps or tasks.STEPS:
        entries = {s: e.name for s, e in everything[step].items() if e.parts}
        handed_in |= {step: entries} if entries else {}
    if not handed_in:
        raise ValueError(inbox.NOBODY.format(submissions, step="<step>"))
    # What cannot be read is said before the work.
    listed, _ = classlist.students(course), classlist.deadlines(course)
    classlist.lines(course / "marks.csv")
    secret, before = release.secret_of(course), gradebook.everybody(course)
    if only:
        only = chosen(only, handed_in)
        handed_in = {step: x for step, x in handed_in.items() if only & set(x)}
    for step in handed_in:
        release.require_same_numbers(step, course)
    people = {s: e.name for entries in everything.values() for s, e in entries.items()}
    people |= {student: name for student, name in before.items() if name is not None}
    students = classlist.matched(listed, people)
    strangers = set().union(*handed_in.values()) - set(students)
    if students and strangers:
        print(f"not on the class list: {', '.join(sorted(strangers))}", flush=True)
    for step, entries in handed_in.items():
        print(f"== {step}: {len(entries)} submissions", flush=True)
        graded = folder.grade_all(
            step, submissions, course / "graded", secret, course / "received" / step,
            options.jobs, functools.partial(print, flush=True), students, only,
            options.task, unread[step],
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
        if "/" not in path and any(inbox.flat(path, step) for step in everything):
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
    known = {s: name for entries in handed_in.values() for s, name in entries.items()}
    found = set()
    for student in students:
        same = classlist.meant(student, known)
        if not same:
            steps, who = " or ".join(handed_in), "somebody who has handed in"
            raise ValueError(f"--student: expected {who} {steps}, got {student}")
        found.update(same)
    return found


def main(arguments=None):
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m exercises.grader", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    # A shell need not understand ~ after =.
    folder = {"type": lambda path: pathlib.Path(path).expanduser(), "required": True}
    for name, text in (("release", "make the zips"), ("grade", "mark submissions")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--course", **folder, help="a folder outside of git")
        command.add_argument("steps", nargs="*", metavar="STEP", help="default: all")
    command.add_argument("--submissions", **folder, metavar="DIR")
    slots, text = range(1, sandbox.SLOTS + 1), "submissions at a time"
    command.add_argument("--jobs", type=int, default=2, choices=slots, help=text)
    text = "grade this student again, and nobody else"
    command.add_argument("--student", action="append", default=[], help=text)
    text = "grade this task again and leave the others; with one STEP"
    command.add_argument("--task", help=text)
    options = parser.parse_args(arguments)
    # Python has remarks about a student's source, such as "\d" in a text.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    with contextlib.suppress(AttributeError):  # a terminal may not have every letter
        sys.stdout.reconfigure(errors="backslashreplace")
    if unknown := [step for step in options.steps if step not in tasks.STEPS]:
        known, got = ", ".join(tasks.STEPS), ", ".join(unknown)
        parser.error(f"STEP: expected some of {known}, got {got}")
    try:
        release.outside(options.course)
        if options.command == "grade":
            grade_all(options)
            return
        steps = options.steps or tasks.STEPS
        for number, step in enumerate(steps, 1):
            path = release.release(step, options.course)
            size = f"({path.stat().st_size // 1024} KiB)"
            print(f"[{number:2}/{len(steps)}] {path} {size}", flush=True)
    except (sandbox.SandboxMissing, ValueError, RuntimeError) as error:
        sys.exit(f"{options.command}: {error}")


if __name__ == "__main__":
    main()
