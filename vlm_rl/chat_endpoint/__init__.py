"""Ask a server with the OpenAI protocol; a judge and the demo do.

    client   one server, with limits on whatever it sends, and the only reader of API keys
    batch    many requests at the same time: tried again, kept on the disk and counted
    stream   one reply while it grows, until it ends or is cancelled

Private to this room: cache (replies on disk).
"""

__all__ = ["batch", "client", "stream"]
_USES = []
