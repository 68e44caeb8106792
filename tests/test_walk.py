"""One walk through the whole product, by its commands: prepare, train two rules, evaluate, compare, look."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.browser import open_page
from tests.helpers.sample_rows import write_samples
from tests.helpers.served import free_port
from tests.helpers.toy_runs import Toys, clean_environment
from vlm_rl.run.directory import RunDirectory

RULES = ("luspo", "ba")
NUM_ROWS = 12


@pytest.mark.slow
def test_prepare_train_evaluate_compare_and_see(toys: Toys, tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="the demo extra is not installed")
    benchmark = tmp_path / "mathvision"
    pixels = ["--max-pixels", "50176", "--limit", str(NUM_ROWS), "--workers", "1"]
    source = write_samples(tmp_path / "samples") / "mathvision"
    ran(toys, "prepare", "mathvision", "--source", str(source), "--out", str(benchmark), *pixels)

    results = []
    for rule in RULES:
        run = toys.train_run(f"walk/{rule}", algorithm={"name": rule}, train={"steps": 2}, checkpoint={"every": 2})
        assert [step for step, _ in run.checkpoints()] == [2] and len(run.metrics()) == 2
        results.append(tmp_path / f"{rule}-eval")
        model = ["--model", str(run.checkpoints()[-1][1]), "--data", str(benchmark), "--out", str(results[-1])]
        ran(toys, "eval", *model, "--sampler", "transformers", "--max-tokens", "24", "--temperature", "1.0")
    records = [RunDirectory(path).open().evals("mathvision")[0].rows().to_pylist() for path in results]
    assert [len(rows) for rows in records] == [NUM_ROWS, NUM_ROWS]

    compared = tmp_path / "compared.json"
    said = ran(toys, "eval", "compare", *map(str, results), "--json", str(compared))
    [pair] = json.loads(compared.read_text())["compared"]
    lengths = [[row["length"] for row in rows] for rows in records]
    assert pair["set"] == "mathvision" and all(str(path) in said for path in results)

    page = seen(results, tmp_path / "demo.log")
    for rule, counted in zip(RULES, lengths, strict=True):
        assert f"{rule}-eval · step 2" in page
        assert re.search(rf"\b{round(np.median(counted))}\b tokens", page), (rule, counted, page[:2000])
        assert re.search(rf"\b{counted[0]}\b", page), "the first problem's own count"


def ran(toys: Toys, *arguments: str) -> str:
    """Run a command, which must succeed, and return what it printed."""
    result = toys.runner(*arguments)
    assert result.code == 0, result.output[-3000:]
    return result.output


def seen(results: list[Path], log: Path) -> str:
    """Return the text of the demo's first page about these results; the live panel must offer both."""
    port = free_port()
    command = [sys.executable, "-m", "vlm_rl", "demo", *map(str, results), "--port", str(port)]
    with log.open("w") as file:
        demo = subprocess.Popen(command, stdout=file, stderr=file, env=clean_environment())
    try:
        wait_for_port(port, demo, log)
        with open_page(f"http://127.0.0.1:{port}/") as visit:
            visit.page.wait_for_selector("#summary .sum >> nth=1")
            visit.page.wait_for_selector("#problem article >> nth=1")
            text = visit.page.inner_text("body")
            visit.page.get_by_role("tab", name="Live").click()
            visit.page.get_by_label("Models to ask").click()
            offered = visit.page.get_by_role("option").all_inner_texts()
            assert {"luspo-eval · step 2", "ba-eval · step 2"} <= {option.strip("✓ \n") for option in offered}, (
                offered
            )
            assert all(request.startswith(f"http://127.0.0.1:{port}/") for request in visit.requests)
            assert visit.failures == []
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(60)
    return text


def wait_for_port(port: int, demo: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert demo.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.2)
