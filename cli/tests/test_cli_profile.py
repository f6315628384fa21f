"""``coda profile`` without an engine: what is shown of a file, the report page, and mistakes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from coda_engine.contract.profile import Profile, Revalidation
from coda_engine.profiling.assumed import assumed_key, assumed_profile

Coda = Callable[..., Any]


def whole_profile() -> Profile:
    profile = assumed_profile(assumed_key(), 0.6, ms_per_context_token=0.02, restore_ms_per_mb=0.3)
    checked = Revalidation(driver="kernel 7", runtime="torch 2", checked_at="2026-02-01", worst_error=0.04)
    return profile.model_copy(update={"revalidations": [checked]})


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    file = tmp_path / "smollm2.json"
    file.write_bytes(whole_profile().to_json())
    return file


def test_show_names_the_file_and_every_part_with_its_check(coda: Coda, profile_file: Path) -> None:
    outcome = coda("profile", "show", profile_file)
    assert outcome.code == 0
    assert outcome.out.startswith(f"{profile_file}:\n")
    for part in ("prefill tokens", "on context of", "restore       MB", "held again 2026-02-01 under kernel 7"):
        assert part in outcome.out
    assert outcome.out.count("worst held-out error") == 3


def test_show_says_what_was_not_measured(coda: Coda, tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_bytes(assumed_profile(assumed_key()).to_json())
    outcome = coda("profile", "show", file)
    assert "restores: not measured, no shadow" in outcome.out
    assert "the curve serves every context" in outcome.out


def test_the_report_is_one_page_that_loads_nothing_and_draws_every_part(
    coda: Coda, profile_file: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    assert coda("profile", "show", profile_file, "--report", report).code == 0
    page = report.read_text()
    assert not re.findall(r"https?:|src=|@import|url\(|<script|<link", page)
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    drawings = [ElementTree.fromstring(svg) for svg in svgs]  # noqa: S314 - a page of our own
    assert len(drawings) == 3
    profile = whole_profile()
    points = [len(profile.prefill.points), 6, 2]
    held_out = [len(part.held_out) for part in profile.parts.values()]
    assert [_count(drawing, "circle", "point") for drawing in drawings] == points
    assert [_count(drawing, "circle", "hollow") for drawing in drawings] == held_out
    assert all(_count(drawing, "polygon", "band") and _count(drawing, "polyline", "dashed") for drawing in drawings)
    for words in ("Held-out points", "kernel 7", profile.digest(), "8,192 tokens of context"):
        assert words in page


def test_the_report_shows_a_models_name_as_text(coda: Coda, tmp_path: Path) -> None:
    file, report = tmp_path / "profile.json", tmp_path / "report.html"
    key = assumed_key()
    named = key.model_copy(update={"spec": key.spec.model_copy(update={"model": "<script>alert(1)</script>"})})
    file.write_bytes(assumed_profile(named).to_json())
    coda("profile", "show", file, "--report", report)
    assert "<script" not in report.read_text()


def test_a_file_of_an_older_schema_is_named_with_the_remedy(coda: Coda, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_bytes(whole_profile().to_json().replace(b'{"schema_version":2', b'{"schema_version":1'))
    outcome = coda("profile", "show", file)
    assert outcome.code == 2
    assert f"{file}: is no profile that can be read" in outcome.err
    assert "measure again (coda profile)" in outcome.err


def test_a_report_into_a_folder_that_does_not_exist_is_refused_before_anything_is_measured(
    coda: Coda, tmp_path: Path
) -> None:
    outcome = coda("profile", "--engine", "http://127.0.0.1:9", "--apply", "--report", tmp_path / "no" / "r.html")
    assert outcome.code == 2
    assert "--report" in outcome.err
    assert "its folder does not exist" in outcome.err


def test_applying_to_an_engine_that_is_not_there_names_it(coda: Coda, profile_file: Path) -> None:
    outcome = coda("profile", "apply", profile_file, "--engine", "http://127.0.0.1:9")
    assert outcome.code == 2
    assert "http://127.0.0.1:9 cannot be reached" in outcome.err


def _count(drawing: ElementTree.Element, tag: str, name: str) -> int:
    return sum(name in element.get("class", "").split() for element in drawing.iter(tag))
