"""What the demo writes: a comparison as files.

    bundle      static files, for any web server: `vlm-rl demo --bundle`
    export      what the page shows, as a table and as one page
    small_copy  a run small enough to ship: `python -m vlm_rl.demo.files.small_copy`

Private to this room: small_tokenizer, a tokenizer cut to what the texts of a small copy use.
"""

__all__ = ["bundle", "export", "small_copy"]
