"""The demo beside a notebook: served in a thread of this process, and shown in a frame.

server = serve_in_background([Path("runs/first")])
server.url, server.close()
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import uvicorn

from vlm_rl.demo.server import UVICORN_OPTIONS, make_server
from vlm_rl.demo.web.access import Access
from vlm_rl.errors import UserError

_START_SECONDS = 30.0


class DemoServer:
    """A demo that is being served. A notebook shows it as a frame.

    Attributes:
        url: its address, on this machine's loopback.
    """

    def __init__(self, server: uvicorn.Server, thread: threading.Thread, url: str, *, height: int) -> None:
        self.url = url
        self._server, self._thread, self._height = server, thread, height

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(_START_SECONDS)

    def __repr__(self) -> str:
        return f"<demo at {self.url}; close() ends it>"

    def _repr_html_(self) -> str:
        url = escape(self.url)
        frame = f'<iframe src="{url}" title="demo" width="100%" height="{self._height}" frameborder="0"></iframe>'
        return f'<p><a href="{url}" target="_blank">{url}</a></p>{frame}'


def serve_in_background(folders: Sequence[Path], *, port: int = 0, height: int = 900) -> DemoServer:
    """Serve the page on the loopback until `close` is called or this process ends.

    Pages of the loopback, such as a notebook's, may show it in a frame; no other page may.

    Args:
        folders: the runs, or folders of them.
        port: of 127.0.0.1; 0 takes a free one.
        height: of the frame in a notebook, in pixels.

    Raises UserError if there is nothing to show, if the port is taken, and if the server does not start.
    """
    app = make_server(folders, access=Access(allows_local_frames=True))
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        raise UserError(
            f"cannot listen on 127.0.0.1:{port}: {error.strerror}; leave port out for a free one"
        ) from None
    server = uvicorn.Server(uvicorn.Config(app, **UVICORN_OPTIONS))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + _START_SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    if not server.started:
        server.should_exit = True
        listening.close()
        raise UserError(f"the demo did not start within {_START_SECONDS:.0f} s; `vlm-rl demo` says more")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    return DemoServer(server, thread, url, height=height)
