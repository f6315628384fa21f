"""Pure placement: snapshots in, a candidate set and its reason out; one file for each stage."""
