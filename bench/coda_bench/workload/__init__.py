"""Synthetic coding-agent sessions: pure, seeded, with the published statistics of real traces."""
