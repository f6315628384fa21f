"""Coda's operator: one CodaCluster object becomes engines, a router and their profile."""
