"""Values in a TOML file are changed, and everything else stays as it was."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.config.toml_edit import set_values
from kvdepot.errors import ConfigError

FILE = """# ours
block_tokens = 256

[dram]
capacity = "2GiB"  # all of it

[ssd]  # the disks
path = [
  "/a",  # old
  "/b",
]
note = "a # is no comment"
capacity = "20GiB"  # of both

[tenants.acme]
secret_file = "/s"
"""


def test_one_value_changes_and_the_rest_stays() -> None:
    changed = set_values(FILE, {"ssd.capacity": "30GiB"})
    assert changed == FILE.replace('"20GiB"  # of both', '"30GiB"  # of both')


def test_a_list_over_several_lines_is_one_value() -> None:
    changed = set_values(FILE, {"ssd.path": ["/a", "/b", "/c"]})
    assert 'path = ["/a", "/b", "/c"]\nnote' in changed
    assert tomllib.loads(changed)["ssd"]["capacity"] == "20GiB"


def test_what_is_not_there_is_added_where_it_belongs() -> None:
    changed = tomllib.loads(set_values(FILE, {"ssd.write_mode": "x", "hdd.path": "/h"}))
    assert changed["ssd"]["write_mode"] == "x"
    assert changed["hdd"] == {"path": "/h"}


def test_dotted_names_are_found() -> None:
    assert set_values('ssd.path = "/a"\n', {"ssd.path": "/b"}) == 'ssd.path = "/b"\n'
    assert set_values('ssd . "path" = 1', {"ssd.path": 2}) == 'ssd . "path" = 2\n'


@pytest.mark.parametrize("text", ['ssd = { path = "/a" }\n', "ssd = 3\n", "[[ssd]]\npath = 1\n"])
def test_what_cannot_be_changed_is_told(text: str) -> None:
    with pytest.raises(ConfigError):
        set_values(text, {"ssd.path": "/b"})


@given(value=st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.integers(0, 9)))
def test_any_value_can_be_read_again(value: object) -> None:
    assert tomllib.loads(set_values(FILE, {"ssd.path": value}))["ssd"]["path"] == value
