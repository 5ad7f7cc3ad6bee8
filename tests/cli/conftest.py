"""A small model file."""

from pathlib import Path

import pytest
from refusals import small

from gdp.graph.file import save_graph


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_graph(small(), tmp_path / "small.json")
    return tmp_path / "small.json"
