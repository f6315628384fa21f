"""Benchmarks in one form (design section 7): systems alternate within a run, figures carry their kind."""
