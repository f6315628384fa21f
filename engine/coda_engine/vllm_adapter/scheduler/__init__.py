"""State admission on vLLM's waiting queue, and what each step was made of."""
