"""Tags that are single tokens: a model that was never trained on them gets them as plain text, and keeps that."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.helpers.toy_runs import Toys
from vlm_rl.data.prompts import PromptBuilder, PromptCache
from vlm_rl.errors import UserError
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.sft import Example, pack_examples
from vlm_rl.model_files.tag_spelling import is_spelled_plainly
from vlm_rl.samplers.base import Sampler, SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.tags import QUESTIONS, settle_tags
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

TAGS = TEMPLATES["think_answer"].tags
PERFECT = TEMPLATES["think_answer"].wrap("seven", "7")
PROBLEMS = [Problem(f"p{n}", text, (), "7", "integer") for n, text in enumerate(QUESTIONS)]


def scaled(model: Path, out: Path, factor: float) -> Path:
    """Copy a model, the embeddings of its tags multiplied."""
    shutil.copytree(model, out)
    weights = load_file(out / "model.safetensors")
    ids = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids([*TAGS])
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name][ids] *= factor
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def opened(folder: Path, **options: str) -> PromptBuilder:
    return PromptBuilder(folder, template=TEMPLATES["think_answer"], **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_run_settles_its_tags_once(toys: Toys, untaught: Path, lora: dict[str, int] | None) -> None:
    """A resume with adapters opens the base model again, whose tokenizer still has the tokens."""
    name = f"tags-{bool(lora)}"
    changes = {
        "model": {"path": str(untaught), "lora": lora},
        "data": {"max_prompt_tokens": 400},
        "checkpoint": {"every": 1},
    }
    run = toys.train_run(name, train={"steps": 1}, **changes)
    lines = (run.path / "log.txt").read_text()
    assert lines.count("are spelled as text") == 1 and "of 12 responses begin with" in lines
    (_, first) = run.checkpoints()[-1]
    assert is_spelled_plainly(first, "<think>")
    result = toys.runner("train", toys.config(name, train={"steps": 2}, **changes), "--resume")
    assert result.code == 0, result.output[-3000:]
    assert "of 12 responses begin with" not in result.output
    assert is_spelled_plainly(run.checkpoints()[-1][1], "<think>")
    out = toys.folder / f"eval-{name}"
    result = toys.runner("eval", "--model", first, "--data", toys.heldout, "--out", out, "--sampler", "transformers")
    assert result.code == 0, result.output[-3000:]


@pytest.mark.parametrize(("factor", "is_plain"), [(0.05, True), (1.0, False), (3.0, False)])
def test_tags_with_short_embeddings_are_spelled_plainly(
    tiny_model: Path, tmp_path: Path, factor: float, is_plain: bool
) -> None:
    builder = opened(scaled(tiny_model, tmp_path / "m", factor))
    ids = {*builder.tokenizer.convert_tokens_to_ids([*TAGS])}
    prompt = builder.build(Problem("p", "What is <think>?", (), "4", "integer"))
    assert bool(ids & {*prompt.ids.tolist()}) is not is_plain
    assert bool(builder.tags_note) is is_plain and builder.tags_are_doubtful is not is_plain
    builder.check_template()
    assert builder.tokenizer.decode(prompt.ids) == prompt.text


def test_both_spellings_read_alike_and_a_checkpoint_keeps_the_plain_one(tiny_model: Path, tmp_path: Path) -> None:
    tokens, plain = opened(tiny_model, tags="token"), opened(tiny_model, tags="plain")
    written = {builder: builder.encode_response(PERFECT) for builder in (tokens, plain)}
    assert len(written[plain]) > len(written[tokens])
    for builder in (tokens, plain):
        for ids in written.values():
            assert builder.decode(ids) == PERFECT and builder.template.is_well_formed(builder.decode(ids))
    assert plain.tokenizer.get_vocab() == tokens.tokenizer.get_vocab()
    assert (plain.banned_ids, plain.eos_ids) == (tokens.banned_ids, tokens.eos_ids)
    shutil.copytree(tiny_model, tmp_path / "saved")
    plain.processor.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved")
    assert again.encode_response(PERFECT).tolist() == written[plain].tolist()
    assert again.decode(written[tokens]) == PERFECT
    assert not again.tags_are_doubtful and is_spelled_plainly(tmp_path / "saved", "<think>")
    tokens.spell_tags_as(tmp_path / "saved")
    assert tokens.encode_response(PERFECT).tolist() == written[plain].tolist()


def test_plain_spelling_takes_tags_that_are_control_tokens(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    tree = json.loads(path.read_text())
    for token in tree["added_tokens"]:
        token["special"] = token["special"] or token["content"] == "<think>"
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"set data\.tags=plain"):
        opened(tmp_path / "m").check_template()
    builder = opened(tmp_path / "m", tags="plain")
    builder.check_template()
    assert builder.decode(builder.encode_response(PERFECT)) == PERFECT


def test_a_chat_template_that_opens_the_reasoning_leaves_no_doubt(tiny_model: Path, tmp_path: Path) -> None:
    """Its models write the token, whatever the length of its embedding."""
    folder = scaled(tiny_model, tmp_path / "m", 0.05)
    chat = folder / "chat_template.jinja"
    chat.write_text(chat.read_text().replace(r"assistant\n' -}}", r"assistant\n<think>' -}}"))
    builder = opened(folder)
    assert builder.prefill == "<think>" and not builder.tags_note and not builder.tags_are_doubtful


@pytest.fixture(scope="module")
def untaught(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that answers in the right format only where its prompt spells the tags as text."""
    out = tmp_path_factory.mktemp("untaught") / "m"
    model = load_model(tiny_model, dtype=torch.float32, device=torch.device("cpu"))
    policy = Policy(model, banned_ids=(), temperature=1.0)
    rows = []
    for tags, response in (("plain", PERFECT), ("token", r"\boxed{7}")):
        builder = opened(tiny_model, tags=tags)
        examples = [Example(problem, response) for problem in PROBLEMS]
        prompts = PromptCache(builder)
        lengths = [len(prompts[problem].ids) for problem in PROBLEMS]
        rows += pack_examples(examples, lengths, builder, prompts, policy, budget=2000)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(50):
        loss = -sum((policy(row)[0].mean() for row in rows), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy.model.save_pretrained(out)
    opened(tiny_model).processor.save_pretrained(out)
    return out


@pytest.fixture
def settled(untaught: Path) -> Iterator[tuple[PromptBuilder, str, Sampler]]:
    builder = opened(untaught)
    assert builder.tags_are_doubtful, "the lengths of random embeddings tell nothing"
    sampler = make_sampler(
        "transformers",
        EngineSettings(
            model_path=str(untaught), builder=builder, max_model_len=512, batch_size=16, dtype=torch.float32
        ),
    )
    with closing(sampler):
        yield builder, settle_tags(builder, sampler, context=512, seed=0), sampler


@pytest.mark.turn(0, days=2)
def test_a_model_that_cannot_write_its_tokens_gets_plain_tags(settled: tuple[PromptBuilder, str, Sampler]) -> None:
    builder, line, sampler = settled
    assert re.search(r"as text, not .*: ([6-9]|1[0-2]) of 12 responses begin with <think> so, and 0 with", line), line
    params = SamplingParams(temperature=0.0, max_tokens=60, responses=1)
    groups = sampler.generate(SampleRequest([builder.build(p) for p in PROBLEMS], params, seed=1, step=0))
    assert all(builder.template.is_well_formed(rollout.text) for (rollout,) in groups), groups
    assert settle_tags(builder, sampler, context=512, seed=0) == ""
