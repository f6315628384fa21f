"""Which tools replies call, seen in the API process where vLLM parses them, and told to EngineCore."""
