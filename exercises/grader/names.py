"""Whether two spellings are one student's name, and a name as text that can be shown.

The folder, the class list and the notebook each have a spelling. They are compared in
the form from which ``flashlib.drawn`` draws numbers. Canvas leaves out what separates
words, so ``doejane`` is a spelling of "Jane Doe", too.
"""

import unicodedata

from flashlib import drawn

# Without these two, words of Persian and of Indic scripts would look different.
JOINERS = "\u200c\u200d"


def agree(one, other):
    """Whether two names have the same words, in any order, or differ only in where
    words are separated. In the second case the order of the words counts, but the name
    may begin with any of them: "Lee, Ann-Marie" agrees with "Annmarie Lee" and
    "leeannmarie".

    A name without a letter or a digit agrees with no name.
    """
    form = drawn.normalize(one)
    if form == drawn.normalize(other):
        return form != ""
    return _spells(one, other) or _spells(other, one)


def _spells(one, other):
    """Whether the words of a name, from any on, are another name's letters."""
    words, letters = drawn.words(one), "".join(drawn.words(other))
    if sum(map(len, words)) != len(letters):
        return False
    turned = (words[n:] + words[:n] for n in range(len(words)))
    return any("".join(order) == letters for order in turned)


def printable(name):
    """A name as it was written, with escapes only for control characters, marks that
    change a line's direction, and others that a terminal or a table cannot show.
    """
    return "".join(
        c
        if c.isprintable() or c in JOINERS or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in name
    )
