"""Training in all tests here is that of small problems."""

import pytest


@pytest.fixture(autouse=True)
def small_problems(few_shapes: None) -> None:
    """`few_shapes` for every test."""
