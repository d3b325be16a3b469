"""Settings that the tests of the laboratory share."""

from collections.abc import Iterator

import pytest

collect_ignore = ["fakes"]  # stand-ins for programs, run by tests


@pytest.fixture(scope="module")
def unchecked_fits() -> Iterator[None]:
    """Runs whose posteriors nobody looks at after training: that takes a third of the time of small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slimbayes_lab.runs.fit._diagnostics", lambda *args: None)
        yield
