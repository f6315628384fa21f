"""Who each request is from, decided before its KV blocks are hashed."""
