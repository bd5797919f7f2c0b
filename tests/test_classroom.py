"""The pieces of the class hub that need no hub, such as the queue for the GPU."""

import datetime
import importlib.util
import sqlite3
import subprocess
import sys
import tarfile
import types

import pytest
from built import ROOT
from processes import output, run_python


def load(name):
    """A module of deploy/hub by its path: the folder is no package."""
    path = ROOT / f"deploy/hub/{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


classroom, backup, feedback, gpu_queue = map(
    load, ("classroom", "backup", "feedback", "kernel/gpu_queue")
)


def test_settings_come_from_the_environment():
    room = classroom.Room.from_environment({})
    assert (room.port, room.instructor, room.gpu_seats) == (8000, "instructor", 4)
    said = {"HUB_PORT": "9000", "HUB_MEMORY_GIB": "1.5", "HUB_INSTRUCTOR": "eve"}
    room = classroom.Room.from_environment(said)
    assert (room.port, room.memory_gib) == (9000, 1.5)
    assert room.course.parts[-2:] == ("eve", "flashattention-course")


@pytest.mark.parametrize(
    "setting", ["HUB_PORT=no", "HUB_GPU_SEATS=0", "HUB_CPUS=-1", "HUB_INSTRUCTOR=Eve!"]
)
def test_a_setting_that_does_not_fit_is_named(setting):
    name, value = setting.split("=")
    with pytest.raises(ValueError, match=rf"{name}: expected .*, got '{value}'"):
        classroom.Room.from_environment({name: value})


@pytest.mark.parametrize(
    "name", ["root", "nobody", "Ada", "a", "ada-b", "../x", "a" * 40, ""]
)
def test_the_hub_serves_no_account_that_it_did_not_make(name):
    assert classroom.may_have("ada31415")
    assert not classroom.may_have(name)
    with pytest.raises(ValueError, match="not the hub's"):
        classroom.ensure_account(name, teaches=False)


def test_the_first_password_is_made_once_for_its_owner_alone(tmp_path):
    first = classroom.first_password(tmp_path)
    assert len(first) >= 20 and classroom.first_password(tmp_path) == first
    assert (tmp_path / "instructor-password").stat().st_mode & 0o777 == 0o600


def test_a_person_is_held_by_one_group(tmp_path):
    said = {"HUB_MEMORY_GIB": "2", "HUB_CPUS": "1.5", "HUB_PROCESSES": "99"}
    room = classroom.Room.from_environment(said)
    assert classroom.hold("ada", 7, room, tmp_path) is None, "no cgroup v2"
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    group = classroom.hold("ada", 7, room, tmp_path)
    names = ("memory.max", "cpu.max", "pids.max", "cgroup.procs")
    held = [(group / name).read_text() for name in names]
    assert held == [str(2**31), "150000 100000", "99", "7"]
    refusing = tmp_path / "cgroup.subtree_control"
    assert refusing.read_text() == "+memory +cpu +pids"
    refusing.unlink()
    refusing.mkdir()  # any OSError stands for the one of the kernel
    assert classroom.hold("ada", 7, room, tmp_path) is None


def test_a_backup_has_the_gradebook_as_it_was_committed(tmp_path):
    course, backups = tmp_path / "course", tmp_path / "backups"
    course.mkdir()
    assert backup.back_up(course, backups) is None, "there is no course yet"
    (course / "secret").write_text("s")
    (course / "graded").mkdir()
    (course / "graded/ada.md").write_text("well done")
    book = sqlite3.connect(course / "gradebook.db")
    book.execute("create table marks (points)")
    book.execute("insert into marks values (1)")
    book.commit()
    book.execute("insert into marks values (2)")  # somebody is grading
    done = backup.back_up(course, backups)
    book.close()
    assert done.stat().st_mode & 0o777 == 0o600
    with tarfile.open(done) as tar:
        names = {"gradebook.db", "secret", "graded", "graded/ada.md"}
        assert set(tar.getnames()) == names
        saved = tar.extractfile("gradebook.db").read()
    (tmp_path / "gradebook.db").write_bytes(saved)
    saved = sqlite3.connect(tmp_path / "gradebook.db")
    assert saved.execute("select points from marks").fetchall() == [(1,)]
    assert [path.name for path in backups.iterdir()] == [done.name]


def test_a_backup_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "gradebook.db").write_text("no database")
    with pytest.raises(sqlite3.DatabaseError):
        backup.back_up(tmp_path, tmp_path / "backups")
    assert list((tmp_path / "backups").iterdir()) == []


def test_old_backups_go(tmp_path):
    course = tmp_path / "course"
    course.mkdir()
    (course / "secret").write_text("s")
    start = datetime.datetime(2026, 1, 1)
    for day in range(1, backup.KEEP + 4):
        moment = start + datetime.timedelta(days=day)
        last = backup.back_up(course, tmp_path / "b", moment)
    kept = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len(kept) == backup.KEEP
    assert kept[-1] == last.name and kept[0].startswith("2026-01-05")


