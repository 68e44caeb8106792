"""From a prepared set to a configuration: `vlm-rl init` and `vlm-rl config`.

    command      write a recipe for a model, a set and a machine
    reference    describe every key, in the terminal and in docs/config.md

Nothing is private to this room.
"""

__all__ = ["command", "reference"]
