"""Layers that compute what transformers' do, with less work.

    shared_prefix  attention over a packed row: a prompt once, and all responses to it
    linear         layers that carry a state, over a packed row
    patches        the switch for layers of transformers that ours may replace

Private to this room: lean_layers, liger_layers and vision, the layers that `patches` puts in. A change to
transformers is outside `patches` and always on: shared_prefix registers itself as an attention implementation,
and linear stands before two functions of transformers' layers.
"""

__all__ = ["linear", "patches", "shared_prefix"]
