"""Attacks on the demo as a server: real processes, real connections."""

from __future__ import annotations

import atexit
import json
import os
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path

import httpx

from tests.attack.attack import Attack
from tests.helpers.chat_server import chat_server
from tests.helpers.demo_events import JOIN, run_event, show
from tests.helpers.demo_process import DemoProcess, demo_process
from tests.helpers.example_run import build_run
from vlm_rl.demo.numbers.url_state import TABS

WEB = "The demo as a server"


@cache
def shared() -> tuple[DemoProcess, httpx.Client]:
    """Return a demo that the quick attacks share, and a client that knows its token; both end with this process."""
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    atexit.register(shutil.rmtree, folder)
    demo = DemoProcess(folder, "--host", "0.0.0.0", "--open-wider")
    atexit.register(demo.stop)  # runs first
    client = client_of(demo)
    client.post("/login", data={"token": demo.log.partition("token: ")[2].strip()})
    return demo, client


def client_of(demo: DemoProcess) -> httpx.Client:
    return httpx.Client(base_url=demo.url, timeout=20, trust_env=False)


def counted(values: list[object]) -> str:
    """Return "3 x 422, 1 x 200"."""
    return ", ".join(f"{count} x {value}" for value, count in sorted(Counter(map(str, values)).items()))


def name_files_in_bodies(folder: Path) -> str:
    (folder / "private").write_text("a secret")
    places = ("/dev/zero", "/etc/passwd", str(folder / "private"), "http://127.0.0.1:9/x")
    client = shared()[1]
    statuses: list[object] = []
    for event, place in zip(client.get("/config").json()["dependencies"], cycle(places), strict=False):
        file = {"path": place, "meta": {"_type": "gradio.FileData"}}
        body = {"data": [file for _ in event["inputs"]], "fn_index": event["id"], "session_hash": "s"}
        statuses.append(client.post(JOIN, json=body).status_code)
    alive = show(client, "")["success"]
    return f"refused: {set(statuses) == {422}}, the page still answers: {alive}"


def ask_other_routes(folder: Path) -> str:
    del folder
    file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    paths = [
        "/gradio_api/run/arrive", "/gradio_api/api/arrive", "/gradio_api/call/arrive", "/gradio_api/call/v2/arrive",
        "/run/arrive", "/api/arrive", "/call/arrive", "/gradio_api/queue/data", "/gradio_api/component_server",
        "/gradio_api/upload", "/upload", "/gradio_api/process_recording", "/gradio_api/stream/x",
        "/gradio_api/vibe-edit", "/gradio_api/vibe-code", "/gradio_api/run-history/connect",
    ]  # fmt: skip
    body = {"data": [file], "session_hash": "s", "component_id": 1, "fn_name": "x", "event_id": "x"}
    return counted([shared()[1].post(path, json=body).status_code for path in paths])


def come_from_elsewhere(folder: Path) -> str:
    del folder
    demo, client = shared()
    hosts = ("evil.example", f"127.0.0.1:{demo.port}.evil.example", "127.0.0.1.evil.example", "[")
    origins = ("http://evil.example", "null", f"http://127.0.0.1:{demo.port + 1}", "http://[", "file://")
    said = [client.get("/", headers={"Host": host}).status_code for host in hosts]
    said += [client.post(JOIN, json={}, headers={"Origin": origin}).status_code for origin in origins]
    return counted([*said])


def be_a_stranger(folder: Path) -> str:
    del folder
    demo, known = shared()
    with client_of(demo) as client:
        refused = [client.get(path).status_code for path in ("/", "/config", "/gradio_api/heartbeat/s")]
        refused.append(client.post(JOIN, json={}).status_code)
        wrong = [client.post("/login", data={"token": f"guess {index}"}).status_code for index in range(50)]
    return f"{counted([*refused])}; guesses: {counted([*wrong])}; with the token: {known.get('/config').status_code}"


