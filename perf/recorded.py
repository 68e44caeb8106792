"""Replace the runs that the demo opens by itself, and take the pictures of the documentation anew.

    python -m perf.recorded grpo=runs/quickstart-real-grpo luspo=runs/quickstart-real --problems 96

Each run becomes a small copy under the given name. The demo opens them at the problem whose lengths differ most among
those where the runs' last lengths and verdicts differ. Afterwards, read what docs/demo.md says about these runs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from perf import screenshots
from vlm_rl.demo.default_runs import FIRST_VIEW, RECORDED
from vlm_rl.demo.files.small_copy import copy_small
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.page_state import PageStates
from vlm_rl.demo.panels.problem import columns_of
from vlm_rl.run.directory import RunDirectory

MAX_BYTES = 1_000_000  # of all recorded runs, which every installation has


def choose_view(folder: Path) -> str:
    """Return the query of the problem with the largest difference in length among those whose verdicts differ."""
    states = PageStates(Library([folder]))
    state = states.of(UrlState.parse("sort=difference"))
    for index in state.order.tolist():
        samples = range(max(len(column.lengths) for column in columns_of(state, index)))
        for sample in samples:
            url = UrlState(sort="difference", at=state.table.ids[index], sample=sample)
            columns = columns_of(states.of(url), index)
            runs = columns[1:] if len(columns) > 2 else columns  # several runs: these differ, not only from the start
            if len({column.verdict_kind for column in runs}) > 1 < len({column.length for column in runs}):
                return url.query()
    return "sort=difference"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--problems", type=int, default=64, help="evaluated problems to keep of each run")
    parser.add_argument("--rollouts-every", type=int, default=4, help="keep the rollouts of one in so many steps")
    options = parser.parse_args()
    with TemporaryDirectory(dir=RECORDED.parent) as name:
        new = Path(name) / RECORDED.name
        for text in options.runs:
            title, _, path = text.partition("=")
            run, every = RunDirectory(path), options.rollouts_every
            copy_small(run, new / title, num_problems=options.problems, rollouts_every=every)
        (new / FIRST_VIEW).write_text(choose_view(new) + "\n", encoding="utf-8")
        size = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        if size > MAX_BYTES:
            parser.error(f"the copies have {size:,} bytes, more than {MAX_BYTES:,}: take fewer --problems or runs")
        shutil.rmtree(RECORDED)
        new.rename(RECORDED)
    screenshots.take_documented([RECORDED])


if __name__ == "__main__":
    main()
