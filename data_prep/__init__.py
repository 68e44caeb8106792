"""Prepared sets, made from public data sets, benchmarks and users' own tables: `vlm-rl prepare`.

    command           the command
    quickstart_data   the quickstart's data
    tools_data        the data of quickstart --tools
    word_sets         the data of the quickstart in plain language
    picture_sets      pictures for a small model that learns to see
    readers           the data sets' own files, row by row (a folder with a door of its own)

Private to this room: preparation (from files to a prepared set), options (what decides which rows it holds), records
(rows on their way), filters (checks of a row by itself), gold_boxes and prepared_images (a row's box and its images),
typeset (text drawn as an image), shards and merge_shards (parts of a set, and the whole), duplicates, leakage,
partial_set (what is finished of a set), prepared_set (a set on disk), input_checksums, card and report (what it was
made of, its card and its page), mix_sets (one training set of several), and the makers smoke_data and study_data.

The folder is at the top of the repository; vlm_rl/data_prep is a link to it.
"""

__all__ = ["command", "picture_sets", "quickstart_data", "tools_data", "word_sets"]
_USES = ["data", "evaluation", "grading", "learner", "report", "run", "sandbox", "toy"]