def write_nonsense(folder: Path) -> str:
    del folder
    demo, client = shared()
    before = len(demo.log)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    head = f"HTTP/1.1\r\nHost: 127.0.0.1:{demo.port}\r\nCookie: {cookie}\r\n".encode()
    nonsense = [
        b"\x00" * 1000,
        b"GET /" + b"a" * 100_000,
        b"GET /?" + b"&".join(b"key%d=1" % index for index in range(200)) + b" " + head + b"\r\n",
        b"POST /gradio_api/queue/join " + head + b"Content-Length: 60000\r\n\r\n" + b"[" * 60_000,
        b"POST /gradio_api/queue/join " + head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /live/picture " + head + b"Content-Length: 8000000\r\n\r\n" + bytes(100_000),
        b"GET /gradio_api/queue/data?session_hash=nobody " + head + b"\r\n",
    ]
    for sent in nonsense * 20:
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", demo.port)) as opened:
            opened.sendall(sent)
    alive = show(client, "&".join(f"key{index}=1" for index in range(200)))["success"]
    return f"the page still answers: {alive}, {len(demo.log) - before} more characters in the log"


def open_ten_thousand_connections(folder: Path) -> str:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with demo_process(folder) as demo, client_of(demo) as client:
        descriptors = Path(f"/proc/{demo.process.pid}/fd")
        held: deque[socket.socket] = deque()
        most = 0
        for _ in range(10_000):
            held.append(socket.create_connection(("127.0.0.1", demo.port)))
            if len(held) > min(soft - 200, 800):
                held.popleft().close()
            most = max(most, len(list(descriptors.iterdir()))) if len(held) % 100 == 0 else most
        during = client.get("/theme.css").status_code
        for opened in held:
            opened.close()
        lines = demo.log.count("\n")
    return f"answered in the flood: {during}, below 700 descriptors: {most < 700}, {lines} line in the log"


def send_slowly(folder: Path) -> str:
    head = b"HTTP/1.1\r\nHost: localhost\r\n"
    begun = [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"POST /gradio_api/queue/join " + head + b"Content-Length: 1000\r\n\r\n",
        b"POST /live/picture " + head + b"Content-Length: 8000000\r\n\r\n",
    ]
    with demo_process(folder) as demo, client_of(demo) as client:
        opened = [socket.create_connection(("127.0.0.1", demo.port)) for _ in range(40) for _ in begun]
        for index, connection in enumerate(opened):
            connection.sendall(begun[index % len(begun)])
        closed: set[int] = set()
        deadline = time.monotonic() + 120
        while len(closed) < len(opened) and time.monotonic() < deadline:
            for index in set(range(len(opened))) - closed:
                try:
                    opened[index].sendall(b"x")  # one byte at a time, before each limit
                except OSError:
                    closed.add(index)
            time.sleep(0.5)
        alive = client.get("/").status_code
        return f"{len(closed)} of {len(opened)} closed, answered: {alive}, {demo.log.count(chr(10))} line in the log"


