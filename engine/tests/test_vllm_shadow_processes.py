"""The CPU shadow between real processes: EngineCore and workers apart, engines that are killed, two ranks."""

import os

import pytest
from engine_harness import tokens
from shadow_engine_harness import BLOCK_BYTES, BLOCK_TOKENS, shadow_environment, shadow_folder
from shadow_process import EngineProcesses

PROMPT = tokens(1, 420)
CACHED = 13 * BLOCK_TOKENS
"""Tokens of PROMPT in whole blocks."""


def test_an_engine_after_kill_9_restores_what_its_predecessor_published(model_folder):
    with shadow_folder() as folder:
        environment = shadow_environment(folder, 60)
        with EngineProcesses.running(model_folder, environment) as first:
            cached = first.ask(PROMPT, 8)[1]
            assert cached == 0
            from_hbm, cached = first.ask(PROMPT, 8)
            assert cached == CACHED
            first.kill()
        with EngineProcesses.running(model_folder, environment) as second:
            restored, cached = second.ask(PROMPT, 8)
            assert (restored, cached) == (from_hbm, CACHED)
            # It publishes as well as it restores.
            other = tokens(2, 300)
            second.ask(other, 1)
            reference, _ = second.ask(other, 8)
            second.forget_hbm()
            assert second.ask(other, 8) == (reference, 9 * BLOCK_TOKENS)


@pytest.mark.skipif(os.cpu_count() < 2, reason="two ranks need two cores")
def test_two_ranks_restore_together_and_fail_together(model_folder):
    with shadow_folder() as folder, EngineProcesses.running(model_folder, shadow_environment(folder, 60), 2) as engine:
        cold, cached = engine.ask(PROMPT, 8)
        assert cached == 0
        from_hbm, _ = engine.ask(PROMPT, 8)
        engine.forget_hbm()
        assert engine.ask(PROMPT, 8) == (from_hbm, CACHED)
        assert len(data_files(folder)) == 2
        damage(data_files(folder)[1], BLOCK_BYTES // 2)
        engine.forget_hbm()
        answer, cached = engine.ask(PROMPT, 8)
        assert answer == cold
        engine.forget_hbm()
        assert engine.ask(PROMPT, 8) == (from_hbm, CACHED)


def data_files(folder):
    """The ranks' files of pages, in the order of ranks: the large ones."""
    return sorted(file for file in folder.iterdir() if file.stat().st_size >= 60 * BLOCK_BYTES // 2)


def damage(file, page_bytes):
    """Flip a byte in every page of one rank."""
    with file.open("r+b") as pages:
        for offset in range(page_bytes // 2, file.stat().st_size, page_bytes // 2):
            pages.seek(offset)
            byte = pages.read(1)
            pages.seek(offset)
            pages.write(bytes([byte[0] ^ 1]))
