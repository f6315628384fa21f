"""The custom resource definitions, generated from the pydantic models: ``python -m coda_operator.crd`` writes them."""
