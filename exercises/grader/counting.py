"""Judging a schedule on the counting memory: its results, and every word that it moved.

The launcher in the notebook makes the memory, with the capacity that the task allows,
and returns the results, the words (loaded, stored) of each array, and the words that
are still held at the end.
"""

import numpy as np

from exercises.grader.tasks import Wrong, array


def judge(values, results, words):
    """Raise Wrong unless the values are right.

    results     {name: array}, what the schedule must leave in slow memory, float64
    words       {name: (loaded, stored)} of every slow array, in the launcher's order
    """
    if len(values) == len(results) + 2 and isinstance(values[-1], int) and values[-1]:
        raise Wrong(f"{values[-1]} words are still held at the end: free them")
    for position, (name, exact) in enumerate(results.items()):
        hint = ": was all of it stored, and nothing used after it was freed?"
        try:
            found = array(values, position, name, exact)
        except Wrong as wrong:
            raise Wrong(f"{wrong}{hint if 'finite' in str(wrong) else ''}") from None
        # float64: what is off by more than this is no rounding.
        if not np.allclose(found, exact, rtol=0, atol=1e-9):
            raise Wrong(f"{name} is wrong")
    wanted = np.array(list(words.values()))
    moved = array(values, len(results), "the words", wanted)
    for name, own, right in zip(words, moved, wanted, strict=True):
        if not np.array_equal(own, right):
            moves = f"{own[0]} words loaded and {own[1]} stored"
            raise Wrong(f"{name}: {moves}, which is not what it takes")
