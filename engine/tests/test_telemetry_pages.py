"""Shared-memory pages: torn reads, killed writers, leftovers, rate limits."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from coda_engine.vllm_adapter.telemetry.page import (
    FILE_PREFIX,
    PageFiles,
    PageReader,
    PageWriter,
    page_path,
    remove_leftovers,
)
from coda_engine.vllm_adapter.telemetry.publisher import Flusher, Publisher

CAPACITY = 4_096


@pytest.fixture
def page(tmp_path):
    files = PageFiles.create(tmp_path, {"p": CAPACITY})
    yield page_path(files.prefix, "p")
    files.remove()


def test_an_empty_page_reads_as_nothing(page):
    assert PageReader(page).read() is None


def test_a_reader_sees_the_latest_version(page):
    writer, reader = PageWriter(page), PageReader(page)
    for version in range(1, 6):
        writer.write(version, b"content %d" % version)
        content = reader.read()
        assert (content.version, content.payload) == (version, b"content %d" % version)


def test_a_payload_that_does_not_fit_is_refused_and_the_page_keeps_its_content(page):
    writer = PageWriter(page)
    writer.write(1, b"good")
    with pytest.raises(ValueError, match="do not fit"):
        writer.write(2, b"x" * (CAPACITY + 64))
    assert PageReader(page).read().payload == b"good"


def test_a_damaged_slot_falls_back_to_the_other(page):
    writer = PageWriter(page)
    writer.write(1, b"older")
    writer.write(2, b"newer")
    content = bytearray(page.read_bytes())
    position = content.index(b"newer")
    with page.open("r+b") as file:
        file.seek(position)
        file.write(b"torn!")
    assert PageReader(page).read().payload == b"older"


def test_a_file_that_is_no_page_is_refused(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"\0" * 4096)
    with pytest.raises(ValueError, match="not a page"):
        PageReader(path)


WRITER = """
    import sys
    from pathlib import Path
    from coda_engine.vllm_adapter.telemetry.page import PageWriter
    writer = PageWriter(Path(sys.argv[1]))
    print("ready", flush=True)
    version = 0
    while True:
        version += 1
        writer.write(version, (b"%d," % version) * (200 + version % 300))
"""


def start_writer(page) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(page)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def is_whole(content) -> bool:
    items = content.payload.split(b",")[:-1]
    return len(items) == 200 + content.version % 300 and set(items) == {b"%d" % content.version}


def test_readers_never_see_a_torn_page_and_a_killed_writer_leaves_a_whole_one(page):
    last = 0
    for _ in range(4):
        writer = start_writer(page)
        reader = PageReader(page)
        try:
            for _ in range(2_000):
                content = reader.read()
                if content is not None:
                    assert is_whole(content)
                    assert content.version >= last or last == 0
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait(10)
            writer.stdout.close()
        after = PageReader(page).read()
        assert is_whole(after)


def test_pages_of_dead_processes_are_removed_and_live_ones_kept(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from coda_engine.vllm_adapter.telemetry.page import PageFiles; "
        "PageFiles.create(Path(sys.argv[1]), {'p': 64}); print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        (theirs,) = tmp_path.glob(f"{FILE_PREFIX}*")
        assert remove_leftovers(tmp_path) == []
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    mine = PageFiles.create(tmp_path, {"p": 64})
    assert not theirs.exists()
    assert len(list(tmp_path.iterdir())) == 1
    mine.remove()
    assert list(tmp_path.iterdir()) == []


ENGINE_OF_A_PARENT = """
    import subprocess, sys, time
    from pathlib import Path
    from coda_engine.vllm_adapter.telemetry.page import PageFiles
    child = (
        "import sys, time; from pathlib import Path; "
        "from coda_engine.vllm_adapter.telemetry.page import remove_pages; "
        "from coda_engine.vllm_adapter.telemetry.publisher import Flusher; "
        "Flusher([], lambda: remove_pages(Path(sys.argv[1]))).start(); print('ready', flush=True); time.sleep(60)"
    )
    files = PageFiles.create(Path(sys.argv[1]), {"p": 64})
    engine = subprocess.Popen([sys.executable, "-c", child, str(files.prefix)])
    print(engine.pid, flush=True)
    time.sleep(60)
