"""The files: owner and mode, damage, too little space, layouts that nobody uses any more, two makers at once."""

import os
import resource
import stat
import tempfile
import time
from pathlib import Path

import pytest
from shadow_harness import LAYOUT, chain_keys, open_index, open_pages, write_and_publish

from coda_engine.contract.reasons import Reason
from coda_engine.shadow import ShadowError, ShadowLayout

KEYS = chain_keys(1)
UNPRIVILEGED = 65_534


def layout_of(identity, slots=8):
    return ShadowLayout(identity, 64, 1, slots)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "coda-shadow.lock")


def fill(folder):
    index, pages = open_index(folder), open_pages(folder)
    write_and_publish(index, pages, KEYS)
    index.close()
    pages.close()


def ready_keys(folder):
    index = open_index(folder)
    ready = [key for key in KEYS if index.ready(key)]
    index.close()
    return ready


def test_folder_and_files_are_the_owners_alone(shadow_folder):
    previous = os.umask(0)
    try:
        fill(shadow_folder)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(shadow_folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in shadow_folder.iterdir()} == {0o600}
    assert names(shadow_folder) == [f"coda-shadow-{LAYOUT.digest()}.{part}" for part in ("index", "rank0")]


def test_all_bytes_are_reserved_at_once(shadow_folder):
    open_pages(shadow_folder).close()
    for path in shadow_folder.glob("coda-shadow-*"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


def test_a_folder_that_is_open_to_others_is_refused(shadow_folder):
    shadow_folder.mkdir(mode=0o755)
    shadow_folder.chmod(0o750)
    with pytest.raises(ShadowError, match=r"open to others \(mode 0750\); take their rights away") as caught:
        open_index(shadow_folder)
    assert caught.value.reason is Reason.SHADOW_UNSAFE


def test_a_link_is_no_folder(shadow_folder):
    target = shadow_folder.with_name("elsewhere")
    target.mkdir(mode=0o700)
    shadow_folder.symlink_to(target)
    with pytest.raises(ShadowError, match="is a link or no folder"):
        open_index(shadow_folder)


def test_a_file_that_is_open_to_others_or_a_link_is_refused(shadow_folder):
    fill(shadow_folder)
    path = next(shadow_folder.glob("*.index"))
    path.chmod(0o640)
    with pytest.raises(ShadowError, match="mode 0640"):
        open_index(shadow_folder)
    moved = path.rename(shadow_folder.parent / "moved")
    path.symlink_to(moved)
    with pytest.raises(ShadowError, match="is a link or no file; remove it"):
        open_index(shadow_folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_owners_folder_and_files_are_refused(shadow_folder):
    fill(shadow_folder)
    path = next(shadow_folder.glob("*.rank0"))
    os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
    with pytest.raises(ShadowError, match="belongs to user 65534, this engine runs as 0") as caught:
        open_pages(shadow_folder)
    assert caught.value.reason is Reason.SHADOW_UNSAFE
    os.chown(shadow_folder, UNPRIVILEGED, UNPRIVILEGED)
    with pytest.raises(ShadowError, match="give each CodaCluster a folder of its own"):
        open_index(shadow_folder)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShadowError, match=r"cannot be made .*; name a writable folder") as caught:
        open_index(tmp_path / "file" / "shadow")
    assert caught.value.reason is Reason.SHADOW_UNUSABLE


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user for a moment")
def test_a_folder_that_cannot_be_written_is_told():
    # Not pytest's own folder: others may not enter that one.
    with tempfile.TemporaryDirectory(prefix="coda-read-only-") as name:
        folder = Path(name)
        os.chown(folder, UNPRIVILEGED, UNPRIVILEGED)
        folder.chmod(0o500)
        try:
            os.seteuid(UNPRIVILEGED)
            with pytest.raises(ShadowError, match="must be a writable memory file system"):
                open_index(folder)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("part", ["index", "rank0"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "longer"])
def test_a_damaged_file_that_nobody_uses_is_replaced(shadow_folder, part, damage):
    fill(shadow_folder)
    path = next(shadow_folder.glob(f"*.{part}"))
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "garbage": os.urandom(len(content)),
            "empty": b"",
            "longer": content + b"x",
        }[damage]
    )
    index, pages = open_index(shadow_folder), open_pages(shadow_folder)
    for key in KEYS:
        for ref in (index.pin([key]) or ()) if index.ready(key) else ():
            assert not pages.intact(ref)  # Its bytes are gone, and that is noticed.
            index.poison([ref])
            index.unpin([ref])
    refs = write_and_publish(index, pages, KEYS)
    assert len(refs) == len(KEYS)
    assert all(map(pages.intact, refs))
    index.close()
    pages.close()


