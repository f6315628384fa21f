"""What the sessions say, as token ids: random text, except that sessions of one provider start alike."""

import random

from coda_bench.workload.sessions import Session

_TOKEN_IDS = range(1_000, 40_000)
"""Ordinary tokens of any model that benchmarks run."""


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Return ``tokens`` random token ids."""
    return rng.choices(_TOKEN_IDS, k=tokens)


def new_text(session: Session, number: int, seed: int) -> list[int]:
    """Return the token ids that round ``number`` (from 0) of ``session`` adds; equal arguments give equal text.

    Args:
        session: Of the list that was generated with ``seed``.
        number: The round.
        seed: Of the list; other seeds give other text, except for what all sessions of a provider share.
    """
    tokens = session.rounds[number].new_tokens
    own = random.Random(f"text/{seed}/{session.index}/{number}")
    if number > 0:
        return random_prompt(own, tokens)
    shared = random_prompt(random.Random(f"shared/{session.provider}"), session.shared_tokens)
    return shared + random_prompt(own, tokens - session.shared_tokens)
