"""What crosses a process boundary: reasons, snapshot, identity, profile, settings, errors.

No torch, no I/O, no clock, no environment. Every document is versioned; readers tolerate
unknown fields in documents written by newer processes and refuse unknown fields written by people.
"""