def test_a_damaged_file_that_others_use_is_left_alone(shadow_folder):
    fill(shadow_folder)
    user = open_pages(shadow_folder)
    for part in ("index", "rank0"):
        path = next(shadow_folder.glob(f"*.{part}"))
        with path.open("r+b") as file:
            file.write(b"garbage")
        with pytest.raises(ShadowError, match="other engines have it open; restart them") as caught:
            open_pages(shadow_folder)
        assert caught.value.reason is Reason.SHADOW_UNUSABLE
        assert path.exists()
        with path.open("r+b") as file:
            file.write(b"CODASHIX" if part == "index" else b"CODASHPG")
    user.close()
    assert ready_keys(shadow_folder) == KEYS


def test_pages_belong_to_their_index(shadow_folder):
    fill(shadow_folder)
    next(shadow_folder.glob("*.index")).unlink()
    user = open_pages(shadow_folder)  # Replaces the data file, which is of the index that is gone.
    next(shadow_folder.glob("*.index")).unlink()
    with pytest.raises(ShadowError, match="belongs to another index, and other engines have it open"):
        open_pages(shadow_folder)
    user.close()
    open_pages(shadow_folder).close()


def test_too_little_space_is_an_error_now_and_leaves_nothing(shadow_folder):
    layout = ShadowLayout("huge", 1 << 30, 1, 1 << 20)
    with pytest.raises(ShadowError) as caught:
        open_pages(shadow_folder, layout)
    assert caught.value.reason is Reason.SHADOW_NO_SPACE
    assert "rank0 needs 1,125,8" in caught.value.detail
    assert "make the memory file system larger (emptyDir sizeLimit, --shm-size)" in caught.value.detail
    assert not [name for name in names(shadow_folder) if "rank0" in name]


def test_space_that_the_file_system_refuses_is_an_error_and_not_a_fault_later(shadow_folder):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    index = open_index(shadow_folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ShadowError, match="rank0 needs 110,592 bytes") as caught:
            open_pages(shadow_folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.reason is Reason.SHADOW_NO_SPACE
    assert names(shadow_folder) == [f"coda-shadow-{LAYOUT.digest()}.index"]
    open_pages(shadow_folder).close()
    index.close()


def test_unused_layouts_go_for_a_new_one_the_oldest_first_and_only_if_need_be(shadow_folder, monkeypatch):
    for age, identity in enumerate(("third", "second", "first")):
        open_pages(shadow_folder, layout_of(identity)).close()
        for path in shadow_folder.glob(f"*{layout_of(identity).digest()}*"):
            os.utime(path, (1_000 - age, 1_000 - age))
    used = open_pages(shadow_folder, layout_of("used"))
    for path in shadow_folder.glob(f"*{layout_of('used').digest()}*"):
        os.utime(path, (1, 1))
    present = {identity: layout_of(identity).digest() for identity in ("first", "second", "third", "used")}

    def remaining():
        return {
            identity for identity, digest in present.items() if any(digest in name for name in names(shadow_folder))
        }

    open_pages(shadow_folder, layout_of("new")).close()
    assert remaining() == set(present)

    reserve, refusals = os.posix_fallocate, [2]

    def reserve_if_two_layouts_have_gone(descriptor, offset, size_bytes):
        if len(remaining()) > len(present) - refusals[0]:
            raise OSError(28, "No space left on device")
        reserve(descriptor, offset, size_bytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve_if_two_layouts_have_gone)
    open_pages(shadow_folder, layout_of("newer")).close()
    assert remaining() == {"third", "used"}
    refusals[0] = 4
    with pytest.raises(ShadowError, match=r"spec\.kvShadow.size smaller"):
        open_pages(shadow_folder, layout_of("newest"))
    assert remaining() == {"used"}
    assert used.page(0).shape == (64,)
    used.close()


def test_for_room_a_dead_maker_s_leftovers_go_too_and_nothing_that_is_not_the_shadow_s(shadow_folder, monkeypatch):
    used = open_pages(shadow_folder, layout_of("used"))
    kept = names(shadow_folder)
    (shadow_folder / f".coda-shadow-{'0' * 32}.rank0.new").write_bytes(b"left by a maker that died")
    (shadow_folder / "notes.txt").write_text("not ours")

    def refuse(descriptor, offset, size_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ShadowError, match="are free"):
        open_pages(shadow_folder, layout_of("new"))
    assert names(shadow_folder) == [*kept, "notes.txt"]
    used.close()


def test_what_a_maker_left_that_died_is_made_anew(shadow_folder):
    fill(shadow_folder)
    for path in list(shadow_folder.glob("coda-shadow-*.*")):
        path.rename(path.with_name(f".{path.name}.new"))
    fill(shadow_folder)
    assert ready_keys(shadow_folder) == KEYS
    assert len(names(shadow_folder)) == 2


def test_processes_that_start_at_once_share_one_store(shadow_folder, nursery):
    children = [nursery.fork("open_and_count") for _ in range(12)]
    nursery.progress.wait_for("started", 1)
    deadline_s = time.monotonic() + 20
    index = open_index(shadow_folder)
    while index.statistics().used_pages < 12 and time.monotonic() < deadline_s:
        index.sync()
        time.sleep(0.01)
    assert index.statistics().used_pages == 12
    assert len(names(shadow_folder)) == 2
    for child in children:
        child.kill()
    index.close()
