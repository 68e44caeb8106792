"""What the page's script sends when the view changes: the query that was drawn last, and every change since.

The server answers after the next change may have been made. A request therefore carries all changes without an
answer, oldest first, and no change is lost; its number comes back, so that the script knows an answer that was
overtaken by a newer one.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, Field

from vlm_rl.demo.numbers.url_state import UrlState

_WHOLE_PAGE = ("benchmark", "base", "others")  # controls that bring other problems, so that all controls may change


class ViewChange(BaseModel):
    """One change: a patch of the query, or a whole address with its question mark, to which Back led."""

    patch: str = ""
    key: str = ""  # the control that it was made with; empty for a mark, a chart, or the way back

    def apply(self, url: UrlState) -> UrlState:
        """Return the view after the change; a new benchmark or baseline brings its own problems."""
        if self.patch.startswith("?"):
            return UrlState.parse(self.patch)
        changed = url.patched(self.patch)
        if self.key == "benchmark":
            return UrlState(benchmark=changed.benchmark, tab=url.tab)
        if self.key == "base":  # a new baseline that was shown beside the old one changes places with it
            others = tuple(url.base if other == changed.base else other for other in url.others)
            return replace(changed, others=tuple(other for other in others if other and other != changed.base))
        return changed


class ViewChanges(BaseModel):
    """The body of the event `go`."""

    query: str = ""  # of the view that was drawn last
    changes: list[ViewChange] = []
    number: int = Field(0, ge=0, le=10**9)

    def url(self) -> UrlState:
        """Return the view after all changes."""
        url = UrlState.parse(self.query)
        for change in self.changes:
            url = change.apply(url)
        return url

    @property
    def controls_hold(self) -> bool:
        """Say whether the page's tab and controls are as the view says, since they alone were changed."""
        keys = [change.key for change in self.changes]
        return bool(keys) and not {"", *_WHOLE_PAGE} & set(keys)
