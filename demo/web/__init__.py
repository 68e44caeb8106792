"""What makes the page safe and its text readable: templates, Markdown, formulas, and who may ask.

    rendering       every piece of HTML, from templates that escape
    theme           style sheets and scripts
    access          by Host, Origin and token
    request_guard   what a request may hold, before Gradio reads it
    uploads         visitors' pictures, in memory
    view_changes    what a visitor changed since the view that was drawn last

Private to this room: markdown and formulas.
"""

__all__ = ["access", "rendering", "request_guard", "theme", "uploads", "view_changes"]
