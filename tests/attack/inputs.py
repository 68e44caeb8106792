"""Attacks by what a run is given: a reward function, a model folder, a checkpoint, a prepared set, rows, problems."""

from __future__ import annotations

import gzip
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from tests.attack.attack import Attack
from tests.attack.toys import toys
from tests.helpers.damaged_sets import DAMAGES
from tests.helpers.images import jpeg_with, many_scans, png_with, repeating_exif
from tests.helpers.own_data import workbook_with
from tests.helpers.prepared_sets import write_problems
from tests.helpers.processes import processes_with
from tests.helpers.toy_runs import DEADLINE, ExitResult, clean_environment
from vlm_rl.data.chat_templates import render_limited
from vlm_rl.data.images import decode_image
from vlm_rl.data.tokenizer_trial import check_expressions
from vlm_rl.data_prep.readers.program_tests import tests_in
from vlm_rl.data_prep.readers.table_files import read_tables
from vlm_rl.data_prep.records import RowError
from vlm_rl.demo.numbers.token_counts import TokenCounter
from vlm_rl.errors import UserError
from vlm_rl.sandbox.limited import LimitedWorker, LimitError
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

FUNCTIONS = "tests.helpers.own_reward"
LIMITED = "Limits of what a stranger wrote"
STEP = {"steps": 1}


def train(folder: Path, **changes: object) -> ExitResult:
    """Train one step in this folder."""
    config = toys().config("attacked", **{"train": STEP, **changes}, out=str(folder / "run"))
    return toys().runner("train", str(config))


def evaluate(folder: Path, model: Path, data: Path, *options: str) -> ExitResult:
    given = {"--model": model, "--data": data, "--out": folder / "results", "--sampler": "transformers"}
    limits = {"--max-tokens": 8, "--max-prompt-tokens": 200}
    words = [str(word) for item in (given | limits).items() for word in item]
    return toys().runner("eval", *words, *options)


def told(result: ExitResult, *words: str) -> str:
    """Return the exit code, and whether the output has these words and no traceback."""
    has = "named" if all(word in result.output for word in words) else f"not named: {result.output[-300:]}"
    return f"code {result.code}, {has}{', traceback' if 'Traceback' in result.output else ''}"


# -- reward functions ------------------------------------------------------------------------------


def reward(folder: Path, *, name: str, words: tuple[str, ...] = (), timeout: float = 60.0) -> str:
    function = f"{FUNCTIONS}.{name}"
    result = train(folder, reward={"function": function, "allow_function": True, "function_timeout": timeout})
    left = processes_with(function)
    saved = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    return f"{told(result, *words)}, {len(left)} processes left, saved {', '.join(saved) or 'nothing'}"


# -- models ----------------------------------------------------------------------------------------


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def opened_everywhere(folder: Path, model: Path, *words: str) -> str:
    """Open a model folder as train, eval and the live panel do; return what each says."""
    from vlm_rl.demo.live.backends import AskableCheckpoint, load_checkpoint

    asked = AskableCheckpoint("a", model, "a", TEMPLATES["think_answer"], 3136, 1_003_520)
    try:
        load_checkpoint(asked, engine="transformers", max_tokens=8)
        panel = "opened"
    except UserError as error:
        panel = "refused" if all(word in str(error) for word in words) else str(error)
    trained = told(train(folder, model={"path": str(model)}), *words)
    evaluated = told(evaluate(folder, model, toys().heldout), *words)
    written = sorted(path.name for path in folder.iterdir() if path != model)
    return f"train: {trained}; eval: {evaluated}; live panel: {panel}; written: {written}"


def missing_tensor(folder: Path) -> str:
    model = Path(shutil.copytree(toys().model, folder / "model"))
    change_weights(model, lambda tensors: tensors.pop("model.norm.weight"))
    return opened_everywhere(folder, model, "model.safetensors", "norm.weight' is missing")


def nan_in_a_weight(folder: Path) -> str:
    model = Path(shutil.copytree(toys().model, folder / "model"))
    change_weights(model, lambda tensors: tensors["model.norm.weight"].fill_(math.nan))
    return opened_everywhere(folder, model, "model.safetensors", "'model.norm.weight' holds NaN")


