"""Coda's router: places each request on one of N engines and relays its bytes unchanged."""
