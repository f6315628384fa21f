"""Benchmarks of the engine: real vLLM with and without Coda's plug-ins, alternating in one run."""
