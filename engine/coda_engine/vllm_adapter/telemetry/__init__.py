"""What the engine tells about itself: shared-memory pages, and what is written on them."""
