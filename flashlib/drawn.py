"""The numbers of the pen-and-paper tasks, which each student has for themselves.

Students receive this module, and the grader computes the same numbers. They are drawn
from SHA-256, so no version of a library changes them.
"""

import contextlib
import hashlib
import math
import re
import unicodedata

# What NFKD keeps apart: Turkish i, the yeh and kaf of Arabic and Persian keyboards. No
# word ends at an apostrophe, because systems drop it: O'Brien is OBrien in Moodle. The
# tatweel only makes a word wider.
REPLACED = str.maketrans({
    "\N{LATIN SMALL LETTER DOTLESS I}": "i",
    "\N{ARABIC LETTER YEH}": "\N{ARABIC LETTER FARSI YEH}",
    "\N{ARABIC LETTER ALEF MAKSURA}": "\N{ARABIC LETTER FARSI YEH}",
    "\N{ARABIC LETTER KAF}": "\N{ARABIC LETTER KEHEH}",
    **dict.fromkeys("'`\u2018\u2019\u02bb\u02bc\u05f3\N{ARABIC TATWEEL}"),
})  # fmt: skip
# Marks that a name may lack: accents, and the points of Hebrew, Arabic and Syriac,
# which most writers leave out. The vowel signs and tone marks of other scripts belong
# to it.
OPTIONAL = re.compile(
    "COMBINING (?!KATAKANA)|HEBREW |ARABIC |SYRIAC "
    "|(MONGOLIAN FREE )?VARIATION SELECTOR"
)


def numbers(step, salt, student):
    """The numbers {name: number} of an assignment for a student.

    salt is a text that the course chooses. All spellings of the student's name that
    have the same form after :func:`normalize` have the same numbers.

    Raises ValueError if the name is not a text with a letter or a digit.
    """
    known_as = normalize(student) if isinstance(student, str) else ""
    if not known_as:
        raise ValueError(
            "student: expected your name, as your instructor's list has it, in quotes "
            f"and with a letter or a digit, got {student!r}"
        )
    counter = 0
    while True:
        drawn = STEPS[step](Draw(step, salt, known_as, str(counter)))
        if step not in COINCIDES or not COINCIDES[step](**drawn):
            return drawn
        counter += 1


def normalize(name):
    """The form of a name from which numbers are drawn: its words in alphabetical order.

    "Lee, Ann", "ANN LEE" and "Ann L\u00e9e" are "ann lee". See :func:`words`.
    """
    return " ".join(sorted(words(name)))


def words(name):
    """The words of a name in their order, without what spellings of it differ in.

    These are case, accents, compatibility forms and characters that are not shown. A
    word ends at a space, a hyphen or any other sign except an apostrophe.
    """
    text = unicodedata.normalize("NFKD", name.replace("\u00b4", "'")).casefold()
    text = "".join(map(_plain, text.translate(REPLACED)))
    # Again, because marks that were apart may now be next to each other.
    parts = unicodedata.normalize("NFKD", text).split()
    return [word for word in parts if any(map(str.isalnum, word))]


def _plain(character):
    """What counts of a character: itself, or its letter without a stroke or a hook; ""
    where it makes no difference, and a space where it ends a word.
    """
    category = unicodedata.category(character)
    title = unicodedata.name(character, "")
    if category == "Cf" or (category[0] == "M" and OPTIONAL.match(title)):
        return ""
    if title.startswith(("LATIN", "GREEK", "CYRILLIC")) and " WITH " in title:
        with contextlib.suppress(KeyError):  # some have no letter without it
            bare = unicodedata.lookup(title.partition(" WITH ")[0])
            return unicodedata.normalize("NFKD", bare)[0]
    return character if category[0] == "M" or character.isalnum() else " "


class Draw:
    """Whole numbers that follow from some texts."""

    def __init__(self, *path):
        self.path, self.count = "\0".join(path), 0

    def integer(self, low, high):
        """A number from low to high - 1."""
        self.count += 1
        digest = hashlib.sha256(f"{self.path}\0{self.count}".encode()).digest()
        return low + int.from_bytes(digest, "big") % (high - low)

    def choice(self, options):
        """One of the options."""
        return options[self.integer(0, len(options))]

    def distinct(self, options, count):
        """A list of some of the options, in any order."""
        left = list(options)
        return [left.pop(self.integer(0, len(left))) for _ in range(count)]


