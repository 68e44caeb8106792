"""AIME 2024 (HuggingFaceH4/aime_2024): thirty competition problems, each with a whole number as its answer."""

from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "aime24",
    hub="HuggingFaceH4/aime_2024",
    tables=("**/train-*.parquet", "aime24*.jsonl", "aime_2024*.parquet", "*.jsonl"),
    num_rows=(30,),
)
