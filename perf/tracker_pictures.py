"""Take the pictures of docs/trackers.md: a run in the dashboards of the trackers that are installed here.

    python -m perf.tracker_pictures runs/quickstart            # all that are installed, into docs
    python -m perf.tracker_pictures runs/quickstart swanlab    # this one

The run is copied, and sent by `vlm-rl track` from the working directory, where its prepared sets are. wandb is not
here: its dashboard is a server of its own, which its package does not have.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perf.screenshots import DOCS, write_reduced
from tests.helpers.browser import open_browser, open_page
from tests.helpers.served import free_port

_PROJECT = "squares"


@dataclass(frozen=True)
class Dashboard:
    """A tracker's own page about the run; words in braces are filled in."""

    needs: str  # the library
    command: Sequence[str]  # of Python, which serves it
    address: str
    arrange: Callable[[Any], None]  # brings to view what the picture is about
    window: tuple[int, int] = (1440, 1000)


def _tensorboard(page: Any) -> None:
    page.get_by_text("histograms/reward").first.wait_for()
    page.get_by_role("button", name="Settings").last.click()


def _trackio(page: Any) -> None:
    page.get_by_text("Media & Tables", exact=True).click()
    page.locator("td img").first.wait_for()


def _mlflow(page: Any) -> None:
    wanted = "completions/m[a-z]*_length|heldout/(accuracy|box_share|mean_length$)"
    page.get_by_placeholder("Search metric charts").fill(wanted)
    page.get_by_label("Close", exact=False).last.click()


def _swanlab(page: Any) -> None:
    page.get_by_placeholder("Search Chart...").fill("reward")


_TAGS = "^reward$|^entropy$|^completions/mean_length$|histograms|heldout/accuracy"
DASHBOARDS = {
    "tensorboard": Dashboard(
        "tensorboard",
        ("-m", "tensorboard.main", "--logdir", "{run}", "--port", "{port}"),
        f"/?tagFilter={_TAGS}#timeseries",
        _tensorboard,
    ),
    "trackio": Dashboard(
        "trackio",
        ("-c", f"import trackio; trackio.show(project='{_PROJECT}', open_browser=False, server_port={{port}})"),
        f"/?project={_PROJECT}",
        _trackio,
        window=(1800, 960),
    ),
    "mlflow": Dashboard(
        "mlflow",
        ("-m", "mlflow", "ui", "--backend-store-uri", "sqlite:///{home}/mlflow.db", "--port", "{port}"),
        "/#/experiments/1/runs/{id}/model-metrics",
        _mlflow,
    ),
    "swanlab": Dashboard(
        "swanboard",
        ("-m", "swanlab", "watch", "{run}/swanlog", "--port", "{port}"),
        "/experiment/1/chart",
        _swanlab,
        window=(1440, 900),
    ),
}


def take(name: str, run: Path, out: Path) -> None:
    """Send the run to a tracker and write the picture of its dashboard."""
    dashboard = DASHBOARDS[name]
    with TemporaryDirectory() as folder:
        home, port = Path(folder), free_port()
        copy = shutil.copytree(run, home / run.name, ignore=shutil.ignore_patterns("checkpoints", "trackers"))
        environment = os.environ | {
            "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db",
            "SWANLAB_MODE": "local",
            "TRACKIO_DIR": str(home / "trackio"),
        }
        track = ["vlm_rl", "track", str(copy), f"log.trackers=[{name}]", f"log.project={_PROJECT}"]
        subprocess.run([sys.executable, "-m", *track], env=environment, check=True)
        identity = json.loads((copy / "trackers" / f"{name}.json").read_text(encoding="utf-8"))["id"]
        words = [word.format(run=copy, home=home, port=port) for word in dashboard.command]
        address = f"http://127.0.0.1:{port}{dashboard.address.format(id=identity)}"
        with _serving(words, port, environment), open_browser() as browser:
            width, height = dashboard.window
            with open_page(address, browser=browser, width=width, height=height) as visit:
                dashboard.arrange(visit.page)
                visit.page.wait_for_timeout(4000)  # what moves when it is first drawn
                write_reduced(out / f"trackers_{name}.png", visit.page.screenshot())


@contextmanager
def _serving(words: Sequence[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """Run a module that serves on a port until the context is left."""
    process = subprocess.Popen([sys.executable, *words], env=environment, start_new_session=True)
    try:
        while not _answers(port):
            assert process.poll() is None, f"{words} has ended"
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # MLflow has workers
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(DASHBOARDS)}; those that are installed by default")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    installed = [name for name, dashboard in DASHBOARDS.items() if find_spec(dashboard.needs)]
    for name in options.names or installed:
        if name not in installed:
            parser.error(f"{name} is not installed, or there is no picture of it; here are {', '.join(installed)}")
        take(name, options.run, options.out)


if __name__ == "__main__":
    main()
