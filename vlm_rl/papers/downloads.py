"""The models and data sets that the papers' tables need: hub id, size, licence, revision and folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS

NOT_AT_HAND = "see its page"
NEWEST = "newest"

# The newest commits that public code and the hub's pages name; none has been downloaded by us. A repository that is
# not here is downloaded as it is.
COMMITS = {
    "Qwen/Qwen2.5-VL-7B-Instruct": "cc594898137f460bfe9f0759e9844b3ce807cfb5",
    "Qwen/Qwen2.5-7B": "d149729398750b98c0af14eb82c78cfe92750796",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "0d7cf23991f47feeb3a57ecb4c9cee8ea4a17bfe",
    "Qwen/Qwen2.5-Math-7B": "b101308fe89651ea5ce025f25317fea6fc07e96e",
    "Qwen/Qwen3-1.7B": "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e",
    "Qwen/Qwen3-4B-Base": "906bfd4b4dc7f14ee4320094d8b41684abff8539",
    "Qwen/Qwen3-8B-Base": "49e3418fbbbca6ecbdf9608b4d22e5a407081db4",
    "meta-llama/Llama-3.2-3B-Instruct": "0cb88a4f764b7a12671c53f0838cd831a0843b95",
    "TIGER-Lab/ViRL39K": "812ec617dea4bc8a4e751663b88e4ebb7de4d00e",
    "BytedTsinghua-SIA/DAPO-Math-17k": "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
    "POLARIS-Project/Polaris-Dataset-53K": "296f8e34132e63f4a1d70e0dcc8bddebb43f03e4",
    "AI4Math/MathVista": "2b6ad69445fbb5695c9b165475e8decdbeb97747",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    "HuggingFaceH4/aime_2024": "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    "math-ai/aime25": "563bb8404243c5f09de6ec262f2db674fe5bce9b",
    "math-ai/amc23": "80815d37005feb82cd7f8fbc6901d5d3eff43057",
    "math-ai/minervamath": "ee46ddc498933b1977577953250ca5c66be64f96",
    "Hothan/OlympiadBench": "91184b52131e7fc9455fef848035173aea8cc01a",
    "livecodebench/code_generation_lite": "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
}
# Of data sets, as the hub's pages show them.
SIZES = {
    "BytedTsinghua-SIA/DAPO-Math-17k": "0.3 GB",
    "POLARIS-Project/Polaris-Dataset-53K": "28 MB",
    "AI4Math/MathVista": "1.8 GB",
    "MathLLMs/MathVision": "0.1 GB",
    "AI4Math/MathVerse": "0.3 GB",
    "DynaMath/DynaMath_Sample": "0.3 GB",
    "We-Math/We-Math": "64 MB",
    "HuggingFaceH4/MATH-500": "below 1 MB",
    "HuggingFaceH4/aime_2024": "below 1 MB",
    "math-ai/aime25": "below 1 MB",
    "math-ai/amc23": "below 1 MB",
    "math-ai/minervamath": "below 1 MB",
    "livecodebench/code_generation_lite": "4.5 GB",
}


@dataclass(frozen=True, slots=True)
class Download:
    """A repository of the hub."""

    hub: str
    folder: str  # where the commands look for it
    license: str
    size: str
    is_data: bool = False

    @property
    def revision(self) -> str:
        """Return the commit to download."""
        return COMMITS.get(self.hub, NEWEST)

    @property
    def command(self) -> str:
        """Return the command that downloads it."""
        kind = " --repo-type dataset" if self.is_data else ""
        pinned = "" if self.revision == NEWEST else f" --revision {self.revision}"
        return f"hf download {self.hub}{kind}{pinned} --local-dir {self.folder}"

    def is_there(self) -> bool:
        """Tell whether its folder holds something: `hf download` begins with hidden files."""
        folder = Path(self.folder)
        return folder.is_dir() and any(item.name[0] != "." for item in folder.iterdir())


def _model(hub: str, parameters: int, license_name: str) -> Download:
    """Return a model's download; `parameters` in millions, of two bytes each."""
    return Download(hub, f"models/{hub.rpartition('/')[2]}", license_name, f"{parameters * 2e-3:.1f} GB")


MODELS: dict[str, Download] = {
    download.hub.rpartition("/")[2]: download
    for download in (
        _model("Qwen/Qwen2.5-VL-7B-Instruct", 8292, "Apache-2.0"),
        _model("Qwen/Qwen2.5-7B", 7616, "Apache-2.0"),
        _model("Qwen/Qwen3-30B-A3B-Instruct-2507", 30532, "Apache-2.0"),
        _model("Qwen/Qwen2.5-Math-7B", 7616, "Apache-2.0"),
        _model("Qwen/Qwen3-1.7B", 2032, "Apache-2.0"),  # its files hold the shared embeddings twice
        _model("Qwen/Qwen3-4B-Base", 4022, "Apache-2.0"),
        _model("Qwen/Qwen3-8B-Base", 8191, "Apache-2.0"),
        _model("meta-llama/Llama-3.2-3B-Instruct", 3213, "Llama 3.2 Community License, gated"),
    )
}


def _data(hub: str, folder: str, license_name: str) -> Download:
    return Download(hub, folder, license_name or NOT_AT_HAND, SIZES.get(hub, NOT_AT_HAND), is_data=True)


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """What a prepared set is made of."""

    source: str  # as `vlm-rl prepare` knows it
    download: Download
    words: Sequence[str] = ()  # more for `vlm-rl prepare`


_DAPO = _data("BytedTsinghua-SIA/DAPO-Math-17k", "raw/DAPO-Math-17k", "Apache-2.0")
TRAINING_SETS: dict[str, TrainingSet] = {  # by the folder of the prepared set
    "virl39k": TrainingSet("virl39k", _data("TIGER-Lab/ViRL39K", "raw/ViRL39K", "MIT")),
    "dapo_math": TrainingSet("dapo", _DAPO),
    "dapo_math_blank": TrainingSet("dapo", _DAPO, words=("--text-image", "blank")),
    "polaris": TrainingSet("polaris", _data("POLARIS-Project/Polaris-Dataset-53K", "raw/Polaris", "Apache-2.0")),
    "math": TrainingSet("math", _data("DigitalLearningGmbH/MATH-lighteval", "raw/MATH", "")),
}


def benchmark_download(name: str) -> Download:
    """Return the download of a benchmark."""
    benchmark = BENCHMARKS[name]
    hub = benchmark.files.hub
    return _data(hub, f"raw/{hub.rpartition('/')[2]}", benchmark.license)
