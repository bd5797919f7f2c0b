"""Spellings of one name agree and get the same numbers; other names do not."""

import json
import string
import unicodedata

import hypothesis
import pytest
from handed_in import lay
from hypothesis import strategies as st

from exercises.grader import inbox, names, submission, tasks
from flashlib import drawn

settings = hypothesis.settings(
    max_examples=100, derandomize=True, deadline=None, database=None
)
ONLINE = tasks.assignment("online")


def letters(*ranges):
    """The assigned letters and marks of these ranges of code points."""
    every = (chr(n) for first, last in ranges for n in range(first, last + 1))
    return "".join(c for c in every if unicodedata.category(c)[0] in "LM")


# Scripts whose letters keep their identity without their accents.
ACCENTED = {
    "Turkish": "abcçdefgğhıijklmnoöprsştuüvyzABCÇDEFGĞHIİJKLMNOÖPRSŞTUÜVYZâî",
    "German": "abeghiklnorstuäöüßẞAEGHKLÄÖÜSs",
    "Vietnamese": "aăâbcdđeêghiklmnoôơpqrstuưvxyĐẠẢẮẦẨẪẬỐỘỚỜỞữựỵ",
    "Greek": letters((0x386, 0x3CE), (0x1F00, 0x1F4D)),
    "Cyrillic": letters((0x400, 0x481), (0x48A, 0x4FF)),
}
# Scripts whose marks are part of a name.
SIGNED = {
    "Thai": letters((0xE01, 0xE4E)),
    "Devanagari": letters((0x904, 0x94D), (0x958, 0x961)),
    "Japanese": letters((0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x4E20)),
}
POINTED = {
    "Persian": "آابپتثجچحخدذرزژسشصضطظعغفقکگلمنوهیأؤئ\u064e\u0651\u0652",
    "Hebrew": letters((0x5B0, 0x5BC), (0x5D0, 0x5EA)),
}
SPACES = "\t\n \x85\xa0\u1680\u2003\u2009\u2028\u202f\u3000"
FORMATS = "\xad\u061c\u200b\u200c\u200d\u200e\u200f\u202a\u202c\u2066\u2069\ufeff\ufe0f"
BETWEEN = [*SPACES, ", ", *"-_.\u2010\u30fb", " \U0001f338 ", "👩\u200d🚀"]


def written(alphabets):
    """A strategy for lists of words, each with a letter, in one script."""
    words = [st.text(alphabet, min_size=1, max_size=7) for alphabet in alphabets]
    words = [word.filter(lambda x: any(map(str.isalpha, x))) for word in words]
    return st.one_of(*(st.lists(word, min_size=1, max_size=4) for word in words))


@settings
@hypothesis.given(
    written([*ACCENTED.values(), *SIGNED.values(), *POINTED.values(), "aZ0\u0662"]),
    st.data(),
)
def test_spellings_of_a_name_have_one_form(words, data):
    form = drawn.normalize(" ".join(words))
    assert form.count(" ") == len(words) - 1
    words = data.draw(st.permutations(words))
    joined = words[0]
    for word in words[1:]:
        joined += data.draw(st.sampled_from(BETWEEN)) + word
    for sign in data.draw(st.lists(st.sampled_from(FORMATS), max_size=4)):
        place = data.draw(st.integers(0, len(joined)))
        joined = joined[:place] + sign + joined[place:]
    changes = [str.upper, str.lower, str.title, str.casefold]
    changes += [
        lambda text, f=f: unicodedata.normalize(f, text)
        for f in ("NFC", "NFD", "NFKC", "NFKD")
    ]
    for change in data.draw(st.lists(st.sampled_from(changes), max_size=3)):
        joined = change(joined)
    assert drawn.normalize(joined) == form, ascii(joined)
    assert drawn.normalize(form) == form
    assert names.agree(joined, " ".join(words))


@settings
@hypothesis.given(written(ACCENTED.values()), st.data())
def test_an_accent_makes_no_difference(words, data):
    name = " ".join(words)
    place = data.draw(st.integers(1, len(name)))
    # Not the iota under a Greek letter, which is a letter of its own in capitals.
    accents = st.characters(
        min_codepoint=0x300, max_codepoint=0x36F, exclude_characters="\u0345"
    )
    accent = data.draw(accents)
    accented = name[:place] + accent + name[place:]
    assert drawn.normalize(accented) == drawn.normalize(name)


@settings
@hypothesis.given(written([string.ascii_lowercase, *SIGNED.values()]), st.data())
def test_another_letter_sign_or_order_in_a_word_is_another_name(words, data):
    place = data.draw(st.integers(0, len(words) - 1))
    word = unicodedata.normalize("NFKD", words[place])
    left = data.draw(st.permutations(word))
    without = data.draw(st.integers(0, len(word) - 1))
    for other in ("".join(left), word[:without] + word[without + 1 :]):
        changed = " ".join([*words[:place], other, *words[place + 1 :]])
        form = drawn.normalize(" ".join(words))
        same = unicodedata.normalize("NFKD", other) == word
        assert same == (drawn.normalize(changed) == form)


