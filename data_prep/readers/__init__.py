"""Readers: rows of a data set's own files, one after the other, in one form.

    sources       every data set that `vlm-rl prepare` knows, with its reader
    own_data      a user's folder: its tables, and the mapping that was guessed
    generic       any table, by a mapping of its columns
    hub           where a data set's files are
    image_files   the places a row's image can be
    row_limit     the most bytes that a row may unpack to

Private to this room: the public sets (training_sources, dapo, benchmarks), the forms of a table (table_files,
text_tables, spreadsheets, arrow_streams), what its cells hold (cells, written_values, option_cells, numbered_images,
row_golds, program_tests, written_asserts), and the guess (find_data, sample, guess, guess_options).
"""

__all__ = ["generic", "hub", "image_files", "own_data", "row_limit", "sources"]
