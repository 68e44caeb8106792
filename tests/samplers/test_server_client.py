"""The client of a rollout server, against servers that do one thing wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers.chat_server import chat_server, self_signed
from vlm_rl.samplers.remote import client as remote_client
from vlm_rl.samplers.remote.client import ServerError, ask, connected

_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def _answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request, and close the connection under the next one, as vLLM may do after five idle seconds."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_REPLY)
    await writer.drain()
    await reader.read(1)
    writer.close()


def test_an_idle_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server draws it is asked every five seconds: just when vLLM closes the connection of the last time."""
    assert remote_client._IDLE < 5
    monkeypatch.setattr(remote_client, "_IDLE", 0.1)

    async def look_twice() -> list[dict[str, str]]:
        server = await asyncio.start_server(_answer_once, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, connected(f"http://{host}:{port}", "token") as client:
            first = await ask(client, "/weight_info", seconds=10, post=False)
            await asyncio.sleep(0.2)
            return [first, await ask(client, "/weight_info", seconds=10, post=False)]

    assert asyncio.run(look_twice()) == [{}, {}]


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
def test_a_certificate_is_checked_before_the_token_is_sent(tmp_path: Path, scheme: str) -> None:
    async def look(url: str) -> None:
        async with connected(url, "token") as client:
            await ask(client, "/good/v1", {}, seconds=10)

    context, _ = self_signed(tmp_path)
    with chat_server(context) as server:
        address = f"{scheme}://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(look(address))
        assert not server.asked
