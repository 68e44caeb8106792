"""Model configurations without a text: transformers writes one for a log line of every load, shown or not.

It compares the configuration with a default one of its class, which takes longer than to read the file.
"""

from __future__ import annotations

from transformers.configuration_utils import PreTrainedConfig


def use_quick_configs() -> None:
    """Let a configuration's repr() be the one of any object, in this process and its later children."""
    PreTrainedConfig.__repr__ = object.__repr__  # type: ignore[method-assign]
