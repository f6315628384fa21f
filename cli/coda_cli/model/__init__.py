"""Built-in models: small real models made out of packages, for trials, demos and tests."""