"""


def test_an_engine_whose_parent_is_killed_removes_the_pages(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ENGINE_OF_A_PARENT), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    engine_pid = int(parent.stdout.readline())
    try:
        assert parent.stdout.readline() == "ready\n"
        assert list(tmp_path.glob(f"{FILE_PREFIX}*"))
        parent.kill()
        parent.wait(10)
        deadline_s = time.monotonic() + 20
        while list(tmp_path.iterdir()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        parent.kill()
        os.kill(engine_pid, signal.SIGKILL)
        parent.stdout.close()


def test_a_forked_child_does_not_remove_its_parent_s_pages(tmp_path):
    files = PageFiles.create(tmp_path, {"p": 64})
    files._owner_pid = os.getpid() + 1
    files.remove()
    assert page_path(files.prefix, "p").exists()


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        PageFiles.create(tmp_path / "absent", {"p": 64})


def test_a_publisher_writes_at_most_once_an_interval_and_keeps_the_last_offer(page):
    publisher = Publisher(PageWriter(page), interval_s=0.05)
    reader = PageReader(page)
    assert publisher.offer(lambda version: b"first", 10.0) is None
    assert publisher.offer(lambda version: b"second", 10.02) == pytest.approx(0.03)
    assert publisher.offer(lambda version: b"third", 10.03) == pytest.approx(0.02)
    assert reader.read().payload == b"first"
    assert publisher.flush(10.04) == pytest.approx(0.01)
    assert publisher.flush(10.051) is None
    assert (reader.read().payload, reader.read().version) == (b"third", 2)
    assert publisher.flush(11.0) is None
    assert reader.read().version == 2


def test_versions_go_on_after_another_writer_of_the_same_page(page):
    Publisher(PageWriter(page), 0.0).offer(lambda version: b"a", time.monotonic())
    second = Publisher(PageWriter(page), 0.0)
    second.offer(lambda version: b"%d" % version, time.monotonic())
    assert PageReader(page).read().payload == b"2"


def test_an_encoder_s_error_is_told_and_later_offers_arrive(page):
    errors: list[Exception] = []
    publisher = Publisher(PageWriter(page), 0.05, errors.append)

    def explode(_version):
        raise RuntimeError("a bug in an encoder")

    assert publisher.offer(explode, 10.0) is None
    assert [str(error) for error in errors] == ["a bug in an encoder"]
    publisher.offer(lambda version: b"later", 11.0)
    assert PageReader(page).read().payload == b"later"


def test_the_flusher_lives_on_after_an_encoder_s_error(page):
    told = threading.Event()
    publisher = Publisher(PageWriter(page), 0.01, lambda error: told.set())
    flusher = Flusher([publisher], None)
    flusher.start()
    try:
        publisher.offer(lambda version: b"first", time.monotonic())
        publisher.offer(lambda version: 1 / 0, time.monotonic())
        flusher.wake()
        assert told.wait(20)
        publisher.offer(lambda version: b"second", time.monotonic())
        publisher.offer(lambda version: b"third", time.monotonic())
        flusher.wake()
        deadline_s = time.monotonic() + 20
        while PageReader(page).read().payload != b"third":
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        flusher.stop()


def test_a_payload_that_does_not_fit_is_left_out_and_is_no_error(page):
    errors: list[Exception] = []
    publisher = Publisher(PageWriter(page), 0.0, errors.append)
    publisher.offer(lambda version: b"fits", 1.0)
    publisher.offer(lambda version: b"x" * (CAPACITY + 64), 2.0)
    assert (PageReader(page).read().payload, errors) == (b"fits", [])


def test_a_withdrawn_page_is_empty_and_takes_nothing_more(page):
    publisher = Publisher(PageWriter(page), 0.0)
    publisher.offer(lambda version: b"before", 1.0)
    publisher.withdraw()
    publisher.offer(lambda version: b"after", 2.0)
    assert publisher.flush(3.0) is None
    assert PageReader(page).read().payload == b""
