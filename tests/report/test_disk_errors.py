"""A report that cannot be written: one message with the file, and the earlier page stays as it was."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.crash_points import library

ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EMFILE")


def test_an_earlier_report_outlives_every_disk_error(tmp_path: Path) -> None:
    """The disk fails at each point at which writing a page touches it."""
    if (preloaded := library()) is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.helpers.page_worker", str(tmp_path), *ERRORS],
        env=os.environ | {"LD_PRELOAD": str(preloaded)},
        capture_output=True,
        text=True,
        check=True,
    )
    tries = json.loads(ended.stdout.splitlines()[-1])
    failed = [one for one in tries if one["said"] != "written"]
    assert {one["error"] for one in failed} == {*ERRORS}
    for one in failed:
        why = os.strerror(getattr(errno, one["error"]))
        assert (
            one["said"] == f"cannot write the report to {tmp_path / 'report.html'}: {why}; choose a different --out"
        ), one
        assert one["text"] == "earlier", one
        if one["error"] in ("ENOSPC", "EDQUOT"):  # a full disk lets files be removed
            assert one["left"] == [], one
    assert len(failed) >= 4 * len(ERRORS), "open, write, sync and rename at least"
