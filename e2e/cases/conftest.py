"""Fixtures of all end-to-end cases."""

import pytest
from places import Site, this_place


@pytest.fixture(scope="session")
def site() -> Site:
    return this_place()
