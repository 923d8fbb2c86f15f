"""Every page of docs/reference is generated, and is what its generator makes of today's source."""

import pytest
from tests.support import cli_reference, reference_pages

PAGES = {"cli.md": cli_reference.page, **reference_pages.PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    module = "cli_reference" if name == "cli.md" else "reference_pages"
    text = (reference_pages.FOLDER / name).read_text()
    assert text == PAGES[name](), f"run python -m tests.support.{module}"


def test_no_page_is_written_by_hand() -> None:
    assert {path.name for path in reference_pages.FOLDER.iterdir()} == PAGES.keys()