def _standard(draw):
    a, b = draw.distinct(range(2, 10), 2)
    y, z = draw.distinct(range(1, 20), 2)
    return {
        "a": a, "b": b, "y": y, "z": z,
        "T": 2 ** draw.integer(11, 16) + 128 * draw.integer(1, 8),
        "d": 16 * draw.integer(3, 9),
        "heads": draw.integer(5, 30), "gib": draw.integer(5, 80),
    }  # fmt: skip


def _gradients(draw):
    a, b = draw.distinct(range(2, 10), 2)
    g, h = draw.integer(1, 10), -draw.integer(1, 10)
    h -= a * g + b * h == 0  # D is judged to a share of itself
    T = 2 ** draw.integer(11, 16) + 128 * draw.integer(1, 8)
    d = 16 * draw.integer(3, 9)
    return {"a": a, "b": b, "g": g, "h": h, "T": T, "d": d}


def _machine(draw):
    return {
        "row": draw.integer(0, 3),
        "column": draw.integer(0, 3),
        "n": draw.integer(5, 305),
    }


def _bottleneck(draw):
    tile = draw.integer(4, 13)
    return {
        "T": draw.integer(2_000, 9_000),
        "d": 16 * draw.integer(2, 9),
        "B_r": draw.choice([96, 128, 192, 256]),
        "F": draw.integer(150, 1000),
        "W": draw.integer(1000, 5000),
        "n": tile * draw.integer(6, 13),
        "b": tile,
    }


def _blocks(draw):
    d = 16 * draw.integer(2, 9)
    return {
        "n": draw.integer(200, 900),
        "M": draw.integer(300, 3000),
        "T": draw.integer(2000, 9000),
        "d": d,
        "fast": draw.integer(d * d, 6 * d * d),
    }


def _online(draw):
    # Close to each other, so that no term of l is lost next to the 1 of the largest.
    least = draw.integer(100, 800)
    x0, x1, x2 = (x / 100 for x in draw.distinct(range(least, least + 200), 3))
    return {"x0": x0, "x1": x1, "x2": x2, "n": draw.integer(1000, 90_000)}


def _flash1(draw):
    # The new maximum is larger: nothing is learnt from a factor of 1. It is so close,
    # and the old sums are so large, that a mistake in their share shows in four digits.
    least = draw.integer(-3, 4)
    m, s0, s1 = sorted(draw.distinct(range(least, least + 5), 3))
    return {
        "m": m,
        "l": 1 + draw.integer(2, 13) / 4,
        "o": draw.choice([-1, 1]) * (draw.integer(2, 8) + 0.5),
        "s0": s0,
        "s1": s1,
        "v0": draw.integer(-9, 10),
        "v1": draw.integer(10, 20),
        "T": draw.integer(1000, 9000),
        "d": 16 * draw.integer(2, 9),
        "B_r": 16 * draw.integer(1, 5),
        "B_c": 64 * draw.integer(1, 5),
    }


