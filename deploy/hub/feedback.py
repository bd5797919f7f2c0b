"""Give feedback on a graded assignment to the students who handed it in: `make feedback
STEP=online`.

nbgrader finds the reader of a page of feedback by a secret that came with the
submission. It is copied beside the marked notebook, then nbgrader makes the pages and
puts them into the exchange.
"""

import os
import pathlib
import shutil
import subprocess
import sys

MARKS_OF_SUBMISSION = ("timestamp.txt", "submission_secret.txt")


def prepare(course, step):
    """Copy what identifies each submission beside its marked notebook; returns the
    students' names.
    """
    students = []
    for marked in sorted(pathlib.Path(course).glob(f"autograded/*/{step}")):
        student = marked.parent.name
        submitted = pathlib.Path(course) / "submitted" / student / step
        files = [submitted / name for name in MARKS_OF_SUBMISSION]
        if all(file.is_file() and not file.is_symlink() for file in files):
            for name in MARKS_OF_SUBMISSION:
                shutil.copy(submitted / name, marked / name)
            students.append(student)
    return students


def main(arguments):
    course, *steps = arguments
    if not steps:
        sys.exit("feedback: name the assignment: make feedback STEP=online")
    programs = pathlib.Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    for step in steps:
        students = prepare(course, step)
        if not students:
            sys.exit(
                f"feedback: {course} has no graded submission of {step} that came "
                "through the exchange"
            )
        for command in ("generate_feedback", "release_feedback"):
            program = [str(programs / "nbgrader"), command, step, "--log-level=WARN"]
            program += ["--force"] if command == "generate_feedback" else []
            subprocess.run(program, cwd=course, env=environment, check=True)
        print(f"{step}: feedback for {', '.join(students)}")


if __name__ == "__main__":
    main(sys.argv[1:])
