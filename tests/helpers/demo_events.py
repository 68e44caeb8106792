"""Events of the demo's page as its script posts them."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx

JOIN = "/gradio_api/queue/join"


def run_event(client: httpx.Client, body: dict[str, Any], *, session: str = "") -> dict[str, Any]:
    """Post an event, wait for its end and return its last message: `success`, and `output` with the new values.

    `session` names the page that posts it, a new one if empty.
    """
    session = session or uuid.uuid4().hex
    client.post(JOIN, json=body | {"session_hash": session}).raise_for_status()
    with client.stream("GET", f"/gradio_api/queue/data?session_hash={session}") as stream:
        messages = [json.loads(line.removeprefix("data:")) for line in stream.iter_lines() if line]
    return next(message for message in messages if message["msg"] == "process_completed")


def first_bodies(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a body for every event that the server answers, with the values that the page has at first."""
    props = {component["id"]: component["props"] for component in config["components"]}
    first = {"dropdown": None, "number": 0, "textbox": "", "html": "", "api": ""}
    kinds = {component["id"]: component["type"] for component in config["components"]}

    def value(component: int) -> Any:
        return [] if props[component].get("multiselect") else first[kinds[component]]

    def data_of(event: dict[str, Any]) -> dict[str, Any]:
        is_of_view = any(name == "go" for _, name in event["targets"])
        changes = [{"patch": "tab=table", "key": "tab"}]
        return {"event_data": {"query": "tab=table", "changes": changes, "number": 1}} if is_of_view else {}

    return [
        {"fn_index": event["id"], "data": [value(component) for component in event["inputs"]]} | data_of(event)
        for event in config["dependencies"]
        if event["backend_fn"]
    ]


def event_of(client: httpx.Client, trigger: str) -> int:
    """Return the number of the page's first event with this trigger."""
    dependencies = client.get("/config").json()["dependencies"]
    return next(event["id"] for event in dependencies if any(name == trigger for _, name in event["targets"]))


def arrival(client: httpx.Client, query: str) -> dict[str, Any]:
    """Return the body of the event that draws an address of the page."""
    return {"fn_index": event_of(client, "load"), "data": [query]}


def show(client: httpx.Client, query: str) -> dict[str, Any]:
    """Open an address of the page, and return the last message of the event that draws it."""
    return run_event(client, arrival(client, query))