def write_while_it_is_shown(folder: Path) -> str:
    run = build_run(folder / "run", steps=4, num_problems=4)
    source = build_run(folder / "source", steps=40, num_problems=4)
    over = threading.Event()

    def write() -> None:
        metrics = (source.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        for line in metrics[4:] * 50:
            step = json.loads(line)["step"]
            with (run.path / "metrics.jsonl").open("a") as log:
                for part in (line[:20], line[20:-9], line[-9:]):
                    log.write(part)
                    log.flush()
            for path in source.path.glob(f"*/**/step-{step:06d}.*"):
                place = run.path / path.relative_to(source.path)
                shutil.copy(path, place.with_name(f".{place.name}"))
                place.with_name(f".{place.name}").replace(place)
            if over.wait(0.002):
                return

    writer = threading.Thread(target=write)
    with demo_process(folder, run=run.path) as demo, client_of(demo) as client:
        writer.start()
        shown = [show(client, f"tab={tab}")["success"] for _ in range(5) for tab in TABS]
        over.set()
        writer.join()
        return f"shown {sum(shown)} of {len(shown)} times, {demo.log.count(chr(10))} line in the log"


def reply_what_no_page_can_hold(folder: Path) -> str:
    """Let a model server reply half of a surrogate pair to one page, and a good one to the next."""
    with chat_server() as models:
        options = [word for name in ("half", "good") for word in ("--endpoint", f"{name}={models.url(name)},m")]
        with demo_process(folder, *options) as demo, client_of(demo) as client:
            events = client.get("/config").json()["dependencies"]
            (asking,) = (event["id"] for event in events if len(event["inputs"]) == 7)
            ends = []
            for name in ("half", "good"):
                body = {"fn_index": asking, "data": ["", "", "How many?", [name], 0, 0, 64]}
                try:
                    ends.append(run_event(client, body)["success"])
                except (httpx.HTTPError, StopIteration) as error:
                    ends.append(type(error).__name__)
            return f"answered: {ends}, {demo.log.count(chr(10))} line in the log"


def break_runs_beside_a_good_one(folder: Path) -> str:
    """Open a folder of runs of which all but the last are broken, each in a file of its own."""
    damages = {
        "a": ("eval/toy-test/step-000000.parquet", b"PAR1"),
        "b": ("eval/toy-test/step-000002.json", b"[" * 100_000),
        "c": ("config.yaml", b"seed: " + b"9" * 10_000),
        "d": ("rollouts/step-000002.parquet", b""),
        "e": ("metrics.jsonl", b'{"step": 1e400}\n\xff\0\n'),
    }
    for name in (*damages, "good"):
        build_run(folder / "runs" / name, steps=2, num_problems=2)
    for name, (file, data) in damages.items():
        (folder / "runs" / name / file).write_bytes(data)
    odd = build_run(folder / "runs" / "f", steps=2, num_problems=2)
    (odd.path / "eval" / "toy-test").rename(odd.path / "eval" / os.fsdecode(b"\xff"))
    with demo_process(folder, run=folder / "runs") as demo, client_of(demo) as client:
        page = client.get("/config").text
        answers = [show(client, f"tab={tab}") for tab in TABS]
        page += json.dumps(answers)
        named = [name for name in "abcdf" if f"{name} was left out" in page or f"runs/{name}/" in page]
        own = show(client, "base=good@0&others=good@2")
        return (
            f"shown {sum(answer['success'] for answer in answers)} of {len(TABS)} times, named: {''.join(named)}, "
            f"the good one: {own['success'] and 'good · step 2' in json.dumps(own, ensure_ascii=False)}, "
            f"{demo.log.count(chr(10))} line in the log"
        )


ATTACKS = (
    Attack(
        "a reply of a model server that no page can hold",
        WEB,
        "answered: [True, True], 1 line in the log",
        reply_what_no_page_can_hold,
        slow=True,
    ),
    Attack(
        "broken runs beside a good one",
        WEB,
        "shown 8 of 8 times, named: abcdf, the good one: True, 1 line in the log",
        break_runs_beside_a_good_one,
        slow=True,
    ),
    Attack(
        "file data in an event",
        WEB,
        "refused: True, the page still answers: True",
        name_files_in_bodies,
        slow=True,
    ),
    Attack("gradio's other routes", WEB, "16 x 404", ask_other_routes, slow=True),
    Attack("foreign hosts and origins", WEB, "9 x 403", come_from_elsewhere, slow=True),
    Attack(
        "a demo for others without its token",
        WEB,
        "4 x 401; guesses: 10 x 401, 40 x 429; with the token: 200",
        be_a_stranger,
        slow=True,
    ),
    Attack(
        "nonsense to the demo",
        WEB,
        "the page still answers: True, 0 more characters in the log",
        write_nonsense,
        slow=True,
    ),
    Attack(
        "a run written while the demo shows it",
        WEB,
        "shown 40 of 40 times, 1 line in the log",
        write_while_it_is_shown,
        slow=True,
    ),
    Attack(
        "10,000 connections",
        WEB,
        "answered in the flood: 200, below 700 descriptors: True, 1 line in the log",
        open_ten_thousand_connections,
        slow=True,
    ),
    Attack("slow requests", WEB, "160 of 160 closed, answered: 200, 1 line in the log", send_slowly, slow=True),
)
