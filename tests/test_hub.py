"""A class on one machine, in a browser: from the first start of the hub to feedback.

`make test-hub` runs it. Its accounts exist only in a throwaway root (hub_machine.py).
"""

import json
import os
import re
import secrets
import shutil
import stat
import subprocess

import pytest
from built import ROOT
from handed_in import handed_in
from hub_machine import LOOPBACK, Machine, free_ports, listened, until, wait_for
from processes import output, run

from exercises.grader import release, tasks

STEP = "online"
STUDENTS = ("ada", "ben")
WAIT_MS = 90_000

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="makes accounts in a root of its own"
)


class Person:
    """Somebody at a browser of their own."""

    def __init__(self, browser, site, machine, name, password):
        self.context = browser.new_context(viewport={"width": 1400, "height": 1000})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.site, self.machine = site, machine
        self.name, self.password = name, password
        self.home = machine.folder / "home" / name
        self.lines = 0

    def fill_in(self, form):
        self.page.goto(f"{self.site}/hub/{form}")
        self.page.fill("#username_input", self.name)
        self.page.fill("#password_input", self.password)

    def sign_up(self):
        self.fill_in("signup")
        self.page.fill("#password_confirmation_input", self.password)
        self.page.click("#signup_submit")
        self.page.locator(".alert").wait_for()

    def sign_in(self):
        self.fill_in("login")
        with self.page.expect_navigation():
            self.page.click("#login_submit")

    def turned_away(self):
        self.sign_in()
        said = re.compile("Invalid username or password|authorized by an admin")
        self.page.get_by_text(said).wait_for()

    def lab(self):
        self.page.goto(f"{self.site}/user/{self.name}/lab", timeout=WAIT_MS)
        self.page.wait_for_selector("#jp-main-dock-panel", timeout=WAIT_MS)

    def open_terminal(self):
        self.page.goto(f"{self.site}/user/{self.name}/terminals/1")
        self.page.wait_for_selector(".xterm-helper-textarea", state="attached")
        self.page.wait_for_timeout(1500)

    def run(self, line, seconds=200):
        """Type a line into the terminal; returns (exit status, output)."""
        self.lines += 1
        log, status = f".said-{self.lines}", f".status-{self.lines}"
        self.page.click(".xterm")
        self.page.keyboard.type(f"({line}) > ~/{log} 2>&1; echo $? > ~/{status}")
        self.page.keyboard.press("Enter")
        ended = self.home / status
        until(
            lambda: ended.is_file() and ended.read_text(), f"no end of {line}", seconds
        )
        return int(ended.read_text()), (self.home / log).read_text()

    def assignments(self):
        self.lab()
        self.page.click(".lm-MenuBar-itemLabel:text-is('Nbgrader')")
        self.page.click(".lm-Menu-itemLabel:text-is('Assignment List')")
        self.page.wait_for_selector(
            ".nbgrader-mainarea, .assignment-list-mainarea, #released_assignments_list"
        )

    def formgrader(self):
        self.page.goto(f"{self.site}/user/{self.name}/formgrader/manage_assignments")
        row = self.page.locator("tr", has=self.page.get_by_text(STEP, exact=True))
        row.wait_for()
        return row

    def answer(self):
        """What formgrader says after a click."""
        box = self.page.locator(".modal-body")
        box.wait_for()
        return box.inner_text()


@pytest.fixture(scope="module")
def room(tmp_path_factory, browser):
    """The hub, started by its one command, with its people: {name: Person}."""
    folder = tmp_path_factory.mktemp("hub")
    machine = Machine(folder)
    port = free_ports()
    log = folder / "hub.log"
    process = machine.start(log, "make", "hub", HUB_PORT=port)
    site = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{site}/hub/health", process)
        state = folder / "var/lib/flashattention-hub"
        passwords = {name: secrets.token_urlsafe(12) for name in STUDENTS}
        passwords["instructor"] = (state / "instructor-password").read_text().strip()
        place = browser, site, machine
        yield {name: Person(*place, name, word) for name, word in passwords.items()}
    finally:
        process.terminate()
        process.wait(30)
        print(log.read_text()[-6000:])
        shutil.rmtree(folder, ignore_errors=True)


