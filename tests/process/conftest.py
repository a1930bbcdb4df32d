"""A tiny checkpoint, shared by the tests that run a whole fit."""

import pytest

from tests.fakes.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))