def unchecked_weights(folder: Path) -> str:
    """Let config.json lead transformers to a second file, whose weights are NaN."""
    model = Path(shutil.copytree(toys().model, folder / "model"))
    (model / "kept").mkdir()
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(math.nan)
    save_file(tensors, model / "kept" / "other.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"transformers_weights": "kept/other.safetensors"}))
    return opened_everywhere(folder, model, "config.json", "transformers_weights")


def pipe_in_a_model_folder(folder: Path) -> str:
    model = Path(shutil.copytree(toys().model, folder / "model"))
    (model / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(model / "generation_config.json")
    return opened_everywhere(folder, model, "generation_config.json", "is no file")


def multiplying_model(folder: Path) -> str:
    """Open a model whose tokenizer would make 9e11 letters of one, in this process, before any limit could end it."""
    model = Path(shutil.copytree(toys().model, folder / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    replacing = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 99}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [replacing] * 6}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return opened_everywhere(folder, model, "tokenizer.json", "its normalizer makes a text")


def endless_tokenizers(folder: Path) -> str:
    """Try tokenizers as opening a model does: two have no end, one takes the square of a text's length often."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Replace

    tokenizer, refused = Tokenizer(WordLevel({"?": 0}, unk_token="?")), list[str]()
    for expression in ("(a+)+b", r"(?=(\n+)+b)\n", "|".join(f"a+{end}" for end in "bcdefghijklmnopq")):
        tokenizer.normalizer = Replace(Regex(expression), "x")
        tokenizer.save(str(folder / "tokenizer.json"))
        try:
            check_expressions(folder)
        except UserError as error:
            refused.append("for its time" if "took more than 10 s of CPU time" in str(error) else "for a panic")
    return "refused " + ", ".join(refused)


def many_scans_in_a_jpeg(folder: Path) -> str:
    """Ask for a picture of 4,000 x 4,000 pixels with 300 scans: 9 CPU seconds, in 120 kB."""
    begun = time.process_time()
    try:
        decode_image(many_scans(300, 4000), where="the picture")
        said = "decoded"
    except UserError as error:
        said = "refused" if "JPEG of 310 scans" in str(error) else str(error)
    return f"{said}, {'below' if time.process_time() - begun < 3 else 'above'} 3 CPU seconds"


def long_before_the_pixels(folder: Path) -> str:
    """Ask for pictures of many chunks, segments and fill bytes, and of EXIF that is 300 times as much."""
    del folder
    pictures = (
        png_with(b"teSt", times=1_000_000),
        jpeg_with(b"\xff\xfe\0\2", times=3_000_000),
        jpeg_with(b"\xff" * 30_000_000),
        png_with(b"eXIf", repeating_exif(300, 1_000_000)),
    )
    begun, refused = time.process_time(), 0
    for data in pictures:
        try:
            decode_image(data, where="the picture")
        except UserError:
            refused += 1
    spent = "below" if time.process_time() - begun < 3 else "above"
    return f"{refused} of {len(pictures)} refused, {spent} 3 CPU seconds"


def flipped_bit(folder: Path) -> str:
    """Change one bit of a checkpoint's weights, which load without complaint."""
    assert train(folder).code == 0
    run = (folder / "run").rename(folder / "good")
    model = run / "checkpoints" / "step-000001"
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    text = opened_everywhere(folder, model, str(model), "the content of model.safetensors changed")
    return text.replace("'good'", "").replace(", ]", "]")


REFUSED = "train: code 2, named; eval: code 2, named; live panel: refused; written: []"

# -- prepared sets and rows --------------------------------------------------------------------------

ENTRIES = ("manifest cut", "id null", "image cut and closed")


def damaged_sets(folder: Path) -> str:
    """Give sets with a few of the damages of tests/data/test_damaged_sets.py to the commands themselves."""
    seen = set()
    for name in ENTRIES:
        data = Path(shutil.copytree(toys().train, folder / name.replace(" ", "-")))
        DAMAGES[name](data)
        results = [train(folder, data={"train": [str(data)]}), evaluate(folder, toys().model, data)]
        seen |= {told(result, str(data)) for result in results}
    seen.add(told(toys().runner("demo", str(toys().train)), str(toys().train)))
    return "; ".join(sorted(seen))


def bad_rows(folder: Path) -> str:
    """Prepare good rows between rows that ended the preparation, or were taken."""
    from vlm_rl.cli import main
    from vlm_rl.data_prep.prepared_set import MANIFEST

    good = {"q": "How many?", "a": "7"}
    rows: list[object] = [
        good,
        {**good, "q": "A gold of many digits?", "a": 10**400},
        {**good, "a": "\ud800"},
        {**good, "q": "\udfff?"},
        {**good, "a": " \t "},
        {**good, "a": float("inf")},
        {**good, "id": None},
        {**good, "a": {"value": 7}},
        7,
    ]
    lines = [json.dumps({"id": number, **row} if isinstance(row, dict) else row) for number, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    columns = {"question": "q", "answer": "a", "id": "id"}
    (folder / "set.yaml").write_text(json.dumps({"path": "rows.jsonl", "source": "mine", "columns": columns}))
    code = main(["prepare", "generic", "--source", str(folder / "set.yaml"), "--out", str(folder / "out")])
    facts = json.loads((folder / "out" / MANIFEST).read_text())
    return f"code {code}, {facts['rows_in']} rows in, {facts['kept']} kept, dropped: {facts['dropped']}"


# -- responses and problems --------------------------------------------------------------------------


def empty_responses(folder: Path) -> str:
    """Train and evaluate a policy that ends every response at once."""
    from transformers import AutoTokenizer

    from vlm_rl.run.directory import RunDirectory

    model = Path(shutil.copytree(toys().model, folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]

    def silence(tensors: dict[str, torch.Tensor]) -> None:
        """Let one direction of the hidden state decide: whatever its sign, one of the two ends wins."""
        tensors["model.norm.weight"].zero_()[0] = 1
        tensors["model.embed_tokens.weight"][ends, 0] = torch.tensor([300.0, -300.0])

    change_weights(model, silence)
    trained = train(folder, model={"path": str(model)}, train={"steps": 2})
    evaluated = evaluate(folder, model, toys().heldout)
    run, results = RunDirectory(folder / "run"), RunDirectory(folder / "results")
    texts = {text for step in (1, 2) for text in run.rollouts(step, ["text"])["text"].to_pylist()}
    skipped = run.metrics()[-1]["steps/skipped"]
    accuracy = results.evals()[0].summary["accuracy"]
    return f"train: {told(trained)}, texts {texts}, {skipped:g} steps skipped; eval: {told(evaluated)}, {accuracy:g}"


def long_problems(folder: Path) -> str:
    """Evaluate a question, and then a gold and its options, of 100,000 characters."""
    long = "word " * 20_000
    question = write_problems([Problem("long", long, (), "1", "integer")], folder / "question")
    golds = [Problem("gold", "?", (), long, "text"), Problem("option", "?", (), "A", "choice", choices=(long, "b"))]
    gold = write_problems(golds, folder / "gold")
    over = ("--max-prompt-tokens", "200000")
    results = [
        told(evaluate(folder, toys().model, question), "problem 'long'", "prompt tokens"),
        told(evaluate(folder, toys().model, question, *over), "--max-prompt-tokens", "context"),
        told(evaluate(folder, toys().model, gold), "accuracy 0.000"),
    ]
    return "; ".join(results)


def slow_values(folder: Path) -> str:
    """Compare, as sets, 40,000 integers of one hash, of which a set is made in 800 million steps."""
    del folder
    worker = LimitedWorker("vlm_rl.grading.code_comparison.first_difference", cpu_seconds=0.5, memory=1 << 30)
    value = json.dumps({"value": [{"int": hex(number * (2**61 - 1))} for number in range(40_000)]}) + "\n"
    try:
        return f"compared: {worker.call('same', [{'atol': 0, 'view': 'set'}], [[]], value, '', value)}"
    except LimitError as limit:
        return str(limit)
    finally:
        worker.close()


def endless_asserts(folder: Path) -> str:
    """Read asserts that write out a hundred million numbers in 20 kB, and a million asserts."""
    del folder
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in ("assert f(1) == [" + "list(range(100000))," * 1000 + "]", "assert f(1) == 1\n" * 1_000_000):
        try:
            tests_in(text)
        except RowError:
            refused += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10
    return f"{refused} of 2 refused, {'below' if grown < 300 else 'ABOVE'} 300 MiB"


def unpacking_row_of_csv(folder: Path) -> str:
    """Read some kB of compressed CSV whose one row has 20 million fields."""
    with gzip.open(folder / "a.csv.gz", "wt", compresslevel=1) as file:
        file.write("id,q\n1," + "ab," * 20_000_000 + "\n")
    return read_beside(folder / "a.csv.gz")


def endless_templates(folder: Path) -> str:
    """Try chat templates that loop, indent, multiply and compute without an end."""
    del folder
    texts = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a\nb' | indent(10**10) }}",
        "{{ 'x' * 10**9 }}",
        "{{ (10 ** (10 ** 9)) % 7 }}",
    )
    ended = 0
    for text in texts:
        with suppress(UserError):
            render_limited(SimpleNamespace(chat_template=text, special_tokens_map={}), [], generation=True, where="x")
            ended += 1
    return f"{len(texts) - ended} of {len(texts)} refused"


def template_that_knows_its_process(folder: Path) -> str:
    """Open a model whose chat template runs without an end wherever transformers' own functions are in reach."""
    model = Path(shutil.copytree(toys().model, folder / "model"))
    file = model / "chat_template.jinja"
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    where = "documents is not defined or '_compile_jinja_template' in raise_exception|string"
    file.write_text(f"{{% if {where} %}}{loops}{{% endif %}}{file.read_text()}")
    config = toys().config("attacked", train=STEP, model={"path": str(model)}, out=str(folder / "run"))
    return told(toys().runner("train", str(config)))


def multiplying_tokenizer(folder: Path) -> str:
    """Count with a run's tokenizer that makes 9e11 letters of one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Replace, Sequence

    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.normalizer = Sequence([Replace("a", "a" * 99)] * 6)
    tokenizer.save(str(folder / "tokenizer.json"))
    counter = TokenCounter(folder / "tokenizer.json")
    split = counter.split(["<think> a </think>"], np.array([7]))
    return "no tokens of reasoning, and this process goes on" if split is None else "counted"


def packages_that_no_run_needs(folder: Path) -> str:
    """Train adapters where packages are installed that load code of a hub, or that only 4 bits are made of.

    Both write down that they were imported.
    """
    made, packages, marks = toys(), folder / "packages", folder / "imported"
    for name, version in (("kernels", "0.17.0"), ("bitsandbytes", "0.50.2")):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(f"open({str(marks)!r}, 'a').write('{name} ')\n")
        about = packages / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    model = {"path": str(made.model), "lora": {"rank": 2}}
    config = made.config("adapters", model=model, train=STEP, out=str(folder / "run"))
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{packages}:{environment['PYTHONPATH']}"
    words = [sys.executable, "-m", "vlm_rl", "train", str(config)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    imported = marks.read_text() if marks.exists() else "nothing"
    return f"exit code {done.returncode}, {imported} imported{'' if done.returncode == 0 else done.stderr[-2000:]}"


def unpacking_table(folder: Path) -> str:
    """Read some kB of Parquet that hold 400 texts of 1 MiB."""
    table = folder / "a.parquet"
    pq.write_table(pa.table({"q": ["x" * (1 << 20)] * 400}), table, compression="zstd")
    return read_beside(table)


def unpacking_stream(folder: Path) -> str:
    """Read some kB of a compressed Arrow stream whose one batch is 400 texts of 1 MiB."""
    table, batch = folder / "a.arrow", pa.record_batch({"q": ["x" * (1 << 20)] * 400})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(table), "wb") as file, pa.ipc.new_stream(file, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    return read_beside(table)


def unpacking_json(folder: Path) -> str:
    """Read a line of some 100 kB that holds 15 million empty lists."""
    with gzip.open(folder / "a.jsonl.gz", "wt", compresslevel=1) as file:
        file.write('{"q": [' + "[]," * 15_000_000 + "[]]}\n")
    return read_beside(folder / "a.jsonl.gz")


def unpacking_workbook(folder: Path) -> str:
    """Read a workbook of 150 kB that holds a text of 150 MB."""
    workbook_with(folder / "a.xlsx", b"x" * 150_000_000)
    return read_beside(folder / "a.xlsx")


def read_beside(table: Path) -> str:
    """Read a table in a process of its own; return how many rows it had, and whether memory stayed flat."""
    program = (
        "import sys; from pathlib import Path; import pyarrow.parquet\n"
        "from vlm_rl.data_prep.readers.table_files import read_tables\n"
        "from vlm_rl.errors import UserError\n"
        "peak = lambda: int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) >> 10\n"
        "before = peak()\n"
        "try: print(sum(isinstance(row, dict) for _, row in read_tables([Path(sys.argv[1])])), 'rows,', end=' ')\n"
        "except UserError: print('refused,', end=' ')\n"
        "print('below' if peak() - before < 300 else 'ABOVE', '300 MiB')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(table)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_of_equal_values(folder: Path) -> str:
    """Read one row whose list holds 40 million zeros in less than 1 kB of Parquet."""
    count = 40_000_000
    zeros = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.int64)))
    pq.write_table(pa.table({"q": zeros}), folder / "a.parquet", compression="zstd")
    try:
        return f"{len([*read_tables([folder / 'a.parquet'])])} rows"
    except UserError as error:
        return "refused" if "unpacks from" in str(error) else str(error)


ATTACKS: tuple[Attack, ...] = (
    *(
        Attack(name, "Reward functions and judges", expected, partial(reward, **options), slow=True)
        for name, expected, options in (
            (
                "a reward function ends its process",
                "code 2, named, 0 processes left, saved nothing",
                {"name": "exits_at_once", "words": ("own_reward.exits_at_once at problem 'Toy-", "exit code 7")},
            ),
            ("a reward function forks", "code 0, named, 0 processes left, saved step-000001", {"name": "forks"}),
            (
                "a reward function hangs",
                "code 2, named, 0 processes left, saved nothing",
                {"name": "hangs_deaf", "words": ("reward.function_timeout=0.5",), "timeout": 0.5},
            ),
            (
                "SIGTERM while a reward function hangs",
                "code 75, named, 0 processes left, saved step-000000",
                {"name": "terminates_and_hangs", "words": ("stopped by SIGTERM after step 0",)},
            ),
            (
                "Ctrl-C while a reward function hangs",
                "code 75, named, 0 processes left, saved step-000000",
                {"name": "interrupts_and_hangs", "words": ("stopped by Ctrl-C after step 0",)},
            ),
        )
    ),
    Attack("a model folder without one tensor", "Input", REFUSED, missing_tensor, slow=True),
    Attack("NaN in a weight of a model folder", "Input", REFUSED, nan_in_a_weight, slow=True),
    Attack("a key that leads to weights nobody checked", "Input", REFUSED, unchecked_weights, slow=True),
    Attack(
        "installed packages that load code of a hub, or that 4 bits are made of",
        "Input",
        "exit code 0, nothing imported",
        packages_that_no_run_needs,
        slow=True,
    ),
    Attack("a pipe in a model folder", "Input", REFUSED, pipe_in_a_model_folder, slow=True),
    Attack("a tokenizer that multiplies, of a model", "Input", REFUSED, multiplying_model, slow=True),
    Attack("values that are slow to compare", LIMITED, "took more than 0.5 s of CPU time", slow_values),
    Attack("asserts without an end", LIMITED, "2 of 2 refused, below 300 MiB", endless_asserts, slow=True),
    Attack("chat templates without an end", LIMITED, "4 of 4 refused", endless_templates, slow=True),
    Attack(
        "a chat template that loops outside of limits alone",
        LIMITED,
        "code 0, named",
        template_that_knows_its_process,
        slow=True,
    ),
    Attack(
        "expressions without an end, in a model's tokenizer",
        LIMITED,
        "refused for a panic, for a panic, for its time",
        endless_tokenizers,
        slow=True,
    ),
    Attack(
        "a tokenizer that multiplies",
        LIMITED,
        "no tokens of reasoning, and this process goes on",
        multiplying_tokenizer,
        slow=True,
    ),
    Attack("a Parquet file that unpacks without a bound", LIMITED, "400 rows, below 300 MiB", unpacking_table),
    Attack("an Arrow stream that unpacks without a bound", LIMITED, "refused, below 300 MiB", unpacking_stream),
    Attack("a line of JSON that unpacks without a bound", LIMITED, "0 rows, below 300 MiB", unpacking_json),
    Attack("a row of CSV that unpacks without a bound", LIMITED, "0 rows, below 300 MiB", unpacking_row_of_csv),
    Attack("a workbook that unpacks without a bound", LIMITED, "refused, below 300 MiB", unpacking_workbook),
    Attack("a run of equal values in one row's list", LIMITED, "refused", run_of_equal_values),
    Attack("a JPEG of many scans", "Input", "refused, below 3 CPU seconds", many_scans_in_a_jpeg),
    Attack(
        "pictures that take long before their pixels",
        "Input",
        "4 of 4 refused, below 3 CPU seconds",
        long_before_the_pixels,
    ),
    Attack("a checkpoint with a flipped bit", "Checkpoints", REFUSED, flipped_bit, slow=True),
    Attack("damaged prepared sets", "Input", "code 2, named", damaged_sets, slow=True),
    Attack(
        "rows that end a preparation",
        "Input",
        "code 0, 9 rows in, 2 kept, dropped: {'answer_missing': 2, 'bad_text': 2, 'bad_type': 2, 'id_missing': 1}",
        bad_rows,
    ),
    Attack(
        "empty responses",
        "Stopping and resuming",
        "train: code 0, named, texts {''}, 0 steps skipped; eval: code 0, named, 0",
        empty_responses,
        slow=True,
    ),
    Attack(
        "problems of 100,000 characters",
        "Input",
        "code 2, named; code 2, named; code 0, named",
        long_problems,
        slow=True,
    ),
)
