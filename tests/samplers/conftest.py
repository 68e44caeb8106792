"""The rollout servers that several files of this folder draw from; starting them takes a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.rollout_servers import Fleet, served_fleet
from tests.helpers.toy_runs import Toys


@pytest.fixture(scope="package")
def fleet(toys: Toys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yield two servers. test_servers.py comes last: it kills them at its end."""
    pytest.importorskip("vllm")
    with served_fleet(toys, tmp_path_factory.mktemp("servers"), ahead=1) as fleet:
        yield fleet
