"""A small client of the Kubernetes API: what this operator asks for and no more (docs/decisions/0004)."""
