"""`kvdepot bench daemon` with few rounds: the shape of its answer, and that it leaves nothing."""

import json
from pathlib import Path

import pytest

from kvdepot.cli.main import main


@pytest.mark.slow
def test_it_measures_what_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--rounds", "1", "--block", "1MiB", "--path", str(tmp_path)]
    assert main(["bench", "daemon", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    rows = {(row["tier"], row["op"]): row["bar"] for row in answer["rows"]}
    assert rows == {
        ("dram", "put_many"): None,
        ("dram", "get_many"): 0.9,
        ("dram", "get"): None,
        ("ssd", "put_many"): None,
        ("ssd", "get_many"): 0.9,
    }
    assert len(answer["latencies"]) == 3
    assert [figure["bar"] for figure in answer["figures"]] == [1000.0, 1000.0]
