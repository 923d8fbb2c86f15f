"""What the tests of the vLLM adapter share. They need torch, not vLLM."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import Toys


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds that one test has learnt are not another's."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    made = Toys(tmp_path)
    yield made
    made.close()
