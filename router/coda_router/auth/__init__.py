"""API keys: how they are kept in files, whose they are, what each of them may ask for, and how much."""