def test_nothing_is_open_and_no_secret_is_readable(room):
    state = room["instructor"].machine.folder / "var/lib/flashattention-hub"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    for name in ("instructor-password", "cookie-secret"):
        assert stat.S_IMODE((state / name).stat().st_mode) == 0o600
    port = int(room["ada"].site.rsplit(":", 1)[1])
    assert listened(range(port, port + 3)) == {LOOPBACK}


def test_people_are_let_in_by_the_instructor(room):
    ada = room["ada"]
    for name in STUDENTS:
        room[name].sign_up()
    ada.turned_away()  # nobody has let her in yet
    place = ada.context.browser, ada.site, ada.machine
    thief = Person(*place, "root", "a long password 1")
    thief.sign_up()
    again = Person(*place, "instructor", "a long password 2")
    again.sign_up()

    instructor = room["instructor"]
    instructor.sign_in()
    instructor.page.goto(f"{instructor.site}/hub/authorize")
    known = instructor.page.locator("table").inner_text()
    assert "ada" in known and "root" not in known
    for name in STUDENTS:
        instructor.page.click(f"a[href$='authorize/{name}']:text-is('Authorize')")
        room[name].sign_in()
        room[name].lab()
    for wrong in (thief, again):
        wrong.turned_away()
        wrong.context.close()


def test_a_terminal_knows_its_limits(room):
    ben = room["ben"]
    ben.open_terminal()
    limits = "id -un; ulimit -u; ulimit -d; echo $GPU_SEATS"
    status, said = ben.run(f"{limits}; test -w $GPU_QUEUE && echo queue")
    assert status == 0 and said.split() == ["ben", "512", str(8 * 2**20), "4", "queue"]


def test_released_fetched_submitted(room):
    instructor = room["instructor"]
    instructor.lab()
    instructor.open_terminal()
    status, said = instructor.run(f"make -C {ROOT} assignments STEP={STEP}")
    assert status == 0, said
    instructor.formgrader().locator("td.release a").click()
    assert f"Successfully released '{STEP}'" in instructor.answer()

    secret = release.secret_of(instructor.home / "flashattention-course")
    solved = json.dumps(handed_in(tasks.assignment(STEP), secret, "ada"))
    for name in STUDENTS:
        student = room[name]
        student.assignments()
        student.page.click("#released_assignments_list button:text-is('Fetch')")
        submit = "#fetched_assignments_list button:text-is('Submit')"
        student.page.locator(submit).wait_for()
        if name == "ada":
            student.open_terminal()
            (student.home / "solved.ipynb").write_text(solved)
            os.chmod(student.home / "solved.ipynb", 0o644)
            assert student.run(f"cp ~/solved.ipynb ~/{STEP}/{STEP}.ipynb")[0] == 0
            student.assignments()
        student.page.locator(submit).click()
        submitted = student.page.locator("#submitted_assignments_list")
        submitted.get_by_text(STEP).first.wait_for()


def test_collected_graded_and_fed_back(room):
    instructor = room["instructor"]
    instructor.formgrader().locator("td.collect a").click()
    assert f"Successfully collected submissions of '{STEP}'" in instructor.answer()
    instructor.open_terminal()
    submitted = "~/flashattention-course/submitted"
    status, said = instructor.run(f"make -C {ROOT} grade SUBMISSIONS={submitted}")
    assert status == 0, said
    marks = instructor.home / "flashattention-course/marks.csv"
    marks = marks.read_text().splitlines()
    points = {line.split(",")[0]: float(line.split(",")[2]) for line in marks[1:]}
    assert set(points) == set(STUDENTS) and points["ada"] > points["ben"] == 0, marks
    status, said = instructor.run(f"make -C {ROOT} feedback STEP={STEP}")
    assert status == 0, said

    pages = {}
    for name in STUDENTS:
        student = room[name]
        student.assignments()
        fetch = "#submitted_assignments_list button:text-is('Fetch Feedback')"
        student.page.locator(fetch).first.click()
        home, page = student.home, f"{STEP}/feedback/*/{STEP}.html"
        found, *_ = until(lambda home=home, page=page: list(home.glob(page)), "no page")
        pages[name], file = found.read_text(), found.relative_to(home)
        student.page.goto(f"{student.site}/user/{name}/files/{file}")
        assert "of" in student.page.locator("body").inner_text()
    full = re.compile(r"(\d+) of \1 points")
    assert full.search(pages["ada"]) and not full.search(pages["ben"])
    assert "0 of" in pages["ben"]