def test_feedback_needs_what_came_with_the_submission(tmp_path):
    for student, names in {"ada": feedback.MARKS_OF_SUBMISSION, "ben": ()}.items():
        (tmp_path / f"autograded/{student}/online").mkdir(parents=True)
        (tmp_path / f"submitted/{student}/online").mkdir(parents=True)
        for name in names:
            (tmp_path / f"submitted/{student}/online" / name).write_text(name)
    assert feedback.prepare(tmp_path, "online") == ["ada"]
    copied = tmp_path / "autograded/ada/online/timestamp.txt"
    assert copied.read_text() == "timestamp.txt"
    with pytest.raises(SystemExit, match="no graded submission of blocks"):
        feedback.main([str(tmp_path), "blocks"])


# -- The queue for the GPU


WAITS = """
import runpy, sys
Queue = runpy.run_path(sys.argv[1])["Queue"]
queue = Queue(sys.argv[2], int(sys.argv[3]), pause_s=0.05)
queue.acquire(lambda text: print("said", text, flush=True))
print("has it", flush=True)
sys.stdin.readline()
"""


def waiting(folder, places):
    queue = ROOT / "deploy/hub/kernel/gpu_queue.py"
    program = [sys.executable, "-c", WAITS, str(queue), str(folder), str(places)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(program, **pipes, text=True)


def test_who_waits_sees_for_whom_and_the_first_is_next(tmp_path):
    me = gpu_queue.Queue(tmp_path, 1)
    me.acquire(print)
    first = waiting(tmp_path, 1)
    name = gpu_queue.getpass.getuser()
    waits = f"said waiting for the GPU; before you: {name}"
    assert first.stdout.readline() == f"{waits}\n"
    second = waiting(tmp_path, 1)
    assert second.stdout.readline() == f"{waits}, {name}\n"
    me.release()
    assert [first.stdout.readline() for _ in range(2)] == ["said \n", "has it\n"]
    assert second.stdout.readline() == f"{waits}\n"
    first.kill()  # who dies gives up the place
    first.wait()
    assert [second.stdout.readline() for _ in range(2)] == ["said \n", "has it\n"]
    second.communicate("\n")
    assert second.returncode == 0


def test_as_many_as_there_are_places_run_together(tmp_path):
    one, two = waiting(tmp_path, 2), waiting(tmp_path, 2)
    assert one.stdout.readline() == two.stdout.readline() == "has it\n"
    three = waiting(tmp_path, 2)
    assert "before you" in three.stdout.readline()
    for process in (one, two, three):
        process.communicate("\n")


def test_a_free_place_is_silent_and_an_interrupted_wait_leaves_nothing(tmp_path):
    me, other = gpu_queue.Queue(tmp_path, 1), gpu_queue.Queue(tmp_path, 1)

    def stop(text):
        raise KeyboardInterrupt

    me.acquire(stop)
    with pytest.raises(KeyboardInterrupt):
        other.acquire(stop)
    assert me.held and not other.held and len(list(tmp_path.iterdir())) == 1
    me.release()
    assert not me.held and list(tmp_path.iterdir()) == []


def test_a_kernel_takes_its_seat_at_the_first_use_and_a_turn_at_each_cell(tmp_path):
    calls = []
    cuda = types.SimpleNamespace(
        _lazy_init=lambda: calls.append("start"),
        synchronize=lambda: calls.append("wait"),
        set_per_process_memory_fraction=calls.append,
    )  # fmt: skip
    guard = gpu_queue.Guard(cuda, tmp_path, 4, print)
    guard.before_cell()
    guard.after_cell()
    assert calls == [] and not guard.seat.held, "waits without need of the GPU"
    guard.before_cell()
    cuda._lazy_init()
    cuda._lazy_init()
    assert calls == ["start", gpu_queue.COUNTED / 4, "start"]
    assert guard.seat.held and guard.turn.held
    guard.after_cell()
    assert guard.seat.held and not guard.turn.held and calls[-1] == "wait"
    guard.before_cell()
    assert guard.turn.held
    guard.after_cell()
    guard.seat.release()


def test_a_cell_interrupted_while_it_waits_leaves_the_limit_to_the_next(tmp_path):
    calls = []
    cuda = types.SimpleNamespace(
        _lazy_init=lambda: calls.append("start"),
        set_per_process_memory_fraction=calls.append,
    )  # fmt: skip

    def interrupt(text):
        raise KeyboardInterrupt

    guard = gpu_queue.Guard(cuda, tmp_path, 4, interrupt)
    other = gpu_queue.Queue(tmp_path / "turns", 1)
    other.acquire(print)
    with pytest.raises(KeyboardInterrupt):
        cuda._lazy_init()
    assert guard.seat.held and not guard.turn.held and calls == []
    other.release()
    guard.before_cell()
    cuda._lazy_init()
    assert calls == ["start", gpu_queue.COUNTED / 4]
    guard.turn.release()
    guard.seat.release()


def test_a_kernel_starts_with_the_queue_and_no_new_name(tmp_path):
    startup = str(ROOT / "deploy/hub/kernel/startup.py")
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as S; "
        "s = S.instance(); "
        f"s.safe_execfile({startup!r}, s.user_ns, raise_exceptions=True); "
        "print(sorted(n for n in s.user_ns if 'queue' in n.lower() or 'run' in n "
        "or n in ('Guard', '_os')))"
    )
    assert output(run_python(code, PYTHONSTARTUP=startup, HOME=str(tmp_path))) == "[]\n"
