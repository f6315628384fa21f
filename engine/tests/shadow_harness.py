"""Real processes around a shadow store: a nursery forks them in milliseconds, tests stop and kill them.

A child's bytes are a function of the page's key, so that whoever reads a page knows what it must hold.
"""

import hashlib
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from coda_engine.shadow import EvictionPolicyName, ShadowIndex, ShadowLayout, ShadowPages

PAGE_BYTES = 1_000
CHAINS, DEPTH = 24, 8
LAYOUT = ShadowLayout(identity="test", page_bytes=PAGE_BYTES, ranks=1, slots=96)
FILLER = [b"filler %03d" % number for number in range(LAYOUT.slots)]
PATIENCE_S = 20.0
COUNTERS = ("started", "published", "served", "refused", "wrong", "flag")


def chain_keys(chain: int, depth: int = DEPTH) -> list[bytes]:
    """Return the keys of one prefix."""
    return [hashlib.sha256(b"%d/%d" % (chain, page)).digest() + b"\0\0\0\0" for page in range(depth)]


def bytes_of(key: bytes, page_bytes: int = PAGE_BYTES) -> np.ndarray:
    """Return what the page of ``key`` must hold."""
    return np.frombuffer(hashlib.shake_128(key).digest(page_bytes), np.uint8)


def open_index(folder: Path, layout: ShadowLayout = LAYOUT, **options) -> ShadowIndex:
    """Return an index with the tests' defaults."""
    return ShadowIndex.open(folder, layout, **{"eviction": EvictionPolicyName.LRU, "clock": time.monotonic, **options})


def open_pages(folder: Path, layout: ShadowLayout = LAYOUT) -> ShadowPages:
    """Open the pages of a layout's first rank."""
    return ShadowPages.open(folder, layout, 0)


def reserve_and_publish(index: ShadowIndex, keys) -> list:
    """Publish pages that nobody has written: the index does not look at them."""
    refs = index.reserve(keys)
    index.publish(refs)
    return refs


def write_and_publish(index: ShadowIndex, pages: ShadowPages, keys) -> list | None:
    """Do what an engine does with computed pages; return the references, None without room."""
    refs = index.reserve(keys)
    written = [ref for ref in refs or () if pages.begin_write(ref)]
    for ref in written:
        pages.page(ref.slot)[:] = bytes_of(ref.key)
        pages.seal(ref)
    if refs:
        index.publish(written)
        index.abandon([ref for ref in refs if ref not in written])  # Its record has been damaged.
    return refs


class Progress:
    """Counters in a shared file, by which children report."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(COUNTERS)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * len(COUNTERS))

    def __getitem__(self, name: str) -> int:
        at = 8 * COUNTERS.index(name)
        return int.from_bytes(self._memory[at : at + 8], "little")

    def add(self, name: str, amount: int = 1) -> None:
        at = 8 * COUNTERS.index(name)
        self._memory[at : at + 8] = (self[name] + amount).to_bytes(8, "little")

    def wait_for(self, name: str, count: int) -> None:
        """Return once the counter has reached ``count``; fail after a while."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self[name] < count:
            assert time.monotonic() < deadline_s, f"{name} is {self[name]}, not {count}, after {PATIENCE_S} s"
            time.sleep(0.001)


