"""Old addresses of rewritten pages lead to the new places."""

from functools import cache

import built
import moved
import pytest
from built import PAGES, none
from visit import Visit

REWRITTEN = [page for page in PAGES if moved.read(page)]


@cache
def ids(page):
    """Every id of a page, none where there is no such page."""
    found = built.article(page).find_all(id=True) if page in PAGES else []
    return {tag["id"] for tag in found}


def lost(page, listed, ids):
    """The lines of a page's list that lead nowhere."""
    return [
        f"{page}#{anchor} leads nowhere; add `-> page#anchor` to its line"
        for anchor, (_, target) in listed.items()
        if moved.address(page, anchor, target, ids) is None
    ]


@pytest.mark.parametrize("page", REWRITTEN)
def test_every_anchor_of_the_first_edition_leads_somewhere(page):
    built.require_book()
    none(lost(page, moved.read(page), ids))


@pytest.mark.parametrize(
    "old, new",
    [
        ("equation-eq-online-fold", "depth/online.html#equation-eq-online-fold"),
        ("how-it-fails", "online.html#two-numbers-and-a-vector-for-each-query"),
    ],
)
def test_old_address_arrives(browser, site, old, new):
    with Visit(browser, f"{site}/book/online.html#{old}", "light") as visit:
        visit.page.wait_for_url(f"**/book/{new}")
        none(visit.errors)  # leaving a page breaks off its requests


PLACES = {"a": {"stays"}, "depth/a": {"moves", "renamed"}, "b": {"here"}}


@pytest.mark.parametrize(
    "anchor, target, expected",
    [
        ("stays", "", "#stays"),
        ("moves", "", "depth/a.html#moves"),
        ("old", "depth/a#renamed", "depth/a.html#renamed"),
        ("old", "b", "b.html"),
        ("old", "", None),
        ("old", "b#gone", None),
    ],
)
def test_address_is_found_or_missed(anchor, target, expected):
    def places(page):
        return PLACES.get(page, set())

    assert moved.address("a", anchor, target, places) == expected
    assert len(lost("a", {anchor: ("", target)}, places)) == (expected is None)


def test_wrong_line_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old 6.1 -> #new\nold => #new\n")
    monkeypatch.setattr(moved, "LISTS", tmp_path)
    with pytest.raises(
        ValueError, match=r"a.txt: expected anchor .* got 'old => #new'"
    ):
        moved.read("a")
