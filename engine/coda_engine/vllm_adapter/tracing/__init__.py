"""What Coda adds to vLLM's OpenTelemetry spans."""
