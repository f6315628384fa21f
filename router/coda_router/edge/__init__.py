"""What clients speak: one file for each protocol, and the ASGI callable in front of all of them."""
