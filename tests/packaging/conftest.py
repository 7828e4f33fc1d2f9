"""Wheel and sdist of this checkout, built once."""

import pytest

from tests.support.dist import Dist, build


@pytest.fixture(scope="session")
def dist(tmp_path_factory) -> Dist:
    return build(tmp_path_factory.mktemp("checkout"))
