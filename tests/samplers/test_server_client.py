"""The client of a rollout server, against servers that do one thing wrong."""

from __future__ import annotations

import asyncio

from vlm_rl.samplers.server_client import ask, connected

_REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def _answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a request, and close the connection under the next one, as vLLM may do after five idle seconds."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(_REPLY)
    await writer.drain()
    await reader.read(1)
    writer.close()


def test_an_idle_connection_is_not_used_again() -> None:
    """While a server draws it is asked every five seconds: just when vLLM closes the connection of the last time."""

    async def look_twice() -> list[dict[str, str]]:
        server = await asyncio.start_server(_answer_once, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, connected(f"http://{host}:{port}", "token") as client:
            first = await ask(client, "/weight_info", seconds=10, post=False)
            await asyncio.sleep(2.5)
            return [first, await ask(client, "/weight_info", seconds=10, post=False)]

    assert asyncio.run(look_twice()) == [{}, {}]
