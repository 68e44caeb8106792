"""What users and strangers wrote, read within limits and with one kind of error.

    plain_files    paths and small files: where home is, and no pipes or devices
    yaml_text      YAML: no aliases without an end, whatever its values raise
    json_object    a JSON object, and nothing else
    visible_text   characters that hide, reorder or control others are made visible

What takes long or much memory is read in a process of its own (sandbox.limited).
"""

__all__ = ["json_object", "plain_files", "visible_text", "yaml_text"]
_USES = []