ANN = "Ann Lee"
ONE_NAME = [
    ("IŞIK YILMAZ", "Işık Yılmaz", "isik yilmaz", "Yılmaz, Işık", "IS\u0327IK YILMAZ"),
    ("Weiß", "WEISS", "Wei\u1e9e"),
    ("Łukasz Đặng", "Lukasz Dang"),
    ("Ὀδυσσεύς", "ΟΔΥΣΣΕΥΣ", "Οδυσσευσ"),
    ("علی\u200cرضا", "علیرضا", "علي\u200dرضا", "\u202bعلیرضا\u202c"),
    ("محمد", "مُحَمَّد", "محـمد"),
    ("מֹשֶׁה כהן", "כהן, משה"),
    ("O'Brien", "O\u2019BRIEN", "O\u00b4Brien", "OBrien"),
    ("Ｊｕｎ ｶﾞﾎﾞ", "jun ガボ"),
    ("Jane Doe", "jane_doe", "Doe,Jane", " JANE\xa0\u3000doe ", "jane.doe 🌸"),
]
TWO_NAMES = [
    ("Amy Lee", "May Lee"), ("Ada 12", "Ada 21"), ("กิน", "กัน"), ("ไก่", "ไก้"),
    ("सीता", "सत"), ("か", "が"),
    ("Müller", "Mueller"), ("張偉", "张伟"), (ANN, "Ann Lee 2"), (ANN, "Ann Le"),
]  # fmt: skip


@pytest.mark.parametrize("spellings", ONE_NAME)
def test_one_name_has_one_set_of_numbers(spellings):
    found = [ONLINE.numbers(b"s", name) for name in spellings]
    assert found == found[:1] * len(found)


@pytest.mark.parametrize(("one", "other"), TWO_NAMES)
def test_two_names_have_two_sets_of_numbers(one, other):
    assert not names.agree(one, other) and not names.agree(other, one)
    assert ONLINE.numbers(b"s", one) != ONLINE.numbers(b"s", other)


@pytest.mark.parametrize("name", ["", " \t", "?!", "👩\u200d🚀", "\u200c", "\u0e34", 1])
def test_a_name_without_a_letter_or_digit_is_refused(name):
    with pytest.raises(ValueError, match=r"student: expected your name.* a letter"):
        ONLINE.numbers(b"s", name)
    assert not names.agree("?", "") and not names.agree("Ann", "?")


def test_no_name_is_too_long():
    long = "กรุงเทพมหานคร " * 100
    assert ONLINE.numbers(b"s", long) != ONLINE.numbers(b"s", long + "กรุง")
    assert names.agree(long, long.replace(" ", "\xa0"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("doejane", "Jane Doe", True),
        ("leeannmarie", "Ann-Marie Lee", True),
        ("Annmarie Lee", "Lee, Ann-Marie", True),
        ("doejane", "janedoe", False),
        ("oejaned", "Jane Doe", False),
        ("amy", "mya", False),
        ("jane", "Jane Doe", False),
    ],
)
def test_words_may_run_together(one, other, same):
    assert names.agree(one, other) == names.agree(other, one) == same


def test_what_is_shown_is_what_was_written():
    for name in ("علی\u200cرضا", "Ann\xa0Lee", "กิน", "👩\u200d🚀", "Zoe\u0308"):
        assert names.printable(name) == name
    assert names.printable("\u202eAnn\n\x1b\ud800") == "\\u202eAnn\\n\\x1b\\ud800"


def test_a_folder_keeps_its_name(tmp_path):
    """Also one that is too long for a table's key after what is not shown is written
    out.
    """
    long, hidden = "ก" * 85, "ก" + "\u200b" * 84
    folders = [long, hidden, "Ann\xa0Lee", "علی\u200cرضا"]
    lay(tmp_path, *(f"{folder}/online.ipynb" for folder in folders))
    lay(tmp_path, "กิน_7_assignsubmission_file_/online.ipynb")
    found = inbox.collect(tmp_path, "online")
    assert {entry.name for entry in found.values()} == {*folders, "กิน"}
    assert {*folders, "กิน_7"} - set(found) == {hidden}
    assert max(len(student.encode()) for student in found) <= 255


CELLS = {
    'student = "Ann Lee"  # my "real" name': ANN,
    "student='Ann Lee'": ANN,
    'student = ("Ann "\n    "Lee")': ANN,
    'student: str = """Ann Lee"""': ANN,
    'student = ""\nstudent = name = r"Ann Lee"; x = 1': ANN,
    '%time\nstudent = "Ann Lee"\n!ls': ANN,
    "student = 'Pat O\\'Neil'": "Pat O'Neil",
    '# student = "Ben"\nstudent = "I\\u015f\\u0131k"': "Işık",
    'text = """\nstudent = "Ben"\n"""': None,
    'if False:\n    student = "Ben"': None,
    'student += "Ben"': None,
    "student = input()": None,
    'student = "Ann Lee': None,
    "student = 1": None,
    'student = "' + "(" * 300: None,
}


@pytest.mark.parametrize("source", CELLS)
def test_the_name_in_a_notebook_is_read_as_python(source):
    metadata = {"nbgrader": {"grade_id": "parameters"}}
    cell = {"cell_type": "code", "metadata": metadata, "source": source}
    content = json.dumps({"cells": [cell]}).encode()
    assert submission.read(content, []).student() == CELLS[source]
