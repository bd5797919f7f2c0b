"""Sphinx extension: numbers of depth pages, of the primer and of the appendices.

Sphinx numbers the chapters, 1 to 13. Two kinds of pages are numbered here:

- `book/depth/<step>` belongs to the chapter `book/<step>`. For chapter 6 its title is
  6.D, its equations, figures and exercises are 6.D1, 6.D2 and so on; its sections have
  no numbers. The depth page of a page without a number has none either.
- A page with a letter in `page_letters` is numbered like a chapter: A, A.1, A.2.

A depth page is a child of its chapter, but readers who go from page to page pass it by:
the next page of a chapter is the next chapter.
"""

import re

from docutils import nodes

DEPTH = re.compile(r"(.*/)depth/([^/]+)")


def chapter_of(page):
    """The chapter that a depth page belongs to, None for any other page."""
    found = DEPTH.fullmatch(page)
    return found and found[1] + found[2]


def page_numbers(env, letters):
    """{page: its number, such as ("A",) or (6, "D")} of the pages numbered here."""
    numbers = {page: (letter,) for page, letter in letters.items()}
    chapters = {page: chapter_of(page) for page in sorted(env.all_docs)}
    for page, chapter in chapters.items():
        if chapter:
            known = env.toc_secnumbers.get(chapter, {})
            number = numbers.get(chapter) or known.get("")
            if number:
                numbers[page] = (*number, "D")
    return numbers


def number_sections(env, page, number):
    """Number a page's title and, where the page has a letter, its sections."""
    title, *below = env.tocs[page][0]
    numbers = dict.fromkeys(title.findall(nodes.reference), number)
    for entry in env.tocs[page].findall(nodes.reference):
        numbers.setdefault(entry, ())
    if len(number) == 1 and below:
        sections = [item for item in below[0] if isinstance(item, nodes.list_item)]
        for count, section in enumerate(sections, 1):
            numbers[section[0][0]] = (*number, count)
    for entry, value in numbers.items():
        entry["secnumber"] = value
    env.titles[page]["secnumber"] = number
    values = {entry["anchorname"]: value for entry, value in numbers.items()}
    env.toc_secnumbers[page] = values


def number_figures(env, page, number):
    """Number the figures, equations and so on of a page from 1, kind by kind."""
    chapter, *mark = number
    for found in env.toc_fignumbers.get(page, {}).values():
        for count, target in enumerate(found, 1):
            found[target] = (chapter, f"D{count}" if mark else count)


def forget(app, env):
    """Drop the numbers that the last build gave to pages with letters.

    The toctree collectors, which run next, would count these pages as chapters.
    """
    for page in app.config.page_letters:
        env.titles[page].attributes.pop("secnumber", None)
    return []


def number_pages(app, env):
    """Number the pages after the toctree collectors have numbered the chapters."""
    numbers = page_numbers(env, app.config.page_letters)
    for page, number in numbers.items():
        number_sections(env, page, number)
        number_figures(env, page, number)
    return list(numbers)


def pass_depth_by(app, pagename, templatename, context, doctree):
    """Link a chapter to the chapters before and after it, not to their depth pages."""
    if chapter_of(pagename):
        return
    for side, step in (("prev", 1), ("next", 2)):
        page = neighbor = app.builder.relations.get(pagename, [None] * 3)[step]
        while page and chapter_of(page):
            page = app.builder.relations[page][step]
        if page == neighbor:
            continue
        context[side] = page and {
            "link": app.builder.get_relative_uri(pagename, page),
            "title": app.builder.render_partial(app.env.titles[page])["title"],
        }


def setup(app):
    app.add_config_value("page_letters", {}, "env", [dict])
    app.connect("env-get-updated", forget, priority=100)
    app.connect("env-get-updated", number_pages, priority=900)
    app.connect("html-page-context", pass_depth_by)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
