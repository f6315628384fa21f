"""Coda's engine side: contracts, pure policies, profiling and the vLLM adapter."""

__version__ = "0.1.0"
