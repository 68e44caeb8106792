"""OlympiadBench (Hothan/OlympiadBench), open English mathematics, by subfield and kind of answer.

The gold is a list of one text, which may hold several answers; a row may state a unit and a tolerance.
"""

from vlm_rl.evaluation.benchmarks.benchmark import BenchmarkFiles
from vlm_rl.evaluation.benchmarks.protocols import TEXT
from vlm_rl.evaluation.benchmarks.text_sets import text_benchmark

BENCHMARK = text_benchmark(
    "olympiadbench",
    data_license="Apache-2.0",
    category="subfield",
    files=BenchmarkFiles(
        hub="Hothan/OlympiadBench",
        hub_files=("OlympiadBench_Dataset/data/OE_TO_maths_en_COMP*", "**/OE_TO_maths_en_COMP*"),
        tables=(
            "olympiadbench*.jsonl",
            "**/OE_TO_maths_en_COMP*.parquet",  # the whole repository holds the problems with pictures, OE_MM, too
            "**/*OE_*_maths_en_COMP*.parquet",
            "**/t*-*.parquet",
        ),
        num_rows=(675, 674, 150),
    ),
    protocol=TEXT,
)
