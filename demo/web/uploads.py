"""Take pictures that visitors send: checked on arrival, held in memory for a while, never written to disk.

POST /live/picture takes the bytes of one file and answers {"token": ...} or {"error": ...};
GET /live/picture/TOKEN shows it as our own decoder sees it, scaled down, without the file's metadata.
"""

from __future__ import annotations

import io
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vlm_rl.data.images import ImageLimits, decode_image
from vlm_rl.errors import UserError

MAX_BYTES = 8 * 2**20
PICTURE_PATH = "/live/picture"
LIMITS = ImageLimits(max_bytes=MAX_BYTES)
_TOKEN = re.compile(r"[\w-]{8,40}")
_KEPT = 16
_KEPT_SECONDS = 1800.0
_PREVIEW_SIDE = 640  # pixels


class Uploads:
    """The last few uploads by their tokens, and the examples, which stay."""

    def __init__(self, examples: Sequence[bytes] = ()) -> None:
        self._examples = {f"example-{index:04d}": data for index, data in enumerate(examples)}
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._decoding = threading.Lock()  # one at a time: a picture may need 160 MB while it is opened

    def add(self, data: bytes) -> str:
        """Check an upload, keep it for a while and return its token. Raises UserError that says why it is refused."""
        with self._decoding:
            decode_image(data, where="your picture", limits=LIMITS)
        token = secrets.token_urlsafe(16)
        with self._lock:
            self._forget_old()
            while len(self._kept) >= _KEPT:
                self._kept.popitem(last=False)
            self._kept[token] = (time.monotonic(), data)
        return token

    def get(self, token: str) -> bytes:
        """Return the picture's file. Raises UserError if it is gone."""
        if token in self._examples:
            return self._examples[token]
        with self._lock:
            self._forget_old()
            if token not in self._kept:
                raise UserError(
                    "your picture is no longer held (pictures are kept for half an hour at most): choose it again"
                )
            return self._kept[token][1]

    def preview(self, token: str) -> bytes:
        """Return a small JPEG of its pixels. Raises UserError as `get` does."""
        with self._decoding:
            picture = decode_image(self.get(token), where="the picture", limits=ImageLimits(min_side=1))
        picture.thumbnail((_PREVIEW_SIDE, _PREVIEW_SIDE), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90, subsampling=0)
        return file.getvalue()

    def routes(self) -> list[Route]:
        """Return the routes, which the application must have before gradio's own, which take every path."""
        return [
            Route(PICTURE_PATH, self._take, methods=["POST"]),
            Route(PICTURE_PATH + "/{token}", self._show, methods=["GET"]),
        ]

    def _forget_old(self) -> None:
        limit = time.monotonic() - _KEPT_SECONDS
        for token in [token for token, (since, _) in self._kept.items() if since < limit]:
            del self._kept[token]

    async def _take(self, request: Request) -> Response:
        data = await request.body()  # the guard has bounded its size
        try:
            return JSONResponse({"token": await run_in_threadpool(self.add, data)})
        except UserError as error:
            return JSONResponse({"error": str(error)}, 200)  # an answer, not a fault: the page shows it

    async def _show(self, request: Request) -> Response:
        token = request.path_params["token"]
        try:
            if not _TOKEN.fullmatch(token):
                raise UserError("no such picture")
            return Response(await run_in_threadpool(self.preview, token), media_type="image/jpeg")
        except UserError as error:
            return Response(str(error), 404, media_type="text/plain")