class Child:
    """A process that the nursery forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        with suppress(ProcessLookupError):  # It may have ended by itself already.
            self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def join(self) -> None:
        """Return once the process has ended; fail after a while."""
        if self._descriptor is None:
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        ended = poll.poll(PATIENCE_S * 1_000)
        os.close(self._descriptor)
        assert ended, f"process {self.pid} has not ended"

    def kill(self) -> None:
        """End the process at whatever instruction it is."""
        self.send(signal.SIGKILL)
        self.join()


class Nursery:
    """Forks children that have everything imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress = Progress(folder.with_name(f"{folder.name}.progress"))
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import shadow_harness; shadow_harness.run_nursery()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def fork(self, role: str, **arguments) -> Child:
        """Return a child that runs the function ``role`` of this module."""
        order = {"role": role, "folder": str(self.folder), "arguments": arguments}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Child(int(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()


def run_nursery() -> None:
    """Fork a child for each line of standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            order = json.loads(line)
            try:
                folder = Path(order["folder"])
                progress = Progress(folder.with_name(f"{folder.name}.progress"))
                globals()[order["role"]](folder, progress, **order["arguments"])
            except BaseException as error:
                print(f"{order['role']}: {error!r}", file=sys.stderr, flush=True)
                raise
            finally:
                os._exit(0)
        print(pid, flush=True)


# Roles


def publish_for_ever(folder: Path, progress: Progress, seed: int) -> None:
    """Reserve, write, seal, publish; now and then give a reservation back or withdraw a page."""
    choice = random.Random(seed)
    index, pages = open_index(folder), open_pages(folder)
    progress.add("started")
    while True:
        index.sync()
        keys = chain_keys(choice.randrange(CHAINS), choice.randint(1, DEPTH))
        if choice.random() < 0.1:
            index.abandon(index.reserve(keys) or ())
            continue
        if write_and_publish(index, pages, keys):
            progress.add("published")
        index.touch(keys)


def read_for_ever(folder: Path, progress: Progress, seed: int) -> None:
    """Pin, copy, verify, compare with what the key demands; withdraw what is not intact."""
    choice = random.Random(seed)
    index, pages = open_index(folder), open_pages(folder)
    progress.add("started")
    while True:
        index.sync()
        keys = [key for key in chain_keys(choice.randrange(CHAINS)) if index.ready(key)]
        refs = index.pin(keys)
        if not refs:
            continue
        for ref in refs:
            copy = pages.page(ref.slot).copy()
            if not pages.intact(ref, copy):
                progress.add("refused")
                index.poison([ref])
            elif (copy == bytes_of(ref.key)).all():
                progress.add("served")
            else:
                progress.add("wrong")
        index.unpin(refs)


def operate_until_line(folder: Path, progress: Progress, line: int, seed: int) -> None:
    """Open, do every operation once, close; die by SIGKILL before the ``line``-th line of the store's code is run."""
    choice = random.Random(seed)
    left = line

    def trace(frame, event, argument):
        nonlocal left
        if f"{os.sep}shadow{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    index, pages = open_index(folder), open_pages(folder)
    keys = chain_keys(choice.randrange(CHAINS))
    write_and_publish(index, pages, keys)
    refs = index.pin(keys) or []
    index.poison(refs[-1:])
    index.unpin(refs)
    index.abandon(index.reserve(chain_keys(choice.randrange(CHAINS))) or ())
    index.sync()
    index.close()
    pages.close()
    sys.settrace(None)
    progress.add("flag")  # There is no such line any more.


def hold_reservation(folder: Path, progress: Progress, chain: int) -> None:
    """Reserve pages and do nothing more."""
    index = open_index(folder)
    assert index.reserve(chain_keys(chain))
    progress.add("started")
    signal.pause()


def hold_pins(folder: Path, progress: Progress, chain: int) -> None:
    """Pin published pages and do nothing more."""
    index = open_index(folder)
    assert index.pin(chain_keys(chain))
    progress.add("started")
    signal.pause()


def hold_index(folder: Path, progress: Progress) -> None:
    """Stop with the index locked."""
    index = open_index(folder)

    def stop() -> None:
        progress.add("started")
        signal.pause()

    index._locked(stop)


def die_with_torn_record(folder: Path, progress: Progress, chain: int, torn_bytes: int) -> None:
    """Die in the middle of copying a record into the index."""
    from coda_engine.shadow.index_file import IndexFile

    index = open_index(folder)
    put = IndexFile.put_record

    def put_partly(file: IndexFile, slot: int, raw: bytes) -> None:
        put(file, slot, raw[:torn_bytes] + file.record(slot)[torn_bytes:])
        os.kill(os.getpid(), signal.SIGKILL)

    IndexFile.put_record = put_partly
    index.reserve(chain_keys(chain))


def die_before_telling(folder: Path, progress: Progress, chain: int, change: str) -> None:
    """Die with all records of a change written, before anybody is told."""
    from coda_engine.shadow.index_file import IndexFile

    index = open_index(folder)
    refs = index.reserve(chain_keys(chain)) if change == "publish" else []
    told = IndexFile.sequence
    IndexFile.sequence = told.setter(lambda file, value: os.kill(os.getpid(), signal.SIGKILL))
    if change == "publish":
        index.publish(refs)
    else:
        index.reserve(chain_keys(chain))


def open_and_count(folder: Path, progress: Progress) -> None:
    """Open everything, say so, stay."""
    index, pages = open_index(folder), open_pages(folder)
    assert write_and_publish(index, pages, [os.urandom(32)])
    progress.add("started")
    signal.pause()


def fork_and_stay(folder: Path, progress: Progress, chain: int) -> None:
    """Reserve, fork, and die; the child lives on with what it inherited."""
    index = open_index(folder)
    assert index.reserve(chain_keys(chain))
    if os.fork() == 0:
        with suppress(ValueError):
            index.sync()
            progress.add("wrong")  # The parent's index must not work here.
        progress.add("started")
        progress.wait_for("flag", 1)
        os._exit(0)
    progress.wait_for("started", 1)
    os.kill(os.getpid(), signal.SIGKILL)
