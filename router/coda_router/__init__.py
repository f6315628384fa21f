"""The router in front of the engines: identity, placement and a byte-exact proxy."""