def _flash2(draw):
    m = draw.integer(-3, 4)
    B_r, B_c = draw.distinct([32, 64, 96, 128, 160], 2)
    T_q = B_r * draw.integer(3, 8) - draw.integer(0, B_r // 2)
    l = 1 + draw.integer(1, 12) / 4
    n0, n1 = (draw.integer(-9, 10) + 0.5 for _ in range(2))
    x = m + draw.integer(1, 4)  # the new score is larger: the old sums shrink
    v0, v1 = draw.integer(-9, 0), draw.integer(1, 10)
    n1 += n1 == v1 * l  # otherwise the old mean is the new value already
    return {
        "m": m,
        "l": l,
        "n0": n0,
        "n1": n1,
        "x": x,
        "v0": v0,
        "v1": v1,
        "T": draw.integer(2000, 9000),
        "d": 16 * draw.integer(3, 9),
        "B": 64 * draw.integer(1, 4),
        "heads": draw.integer(5, 33),
        "T_q": T_q,
        "T_k": T_q + draw.integer(B_c, 5 * B_c),
        "B_r": B_r,
        "B_c": B_c,
    }


def _backward(draw):
    rows = {name: draw.integer(1, 5) for name in ("q0", "q1", "k0", "k1")}
    for name in ("v0", "v1", "g0", "g1"):
        rows[name] = draw.choice([-4, -3, -2, 2, 3, 4])
    dot = rows["q0"] * rows["k0"] + rows["q1"] * rows["k1"]
    B_r, B_c = sorted(draw.distinct([32, 48, 80, 96, 120, 160], 2))
    T_k = 6 * B_c + draw.integer(1, B_c)
    return {
        **rows,
        "c": 0.5,
        "L": 0.5 * dot + draw.integer(1, 9) / 4,
        "D": draw.integer(-4, 5) + 0.5,  # never dP, which is whole
        "T": 480 * draw.integer(2, 12),  # every size above divides it
        "d": 16 * draw.integer(3, 9),
        "B_r": B_r,
        "B_c": B_c,
        "M": draw.integer(30_000, 120_000),
        "T_q": T_k + draw.integer(B_c, 3 * B_c),
        "T_k": T_k,
        "col": B_c * draw.integer(1, 4),
    }


def _masks(draw):
    B_c = draw.choice([16, 32, 48])
    B_r = B_c * draw.integer(2, 4)
    T_q = B_r * draw.integer(7, 12)
    T_k = T_q + draw.integer(4 * B_c, 8 * B_c)
    row = B_r * draw.integer(3, 5)
    p_a = row + T_k - T_q
    p_z = p_a + B_r - 1
    # One key more or fewer on either side changes the tiles that are read.
    left = B_r + B_c + (p_a - B_r - B_c + 1) % B_c
    right = B_c + -(p_z + B_c) % B_c
    B = 16 * draw.integer(2, 9)
    reach = draw.integer(2, 5)
    return {
        "T_q": T_q,
        "T_k": T_k,
        "B_r": B_r,
        "B_c": B_c,
        "row": row,
        "left": left,
        "right": right,
        "T": B * draw.integer(15, 40),
        "B": B,
        "keys": reach * B + 1,
        # No edge of the mask is the edge of a tile.
        "first_keys": B * draw.integer(1, 4) + draw.integer(2, B - 1),
        "near": B * draw.integer(2, 6) + draw.integer(2, B - 1),
    }


def _decoding(draw):
    H_kv = draw.choice([2, 4, 8])
    n_p, block = draw.integer(60, 150), draw.choice([16, 32, 64])
    p = draw.choice([8, 16, 32])
    # Some parts get no keys, and the last part that has any is not full.
    parts, each = n_p // H_kv, draw.integer(1, 4)
    blocks = parts * each + draw.integer(1, parts // 3 + 1)
    # The last rows of two sequences would fit one page. The last rows of the prompt and
    # those of an answer need one page more than the answer alone.
    few, most = (1, p // 2 + 1), (p // 2 + 1, p)
    return {
        "B": draw.integer(4, 40),
        "H": H_kv * draw.choice([2, 4, 8]),
        "H_kv": H_kv,
        "T": draw.integer(4000, 20000),
        "d": 16 * draw.integer(2, 9),
        "s": draw.choice([1, 2]),
        "T_q": draw.integer(2, 6),
        "memory": draw.integer(900, 4900),
        "rate": draw.integer(450, 1000),
        "p": p,
        "a": p * draw.integer(2, 6) + draw.integer(*few),
        "b": p * draw.integer(6, 10) + draw.integer(*few),
        "prompt": p * draw.integer(5, 20) + draw.integer(*most),
        "answers": draw.integer(3, 9),
        "written": p * draw.integer(1, 4) + draw.integer(*most),
        "n_p": n_p,
        "block": block,
        "length": blocks * block - draw.integer(1, block),
    }


def _ring(draw):
    a0, a1, b0, b1 = draw.distinct(range(1, 10), 4)
    if a0 + a1 == b0 + b1:  # otherwise the mean of both outputs would be right
        b1 = 10
    u0, u1 = draw.distinct(range(1, 10), 2)
    w0, w1 = draw.distinct(range(11, 20), 2)
    N, H_kv = draw.integer(3, 9), draw.choice([2, 4, 8])
    return {
        "a0": a0,
        "a1": a1,
        "b0": b0,
        "b1": b1,
        "u0": u0,
        "u1": u1,
        "w0": w0,
        "w1": w1,
        "N": N,
        "T": 2 * N * draw.integer(20, 90),
        "r": draw.integer(1, N - 1),
        "H": H_kv * draw.choice([2, 4, 8]),
        "H_kv": H_kv,
        "d": 16 * draw.integer(2, 9),
        "rate": draw.integer(300, 900),
        "link": draw.integer(25, 450),
    }


def _projections(draw):
    H_kv, group = draw.integer(2, 5), 5 * draw.integer(1, 3)
    d = 16 * draw.integer(3, 9)
    # The width is no multiple of d: who takes one for the other is seen.
    return {
        "T": draw.integer(1000, 6000),
        "E": 5 * draw.integer(100, 400),
        "d": d,
        "H": H_kv * group,
        "H_kv": H_kv,
    }


def _blocks_coincide(n, M, **_):
    side = math.isqrt(M)
    return math.ceil(n / side) == math.ceil(n / (side - 1)) or n % (side - 1) == 0


def _backward_coincide(q0, q1, k0, k1, T_q, T_k, col, B_r, B_c, **_):
    first = col + T_q - T_k
    return q0 == k0 or q1 == k1 or 0 in (first % B_r, (first + B_c - 1) % B_r)


def _latent(draw):
    d_n, d_v = draw.distinct([32, 48, 64, 96, 128], 2)
    return {
        "H": draw.choice([12, 16, 24, 32, 48, 64, 96, 128]),
        "d_c": d_n + d_v + 16 * draw.integer(4, 20),
        "d_n": d_n,
        "d_r": draw.choice([16, 24, 40]),
        "d_v": d_v,
        "s": draw.choice([1, 2]),
        "layers": draw.integer(20, 90),
        "T": draw.integer(30_000, 200_000),
        "T_k": draw.integer(400, 9_000),
    }


def _fp8(draw):
    # Between 32 and 64 numbers are 4 apart: a is rounded up, and b down.
    a = 4 * draw.integer(8, 16) + draw.choice([2.25, 2.5, 2.75, 3.25, 3.5, 3.75])
    b = 4 * draw.integer(8, 16) + draw.choice([0.25, 0.5, 0.75, 1.25, 1.5, 1.75])
    d = 16 * draw.integer(3, 9)
    return {
        "a": a,
        "b": -b / 8,
        "x": 13 * draw.integer(1, 9),
        "d": d,
        "e": draw.integer(3, 8),
        "H_kv": draw.choice([2, 4, 8]),
        "T": draw.integer(3000, 90_000),
        "layers": draw.integer(20, 90),
        "size": 10 * draw.integer(1, 9),
    }


def _decoding_coincide(n_p, H_kv, length, block, **_):
    blocks, parts = math.ceil(length / block), n_p // H_kv
    share, *others = (
        *(math.ceil(blocks / count) for count in (parts, parts + 1, n_p)),
        blocks // parts,
    )
    left = {length % (other * block) for other in others}
    return n_p % H_kv == 0 or share in others or length % (share * block) in left


STEPS = {
    draw.__name__.removeprefix("_"): draw
    for draw in (
        _standard, _gradients, _machine, _bottleneck, _blocks, _online, _flash1,
        _flash2, _backward, _masks, _decoding, _ring, _latent,
        _fp8, _projections,
    )
}  # fmt: skip
# With which numbers a plausible mistake would give the right answer by chance: a
# rounding that changes nothing, a factor of 1, two names that have the same value.
COINCIDES = {
    "bottleneck": lambda T, B_r, **_: T % B_r == 0,
    "blocks": _blocks_coincide,
    "flash2": lambda T, B, x, **_: T % B == 0 or x == 0,
    "backward": _backward_coincide,
    "decoding": _decoding_coincide,
}
