"""Benchmarks in one form: systems alternate within a run, figures carry their kind."""
