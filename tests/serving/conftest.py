"""One browser for all tests of the playground; without one they are skipped."""

import pytest

from browser import Page, artefacts, chromium


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(driver, tmp_path):
    """The playground; whatever a test does, the console must hold no complaint at its end."""
    page = Page(driver, artefacts(tmp_path))
    yield page
    assert page.complaints() == []
