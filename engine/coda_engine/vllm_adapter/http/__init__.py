"""Internal endpoints on the engine's own port, served without touching the engine's thread."""
