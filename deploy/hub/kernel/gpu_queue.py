"""One GPU for a class: notebooks wait for each other, and see for whom.

Memory: a kernel that first uses the GPU takes one of GPU_SEATS seats and keeps it until
it ends. With a seat comes an equal part of the GPU's memory, beyond which PyTorch
refuses. Time: one cell that uses the GPU runs at a time. Whoever waits reads how many
are before them.

This keeps a class from running out of memory by accident. It does not stop somebody who
works around it.
"""

import contextlib
import fcntl
import getpass
import os
import pathlib
import sys
import time

# Left of the memory for what PyTorch does not count: a context of each process,
# Triton's programs.
COUNTED = 0.85


class Queue:
    """Places in a folder that everybody may write to. First come, first served; who
    dies gives up the place.

    A waiting or working process holds a lock on its ticket, a file named by its time of
    arrival. A ticket whose lock can be had belongs to nobody.
    """

    def __init__(self, folder, places, pause_s=0.5):
        self.folder, self.places, self.pause_s = pathlib.Path(folder), places, pause_s
        self.ticket = self.handle = None

    def before(self):
        """Names of those who came before this ticket and are still here."""
        names = []
        for path in sorted(self.folder.glob("*.ticket")):
            if path.name >= self.ticket.name:
                break
            with contextlib.suppress(FileNotFoundError), open(path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    names.append(path.name.split("-")[1])
                else:
                    with contextlib.suppress(PermissionError):
                        path.unlink()
        return names

    def acquire(self, tell):
        """Wait for a place. tell(text) says what changed while waiting, and the empty
        text at the end.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            os.chmod(self.folder, 0o1777)
        name = f"{time.time_ns()}-{getpass.getuser()}-{os.getpid()}"
        hidden = self.folder / f".{name}"
        self.handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(self.handle, 0o644)
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        # Under its name only once it is locked: nobody may take it for one whose owner
        # is gone.
        self.ticket = hidden.rename(self.folder / f"{name}.ticket")
        said = None
        try:
            while len(names := self.before()) >= self.places:
                if names != said:
                    tell(f"waiting for the GPU; before you: {', '.join(names)}")
                    said = names
                time.sleep(self.pause_s)
        except BaseException:
            self.release()
            raise
        if said:
            tell("")

    def release(self):
        if self.handle is not None:
            self.ticket.unlink(missing_ok=True)
            os.close(self.handle)
            self.ticket = self.handle = None

    @property
    def held(self):
        return self.handle is not None


class Guard:
    """Takes a seat and a turn when a cell first uses CUDA, a turn at each later
    cell.
    """

    def __init__(self, cuda, folder, seats, tell):
        self.cuda, self.seats, self.tell = cuda, seats, tell
        self.seat = Queue(pathlib.Path(folder) / "seats", seats)
        self.turn = Queue(pathlib.Path(folder) / "turns", 1)
        self.start_cuda = cuda._lazy_init
        self.pid, self.limited = os.getpid(), False
        cuda._lazy_init = self.first_use

    def first_use(self):
        if os.getpid() != self.pid or self.limited:
            self.start_cuda()
            return
        # An earlier cell may have been interrupted after any of these steps.
        for queue in (self.seat, self.turn):
            if not queue.held:
                queue.acquire(self.tell)
        self.start_cuda()
        self.cuda.set_per_process_memory_fraction(COUNTED / self.seats)
        self.limited = True

    def before_cell(self, *_):
        if self.seat.held and not self.turn.held:
            self.turn.acquire(self.tell)

    def after_cell(self, *_):
        if self.turn.held:
            try:
                self.cuda.synchronize()
            finally:
                self.turn.release()


def tell(text):
    if text:
        print(text, file=sys.stderr, flush=True)


def install(shell, environment):
    """Guard this kernel, if the machine has a GPU."""
    if "GPU_QUEUE" not in environment or not os.path.exists("/dev/nvidiactl"):
        return None
    import torch

    guard = Guard(
        torch.cuda, environment["GPU_QUEUE"], int(environment["GPU_SEATS"]), tell
    )
    shell.events.register("pre_run_cell", guard.before_cell)
    shell.events.register("post_run_cell", guard.after_cell)
    return guard


if __name__ == "kernel":
    from IPython import get_ipython

    install(get_ipython(), os.environ)
