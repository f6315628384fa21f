"""The CPU shadow between real processes: EngineCore and workers apart, engines that are killed, two ranks."""

import os

import pytest
import torch
from engine_harness import tokens
from shadow_engine_harness import BLOCK_BYTES, BLOCK_TOKENS, shadow_environment, shadow_folder
from shadow_process import EngineProcesses

RANKS, LAYERS, HEAD_SIZE = 2, 2, 32
RANK_PAGE_BYTES = 2 * LAYERS * BLOCK_TOKENS * HEAD_SIZE * 4

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


@pytest.fixture(scope="module")
def two_headed_model(tmp_path_factory):
    """A tiny model whose attention can be split in two (the built-in one has three KV heads)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1_000, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=RANKS, head_dim=HEAD_SIZE, max_position_embeddings=2_048, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(os.cpu_count() < RANKS, reason="two ranks need two cores")
def test_two_ranks_restore_together_and_fail_together(two_headed_model):
    prompt = [token % 1_000 for token in PROMPT]
    with (
        shadow_folder() as folder,
        EngineProcesses.running(two_headed_model, shadow_environment(folder, 60), RANKS) as engine,
    ):
        cold, cached = engine.ask(prompt, 8)
        assert cached == 0
        from_hbm, _ = engine.ask(prompt, 8)
        engine.forget_hbm()
        assert engine.ask(prompt, 8) == (from_hbm, CACHED)
        # Only the second rank's pages are bad: the first one's load must fail with it.
        damage(data_files(folder)[1])
        engine.forget_hbm()
        assert engine.ask(prompt, 8)[0] == cold
        engine.forget_hbm()
        assert engine.ask(prompt, 8) == (from_hbm, CACHED)


def data_files(folder):
    """The ranks' files of pages, in the order of ranks: the large ones."""
    files = sorted(file for file in folder.iterdir() if file.stat().st_size >= 60 * BLOCK_BYTES // RANKS)
    assert len(files) == RANKS
    return files


def damage(file):
    """Flip bytes in every page of one rank."""
    with file.open("r+b") as pages:
        for offset in range(RANK_PAGE_BYTES // 2, file.stat().st_size, RANK_PAGE_BYTES // 2):
            pages.seek(offset)
            byte = pages.read(1)
            pages.seek(offset)
            pages.write(bytes([byte[0] ^ 1]))
