"""The two commands of an instructor.

    python -m exercises.grader release --course DIR [STEP ...]
    python -m exercises.grader grade --course DIR --submissions DIR [STEP ...]

``make assignments`` and ``make grade SUBMISSIONS=DIR`` call them.
"""

import argparse
import pathlib
import sys

from exercises.grader import grade, gradebook, release, sandbox, tasks


def release_all(course, steps):
    """Make the zips of these steps."""
    for number, step in enumerate(steps, 1):
        path = release.release(step, course)
        print(
            f"[{number:2}/{len(steps)}] {path} ({path.stat().st_size // 1024} KiB)",
            flush=True,
        )


def grade_all(course, submissions, steps, jobs):
    """Grade what was handed in for these steps, enter it into the gradebook, write
    ``marks.csv``.
    """
    everything = {step: grade.find(submissions, step) for step in tasks.STEPS}
    for path in grade.left_over(submissions, everything.values()):
        print(f"not a submission, by its place or name: {path}", flush=True)
    found = {step: everything[step] for step in steps if everything[step]}
    if not found:
        raise ValueError(
            f"{submissions}: no submission <student>/<step>/<step>.ipynb is there"
        )
    secret = release.secret_of(course)
    for step, notebooks in found.items():
        received = course / "received" / step
        if not received.is_dir():
            raise ValueError(
                f"{step} was not released from {course}: run `make assignments` there first"
            )
        print(f"== {step}: {len(notebooks)} submissions", flush=True)
        graded = grade.grade(
            step, submissions, course / "graded", secret, received, jobs
        )
        gradebook.record(course, step, graded, notebooks)
    lines = gradebook.table(course, course / "marks.csv")
    print(
        f"{course / 'marks.csv'}: {lines} marks; feedback lies in {course / 'graded'}"
    )


def folder(text):
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
            "--course", type=folder, required=True, help="a folder outside of git"
        )
        command.add_argument(
            "steps",
            nargs="*",
            metavar="STEP",
            help=f"default: all of {', '.join(tasks.STEPS)}",
        )
        if name == "grade":
            command.add_argument(
                "--submissions", type=folder, required=True, metavar="DIR"
            )
            command.add_argument(
                "--jobs",
                type=int,
                default=2,
                choices=range(1, 17),
                help="submissions at a time",
            )
    options = parser.parse_args(arguments)
    steps = options.steps or [
        step for step in tasks.STEPS if (tasks.ROOT / "source" / step).is_dir()
    ]
    if unknown := [step for step in steps if step not in tasks.STEPS]:
        parser.error(
            f"STEP: expected some of {', '.join(tasks.STEPS)}, got {', '.join(unknown)}"
        )
    try:
        release.outside(options.course)
        if options.command == "release":
            release_all(options.course, steps)
        elif not options.submissions.is_dir():
            parser.error(f"--submissions: there is no folder {options.submissions}")
        else:
            grade_all(options.course, options.submissions, steps, options.jobs)
    except (sandbox.SandboxMissing, ValueError, RuntimeError) as error:
        sys.exit(f"{options.command}: {error}")


if __name__ == "__main__":
    main()
