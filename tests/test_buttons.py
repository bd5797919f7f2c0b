"""Buttons that open a page elsewhere: they follow from `repository` in `_config.yml`.

Colab's form is .../github/OWNER/NAME/blob/BRANCH/PATH; that of a hub is nbgitpuller's.
"""

import re
from urllib.parse import quote, urlsplit

import built
import pytest
from bs4 import BeautifulSoup
from built import PAGES, ROOT, none
from pdf import read

HOSTS = re.compile(r"//(?:www\.)?(?:github|gitlab|bitbucket)\.|colab\.|binder|git-pull")


def launched(source, config):
    """The addresses that open a notebook of the repository, by the button's text."""
    repository, launch = config["repository"], config["launch_buttons"]
    address, branch = repository["url"], repository["branch"]
    owner, name = urlsplit(address).path.strip("/").split("/")
    found = {}
    if "github.com/" in address:
        place = f"github/{owner}/{name}/blob/{branch}/{source}"
        found["Colab"] = f"{launch['colab_url']}/{place}"
    if launch["jupyterhub_url"]:
        query = f"repo={quote(address, safe='/')}&urlpath=lab/tree/{name}/{source}"
        hub = f"{launch['jupyterhub_url']}/hub/user-redirect/git-pull"
        found["JupyterHub"] = f"{hub}?{query}&branch={branch}"
    return found


def button_faults(tree, source, config):
    """What is wrong with a page's links to the repository and to hosts of notebooks.

    `source` is the page's file, relative to the top of the checkout.
    """
    address, branch = config["repository"]["url"], config["repository"]["branch"]
    wanted = launched(source, config) if address and source.endswith("ipynb") else {}
    buttons = tree.select(".dropdown-launch-buttons a[href]")
    shown = {link.get_text(strip=True): link["href"] for link in buttons}
    lines = [
        f"{name} opens {shown.get(name)}, not {wanted.get(name)}"
        for name in {*shown, *wanted} if shown.get(name) != wanted.get(name)
    ]  # fmt: skip
    for href, link in ((link["href"], link) for link in tree.select("a[href]")):
        if href in shown.values():
            continue
        place = href[len(address) :]
        if address and f"{href}/".startswith(f"{address}/"):
            file = re.match(rf"/(?:blob|edit|tree)/{branch}/([^?#]*)", place)
            known = file and (ROOT / file[1]).exists()
            if not known and not re.fullmatch(r"(/issues/new\?.*)?", place):
                lines.append(f"{href} leads to nothing in branch {branch}")
        elif HOSTS.search(href) and not link.find_parent(class_="citation"):
            lines.append(f"{href} is an address of another repository")
    return lines


@pytest.mark.parametrize("page", PAGES)
def test_buttons_of_a_page_open_it(page):
    built.require_book()
    source = built.source_file(page).relative_to(ROOT).as_posix()
    tree = built.parsed(built.page_file(page))
    none(button_faults(tree, source, read("_config.yml")))


# -- The judge fires

BOOK = "https://github.com/someone/book"
CONFIG = {
    "repository": {"url": BOOK, "branch": "main"},
    "launch_buttons": {
        "colab_url": "https://colab.example",
        "jupyterhub_url": "https://hub.example",
    },
}
COLAB = "https://colab.example/github/someone/book/blob/main/book/online.ipynb"
HUB = (
    "https://hub.example/hub/user-redirect/git-pull?repo=https%3A//github.com/someone/"
    "book&urlpath=lab/tree/book/book/online.ipynb&branch=main"
)
PAGE = f"""<div class="dropdown-launch-buttons"><a href="{COLAB}">Colab</a>
<a href="{HUB}">JupyterHub</a></div><a href="{BOOK}">Source</a>
<a href="{BOOK}/edit/main/book/online.ipynb">edit</a>
<a href="{BOOK}/issues/new?title=Issue">issue</a>
<a href="{BOOK}/blob/main/flashlib/api.py">file</a>"""


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("someone/book/blob/main/book", "other/book/blob/main/book", "Colab opens"),
        (f'<a href="{HUB}">JupyterHub</a>', "", "JupyterHub opens None"),
        ("flashlib/api.py", "flashlib/none.py", "leads to nothing"),
        (f'{BOOK}">', 'https://github.com/other/book">', "another repository"),
    ],
)
def test_a_wrong_button_is_found(old, new, fault):
    pages = PAGE, PAGE.replace(old, new, 1)
    right, wrong = (BeautifulSoup(x, "html.parser") for x in pages)
    assert not button_faults(right, "book/online.ipynb", CONFIG)
    (found,) = button_faults(wrong, "book/online.ipynb", CONFIG)
    assert fault in found


def test_without_a_repository_no_button_may_be_there():
    config = CONFIG | {"repository": {"url": "", "branch": "main"}}
    tree = BeautifulSoup(PAGE, "html.parser")
    assert len(button_faults(tree, "book/online.ipynb", config)) == 6
