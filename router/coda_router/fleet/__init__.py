"""The workers: where they are, what they last said about themselves, what is in flight there."""