def test_a_student_reaches_nothing_of_others(room):
    ben = room["ben"]
    ben.open_terminal()
    course = "~instructor/flashattention-course"
    exchange = "/srv/flashattention-class/exchange/flashattention"
    hidden = [
        "ls ~ada", f"cat ~ada/{STEP}/{STEP}.ipynb",
        "ls ~instructor", f"cat {course}/gradebook.db", f"cat {course}/secret",
        f"cat {course}/source/{STEP}/{STEP}.ipynb",
        f"cat {ROOT}/exercises/source/{STEP}/{STEP}.ipynb",
        f"ls {ROOT}/exercises/grader",
        f"ls {exchange}/inbound", f"ls {exchange}/feedback",
        "cat /var/lib/flashattention-hub/hub.sqlite",
        f"touch {ROOT}/flashlib/changed",
    ]  # fmt: skip
    for line in hidden:
        status, said = ben.run(line)
        denied = status != 0 and "Permission denied" in said
        assert denied or "Read-only" in said, f"{line}: {said}"
    # What the fences are around is there, and its owner sees it.
    folder = ben.machine.folder
    assert (folder / f"home/ada/{STEP}/{STEP}.ipynb").is_file()
    assert (folder / "home/instructor/flashattention-course/gradebook.db").is_file()
    ben.page.goto(f"{ben.site}/user/ada/lab")
    assert "403" in ben.page.locator("body").inner_text()
    ben.page.goto(f"{ben.site}/user/ben/formgrader/manage_assignments")
    assert "404" in ben.page.locator("body").inner_text()
    ben.page.goto(f"{ben.site}/hub/authorize")
    assert "403" in ben.page.locator("body").inner_text()


def test_the_backup_can_be_read_by_root_alone(room):
    machine = room["instructor"].machine
    course = "~instructor/flashattention-course"
    line = f"python deploy/hub/backup.py {course} /var/lib/b --once"
    output(run(machine.command("bash", "-c", line)))
    (copy,) = (machine.folder / "var/lib/b").glob("*.tar.gz")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    listed = output(run(["tar", "tzf", copy])).split()
    ada = f"submitted/ada/{STEP}/{STEP}.ipynb"
    assert {"gradebook.db", "secret", "marks.csv", ada} <= set(listed)


def test_a_link_brings_the_chapters(room):
    """nbgitpuller clones the book, here from a repository on this disk."""
    ada = room["ada"]
    store = ada.machine.folder / "srv/book.git"
    work = ada.machine.folder / "tmp/book"
    (work / "book").mkdir(parents=True)
    shutil.copy(ROOT / "book/primer.ipynb", work / "book")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", work]
    for words in ("init -q -b main", "add .", "commit -q -m book"):
        subprocess.run([*git, *words.split()], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", work, store], check=True)
    ada.open_terminal()
    ada.run("git config --global --add safe.directory '*'")
    ada.page.goto(
        f"{ada.site}/hub/user-redirect/git-pull?repo=file%3A///srv/book.git&branch=main"
        "&targetPath=book&urlpath=lab/tree/book/book/primer.ipynb"
    )
    ada.page.wait_for_selector(".jp-Notebook")
    copied = json.loads((ada.home / "book/book/primer.ipynb").read_text())
    assert copied["cells"]
