"""Everything that imports vLLM or torch: hooks loaded by entry point, each gated by its own check."""
