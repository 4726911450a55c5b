from __future__ import annotations

import pytest

from tools.mutate import TreeCopy


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> TreeCopy:
    """A copy of the tree, in which lines are broken one at a time."""
    return TreeCopy(tmp_path_factory.mktemp("mutations"))
