"""Whose cached KV leaves HBM first: gaps of sessions, owners of blocks and the victim window."""
