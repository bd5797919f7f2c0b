"""The grader: what a student hands in runs in a sandbox, and is judged outside of it.

Two processes share the work. The trusted one reads a submission, takes its solution
cells and nothing else, makes the inputs from the instructor's secret, and judges what
comes back. The other runs in a bubblewrap sandbox, without network, files, or more than
its share of time and memory: it executes the cells, calls what they define, and sends
arrays. The inputs of a case arrive there once the cells have run and the case before is
done. A reference, an expected value, the secret and other submissions never do.

============  ==========================================================================
submission    a notebook as handed in: its solution cells, whatever else is in it
names         whether two spellings are one student's name; a name that can be shown
rules         what the source of a solution cell may not contain, found by reading it
frontend      kernel cells: what counts of them, and Triton's front end, which decides
plan          which cells a task runs, and what of its operations is not allowed
guard         where the cells run: stand-ins of modules, a record of what runs
check         the program with which students apply these rules themselves
tasks         what is asked: cases made from the secret, and how an answer is judged
channel       the trusted end of a worker's messages: deadlines, sizes, what it prints
sandbox       one worker in bubblewrap: limits on time, memory, processes, files
worker        the program inside the sandbox, with guard, frontend and rules
grade         the marks of one submission, also where a worker was stopped; its notes
inbox         what was handed in, read without following a link or trusting a name
folder        a folder of submissions to marks, feedback and a CSV; resumable
report        statistics of each task as a page, and equal submissions
classlist     the class list, deadlines, tables for other systems
checks        what each assignment asks
release       sources to zips for students, with the term's numbers, through nbgrader
gradebook     marks into nbgrader's gradebook and out of it
============  ==========================================================================
"""
