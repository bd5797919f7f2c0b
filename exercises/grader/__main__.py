"""The two commands of an instructor.

    python -m exercises.grader release --course DIR [STEP ...]
    python -m exercises.grader grade --course DIR --submissions DIR [--student NAME] [--task NAME] [STEP ...]

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
        print(
            f"[{number:2}/{len(steps)}] {path} ({path.stat().st_size // 1024} KiB)",
            flush=True,
        )


def grade_all(course, submissions, steps, jobs, only, task):
    """Grade what was handed in for these steps, enter it into the gradebook, write
    ``marks.csv``.
    """
    everything = {step: inbox.collect(submissions, step) for step in tasks.STEPS}
    unread = told_unread(submissions, everything)
    found = [step for step in steps if any(e.parts for e in everything[step].values())]
    if not found:
        raise ValueError(
            f"{submissions}: no submission <student>/<step>/<step>.ipynb is there"
        )
    classlist.deadlines(course)  # a line that cannot be read is said before the work
    secret, before = release.secret_of(course), gradebook.everybody(course)
    handed_in = {
        step: {s: e.name for s, e in everything[step].items() if e.parts}
        for step in found
    }
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
            jobs, functools.partial(print, flush=True), students, only, task, unread[step],
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
        file = path.rpartition("/")[2]
        about = [
            step
            for step in everything
            if re.search(rf"(?<![a-z]){step}(?![a-z])", file.lower())
        ]
        for step in about or everything:
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
            raise ValueError(
                f"--student: expected somebody who has handed in {' or '.join(handed_in)}, "
                f"got {student}"
            )
        found.update(same)
    return found


def path_of(text):
    """The path that an argument means; not every shell replaces ~ after an equals
    sign.
    """
    return pathlib.Path(text).expanduser()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m exercises.grader", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("release", "make the zips"),
        ("grade", "mark what was handed in"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--course", type=path_of, required=True, help="a folder outside of git"
        )
        command.add_argument(
            "steps",
            nargs="*",
            metavar="STEP",
            help=f"default: all of {', '.join(tasks.STEPS)}",
        )
        if name == "grade":
            command.add_argument(
                "--submissions", type=path_of, required=True, metavar="DIR"
            )
            command.add_argument(
                "--jobs",
                type=int,
                default=2,
                choices=range(1, 17),
                help="submissions at a time",
            )
            command.add_argument(
                "--student",
                action="append",
                default=[],
                help="grade this student again, and nobody else",
            )
            command.add_argument(
                "--task",
                help="grade this task again and leave the others; with one STEP",
            )
    options = parser.parse_args(arguments)
    # Python has remarks about a student's source, such as "\d" in a text.
    warnings.simplefilter("ignore", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    with contextlib.suppress(AttributeError):  # a terminal may not have every letter
        sys.stdout.reconfigure(errors="backslashreplace")
    steps = options.steps or [
        step for step in tasks.STEPS if (tasks.ROOT / "source" / step).is_dir()
    ]
    if unknown := [step for step in steps if step not in tasks.STEPS]:
        parser.error(
            f"STEP: expected some of {', '.join(tasks.STEPS)}, got {', '.join(unknown)}"
        )
    task = getattr(options, "task", None)
    if task and (
        len(options.steps) != 1
        or task not in [known.name for known in tasks.assignment(steps[0]).tasks]
    ):
        parser.error(f"--task: name one STEP and one of its tasks, got {task}")
    try:
        release.outside(options.course)
        if options.command == "release":
            release_all(options.course, steps)
        elif not options.submissions.is_dir():
            parser.error(f"--submissions: there is no folder {options.submissions}")
        else:
            grade_all(
                options.course, options.submissions, steps, options.jobs, options.student, task,
            )  # fmt: skip
    except (sandbox.SandboxMissing, ValueError, RuntimeError) as error:
        sys.exit(f"{options.command}: {error}")


if __name__ == "__main__":
    main()
