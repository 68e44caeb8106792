"""A page of ours as its parser sees it, for tests of what it consists of."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Tags, ids, addresses, the charts' specifications by label, and the text outside scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.charts: dict[str, dict[str, Any]] = {}
        self.text = ""
        self._label = ""  # of the chart that is open
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = {name: value or "" for name, value in attrs}
        if values.get("class") == "chart":
            self._label = values["aria-label"]
        if "id" in values:
            self.ids.append(values["id"])
        names = ("src", "href", "action", "srcset", "data", "poster")
        self.addresses += [value for name, value in values.items() if name in names]

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.cdata_elem:
            if data.startswith("{"):
                self.charts[self._label] = json.loads(data)
        elif not self.cdata_elem:
            self.text += data
