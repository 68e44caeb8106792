"""Build prompts, here and nowhere else: a Problem becomes token ids, pixels and the text around them.

    builder = PromptBuilder(model_path, template=TEMPLATES["think_answer"])
    builder.check_template()        # refuse models whose chat template costs a perfect answer its reward
    prompt = builder.build(problem)

Training, evaluation and the demo all use it, so they cannot disagree. A `<|image_pad|>` or `<|im_start|>`
written in a question is encoded as the characters it is made of, never as the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import nn

from vlm_rl.data.chat_templates import render_limited
from vlm_rl.data.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image, open_packed
from vlm_rl.data.tokenizer_trial import check_expressions, naming_panics
from vlm_rl.data.untrusted_text import UntrustedTextEncoder, make_sentinels
from vlm_rl.data.vision.family import vision_of
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import declared_eos_ids, open_config, open_tokenizer
from vlm_rl.model_files.tag_spelling import are_untrained, is_spelled_plainly, single_tokens, spell_plainly
from vlm_rl.templates import THINK, Template
from vlm_rl.types import (
    IMAGE_MARKER,
    EpisodeStart,
    Problem,
    Prompt,
    Video,
    group_by_marker,
    marker_fault,
    split_at_markers,
)

_MOST_RENDERED = 1000  # skeletons that are kept

_MOST_FAILED_STARTS = 64  # in a row

_LONGEST_CHARACTER = 4  # tokens: UTF-8 has four bytes at most


class StartError(UserError):
    """Raised where an environment shows nothing that could begin an episode: its problem is left out."""


def refuse_failing_resets(faults: Sequence[str]) -> None:
    """Raise UserError if so many resets in a row have failed that going on might never end.

    Args:
        faults: the messages of their StartErrors, since the last one that did not fail.
    """
    if len(faults) >= _MOST_FAILED_STARTS:
        raise UserError(f"{len(faults)} resets in a row failed; the last one: {faults[-1]}")


class PromptBuilder:
    """Renders problems for a model.

    Attributes:
        tokenizer, processor: the model's own; processor is None for a text-only model.
        is_vision: whether the model takes images.
        takes_videos: whether it takes videos.
        max_videos: the most videos of a prompt for which an engine keeps memory (`allow_videos`).
        family: how its images enter it, None for a text-only model.
        template: the prompt template.
        instructions: what the system's message says besides the template's text; an environment sets it.
        prefill: what the chat template and the template write into the response's start.
        eos_ids: the ids that end a response, the end of an assistant's turn first.
        pad_id: the id to pad with.
        image_token_id: the placeholder of an image, None for a text-only model.
        banned_ids: control tokens that no response may contain; sampler and learner set them to minus infinity.
        tags_note: a line where tags are spelled as plain text, else "".
        tags_are_doubtful: whether the model has tokens for the tags, and only its answers can tell whether it
            knows them (vlm_rl.samplers.tags).
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        template: Template,
        min_pixels: int = 3136,
        max_pixels: int = 1_003_520,
        tags: Literal["auto", "token", "plain"] = "auto",
    ) -> None:
        """Open the model's tokenizer and processor. Raises UserError if the folder does not hold a usable model.

        Args:
            model_path: a model folder.
            template: the prompt template.
            min_pixels, max_pixels: the range of an image's pixels.
            tags: data.tags.
        """
        self.model_path = str(model_path)
        self.template = template
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.instructions = ""
        self.config = open_config(self.model_path)
        self.family = vision_of(self.config)
        self._rendered: dict[str, str] = {}  # messages of stand-ins -> the chat template's text
        self.is_vision = self.family is not None
        check_expressions(self.model_path)
        self.processor, self.tokenizer = open_tokenizer(self.model_path, is_vision=self.is_vision)
        self._check_vocabulary()
        self.tags_note, self.tags_are_doubtful = "", False
        if tags == "plain":
            self.spell_tags_plainly("data.tags is plain")
        self.image_token_id: int | None = self.config.image_token_id if self.is_vision else None
        self.takes_videos = self.family is not None and self.family.takes_videos(self.config)
        self.max_videos = 0
        videos = [self.config.video_token_id] if self.takes_videos else []
        self._placeholders = {*videos, *([self.family.placeholder_id(self.config)] if self.family else [])}
        self._encoder = UntrustedTextEncoder(self.tokenizer)
        if self.family is not None:
            self.family.check_limits(**self._image_options)
        self._reads_strings = self._wants_strings()
        with naming_panics(self.model_path):
            generation_tail, turn_tail = self._probe_chat_template()
            self._generation_tail = generation_tail
            self.prefill = generation_tail + template.prefill
            self.eos_ids = self._find_eos(turn_tail)
        pad = self.tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad is None else pad
        self.banned_ids = self._find_banned()
        if tags == "auto":
            self._look_at_tags()

    def spell_tags_plainly(self, reason: str) -> None:
        """Encode the template's tags as plain text from now on, where they are single tokens.

        Raises UserError for a tokenizer that cannot.
        """
        if tokens := single_tokens(self.tokenizer, self.template.tags):
            spell_plainly(self.tokenizer, tokens)
            self.tags_note = f"tags: {', '.join(tokens)} are spelled as text, not as one token each: {reason}"
        self._encoder = UntrustedTextEncoder(self.tokenizer)
        self.tags_are_doubtful = False

    def plainly_spelled(self) -> PromptBuilder | None:
        """Return a builder that spells the tags as plain text; None if the tokenizer cannot."""
        other = copy(self)
        other.tokenizer = deepcopy(self.tokenizer)
        try:
            other.spell_tags_plainly("")
        except UserError:
            return None
        return other

    def spell_tags_as(self, folder: Path) -> None:
        """Spell the tags as the tokenizer of a checkpoint does."""
        if any(is_spelled_plainly(folder, tag) for tag in self.template.tags):
            self.spell_tags_plainly(f"as in {folder}")
        self.tags_are_doubtful = False

    def _look_at_tags(self) -> None:
        """Spell the tags plainly where they are tokens that were clearly never trained, or leave it in doubt.

        A chat template that writes a tag itself is of a model that knows it.
        """
        tokens = single_tokens(self.tokenizer, self.template.tags)
        renderer = self.processor if self.is_vision else self.tokenizer
        if not tokens or not {*tokens.values()}.isdisjoint(self._encoder.control_tokens.values()):
            return
        if THINK not in str(renderer.chat_template) and are_untrained(self.model_path, tokens):
            self.spell_tags_plainly("the model's embeddings of these tokens were never trained")
        else:
            self.tags_are_doubtful = THINK not in self.prefill

    def with_template(self, template: Template) -> PromptBuilder:
        """Return a builder with a different template, which shares everything else with this one."""
        other = copy(self)
        other.template = template
        other.prefill = self._generation_tail + template.prefill
        return other

    @property
    def patch_size(self) -> int | None:
        """Return the pixels of a patch's side, None where the model takes images of any size.

        A text-only model, which has no patches, gets that of Qwen2.5-VL.
        """
        return 14 if self.family is None else self.family.patch_size(self.processor)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Return the options of vllm.LLM with which the engine makes the same of images."""
        return self.engine_options_for(self.max_videos)

    def engine_options_for(self, max_videos: int) -> dict[str, Any]:
        """Return the same of an engine that keeps memory for so many videos of a prompt."""
        if self.family is None:
            return {}
        return self.family.engine_options(**self._image_options, max_videos=max_videos)

    @property
    def _image_options(self) -> dict[str, Any]:
        return {"processor": self.processor, "min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def allow_videos(self, problems: Iterable[Problem]) -> None:
        """Let engines that start later keep memory for the videos of these problems.

        Raises UserError naming the first problem with a video where the model takes none.
        """
        for problem in problems:
            if problem.videos:
                self._check_takes_videos(problem)
                self.max_videos = max(self.max_videos, len(problem.videos))

    def expect_videos(self, count: int) -> None:
        """Do the same for so many videos of a prompt. Raises UserError if the model takes none."""
        if not self.takes_videos:
            raise UserError(
                f"rollout.vllm.limit_mm_per_prompt lets a prompt have {count} videos, and a "
                f"{self.config.model_type} model takes none: leave video out"
            )
        self.max_videos = max(self.max_videos, count)

    def build(self, problem: Problem, *, start: EpisodeStart | None = None) -> Prompt:
        """Render a problem.

        Args:
            problem: what is asked.
            start: what the environment shows first. It ends the user's turn: a blank line, its text, its images.

        Raises:
            UserError: its text or images cannot be used; the message names the problem.
            StartError: the same for the start; the message ends a sentence that names both.
        """
        media = self._media(problem)
        text, sampler_ids = self._render_unexpanded(problem)
        num_tokens = 0
        if start is not None:
            num_without = len(sampler_ids)
            try:
                text, sampler_ids = self._render_unexpanded(problem, start)
            except UserError:
                raise StartError("holds a control token of the model in its text") from None
            shown = open_packed(start.images)
            media += shown
            num_tokens = len(sampler_ids) - num_without + sum(len(ids) - 1 for ids in self.expansions(shown))
        vision, expansions = self._encoded(media)
        return Prompt(
            problem_id=problem.id,
            text=text,
            prefill=self.prefill,
            ids=self.expand(sampler_ids, expansions),
            sampler_ids=np.array(sampler_ids, dtype=np.int32),
            images=tuple(item for item in media if not isinstance(item, Video)),
            vision=vision,
            videos=tuple(item for item in media if isinstance(item, Video)),
            start=start,
            start_tokens=num_tokens,
        )

    def fit(self, image: Image.Image) -> Image.Image:
        """Return a decoded image as sampler and learner both get it."""
        return image if self.family is None else self.family.fit(image, **self._image_options)

    def vision_of(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Return the model's inputs of images that are on its grid, {} for none."""
        return self._encoded(images)[0]

    def expansions(self, images: Sequence[Image.Image]) -> list[list[int]]:
        """Return the ids that the placeholder of each of these images expands to."""
        return self._encoded(images)[1]

    def _encoded(self, media: Sequence[Image.Image | Video]) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
        """Return `vision` of what is on the model's grid, and the ids that each one's placeholder expands to."""
        if not media or self.family is None:
            return {}, []
        return self.family.encode(media, **self._image_options)

    def encode_chat(self, skeleton: str, texts: Mapping[str, str]) -> list[int] | None:
        """Return the ids of a rendered chat; see UntrustedTextEncoder.encode_chat."""
        return self._encoder.encode_chat(skeleton, texts)

    def count_unexpanded(self, problem: Problem) -> int:
        """Count the tokens of the problem's prompt, each image and each pair of frames as one visual token.

        The images need not be read yet.
        """
        if problem.videos:
            self._check_takes_videos(problem)
        count = len(self._render_unexpanded(problem)[1])
        for seconds in problem.videos:
            assert self.family is not None and self.patch_size is not None
            side = 2 * self.patch_size  # of one visual token
            video = Video((Image.new("RGB", (side, side)),) * len(seconds), seconds)
            count += len(self.family.encode([video], **self._image_options)[1][0]) - 1
        return count

    def _render_unexpanded(self, problem: Problem, start: EpisodeStart | None = None) -> tuple[str, list[int]]:
        """Return (rendered text, ids with one placeholder per image or video)."""
        texts, markers = split_at_markers(problem.question, problem.videos)
        texts = [str(problem.meta.get("system", "")), *texts, start.text if start is not None else ""]
        sentinels = make_sentinels(texts)
        more = len(start.images) if start is not None else 0
        for place, text in enumerate(texts):
            if not text and (markers or more or place in (0, len(texts) - 1)):
                sentinels[place] = ""
        of_system, *of_question, of_start = sentinels
        last = of_question[-1] + self.template.suffix
        if of_start:
            last += f"\n\n{of_start}" if last else of_start
        shown = self._user([*of_question[:-1], last, *[""] * more], [*markers, *[IMAGE_MARKER] * more])
        messages = [*self._system(of_system), shown]
        skeleton = self.render(messages) + self.template.prefill
        text = skeleton
        original_of = {sentinel: text for sentinel, text in zip(sentinels, texts, strict=True) if sentinel}
        for sentinel, original in original_of.items():
            if text.count(sentinel) != 1:
                raise UserError(f"{self.model_path}: the chat template drops or repeats the user's text")
            text = text.replace(sentinel, original)
        ids = self._encoder.encode_chat(skeleton, original_of)
        if ids is None:
            raise UserError(f"problem {problem.id!r}: its text forms a control token of the model; remove the row")
        return text, ids

    def encode_response(self, text: str) -> np.ndarray:
        """Return the ids (int32) of a whole response, with the end of the turn and without the prefill.

        `text` is what a grader would see, prefill included. Raises UserError if it does not start with the prefill.
        """
        for start in (self.prefill, self.prefill.rstrip()):
            if text.startswith(start):
                ids = self._encoder.encode(text.removeprefix(start))
                return np.array([*ids, self.eos_ids[0]], dtype=np.int32)
        raise UserError(
            f"{self.model_path} starts every response with {self.prefill!r}, but this one is {text[:80]!r}"
        )

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """Return the text of each token. Joined they are `decode(ids)`.

        A token that ends inside a character has "", and the one that completes it has the character.
        """
        pieces: list[str] = []
        before: list[int] = []  # the token ahead, since some tokenizers drop the space that a text begins with
        open_ids: list[int] = []
        for place, one in enumerate(map(int, ids)):
            open_ids.append(one)
            text = self.decode(before + open_ids)[len(self.decode(before)) :]
            if text.endswith("\ufffd") and len(open_ids) < _LONGEST_CHARACTER and place + 1 < len(ids):
                pieces.append("")
                continue
            pieces.append(text)
            before, open_ids = open_ids[-1:], []
        return pieces

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of generated tokens without special ones; the prompt's prefill is not in it."""
        plain = [int(i) for i in ids]
        with naming_panics(self.model_path):
            return self.tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def check_template(self) -> None:
        """Send a perfect answer through the real chat template. Raises UserError if it would lose reward."""
        problem = Problem(
            id="template-check", question="What is 2 + 2?", images=(), answer="4", answer_type="integer"
        )
        where = f"{self.model_path} with data.template {self.template.name!r}"
        perfect = self.template.wrap("Two and two make four.", "4")
        if not perfect.startswith(self.prefill.rstrip()):
            raise UserError(
                f"{where}: the chat template starts every response with {self.prefill!r}, so that none could get the "
                "format reward; use a different template, or a model whose chat template leaves the reasoning open"
            )
        if control := [token for token in self._encoder.control_tokens if token in perfect]:
            raise UserError(
                f"{where}: {control} are control tokens of this model, which are neither sampled nor shown; "
                "set data.tags=plain, which spells them as plain text, or use a different template"
            )
        words = f"{self.template.system}{self.template.suffix}{self.template.prefill}"
        if control := [token for token in self._encoder.control_tokens if token in words]:
            raise UserError(f"{where}: its words hold {control}, control tokens of this model; take them out")
        ids = self.encode_response(perfect)
        graded = self.build(problem).prefill + self.decode(ids)
        if self.template.has_form and not self.template.is_well_formed(graded):
            raise UserError(
                f"{where}: with the chat template's own text in front a perfect response reads {graded!r} and gets "
                "no format reward; use a different template, or a model whose chat template leaves the reasoning open"
            )
        region = self.template.answer_region(graded)
        if region is None or self.template.answers(region) != ["4"]:
            raise UserError(
                f"{where}: no answer is found in the perfect response {graded!r}; use a different template"
            )

    def _check_vocabulary(self) -> None:
        """Raise UserError if the tokenizer has ids for which the model has no embedding."""
        highest = max(self.tokenizer.get_vocab().values(), default=-1)
        size = self.config.get_text_config().vocab_size
        if highest >= size:
            raise UserError(
                f"model.path {self.model_path}: its tokenizer has ids up to {highest}, and the model's vocabulary "
                f"has {size} entries: tokenizer and weights are of different models; get the model again"
            )

    def _media(self, problem: Problem) -> list[Image.Image | Video]:
        """Return images and videos decoded and on the grid; sampler and learner both get these very pixels."""
        if fault := marker_fault(problem.question, len(problem.images), problem.videos):
            raise UserError(f"problem {problem.id!r} {fault}; each needs one marker")
        if not problem.images:
            return []
        if self.family is None:
            raise UserError(f"problem {problem.id!r} has images, but {self.model_path} is a text-only model")
        if problem.videos:
            self._check_takes_videos(problem)
        limits = TEST_LIMITS if problem.test_only else DEFAULT_LIMITS
        images = []
        for index, data in enumerate(problem.images):
            image = decode_image(data, where=f"problem {problem.id!r} image {index}", limits=limits)
            images.append(self.fit(image))
        media: list[Image.Image | Video] = []
        videos = iter(problem.videos)
        for pictures in group_by_marker(problem.question, images, problem.videos):
            if len({picture.size for picture in pictures}) > 1:
                raise UserError(f"problem {problem.id!r}: the frames of its video differ in size; prepare it again")
            media.append(pictures[0] if len(pictures) == 1 else Video(tuple(pictures), next(videos)))
        return media

    def _check_takes_videos(self, problem: Problem) -> None:
        if not self.takes_videos:
            raise UserError(
                f"problem {problem.id!r} has a video, and models of type {self.config.model_type!r} "
                f"({self.model_path}) take none here; use Qwen2.5-VL or Qwen3-VL"
            )

    def _system(self, of_row: str = "") -> list[dict[str, Any]]:
        """Return the system's message: the words of template, environment and row; none if all are empty."""
        text = "\n\n".join(filter(None, [self.template.system, self.instructions, of_row]))
        return [{"role": "system", "content": self.as_content(text)}] if text else []

    def as_content(self, text: str) -> Any:
        """Return the text of a system's or an assistant's message as the chat template reads it."""
        return text if self._reads_strings else [{"type": "text", "text": text}]

    def _user(self, texts: Sequence[str], markers: Sequence[str]) -> dict[str, Any]:
        """Return the user's message: text, image or video, text, ..., text. A text-only model gets a plain string.

        There is no empty text beside an image: Idefics3 would put a space there, and LLaVA-OneVision a line break.
        """
        if not self.is_vision:
            return {"role": "user", "content": "".join(texts)}
        content: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}] if texts[0] else []
        for marker, text in zip(markers, texts[1:], strict=True):
            content.append({"type": "image" if marker == IMAGE_MARKER else "video"})
            content += [{"type": "text", "text": text}] if text else []
        return {"role": "user", "content": content}

    def render(self, messages: list[dict[str, Any]], *, generation: bool = True) -> str:
        """Return the chat template's text. Messages hold stand-ins for all texts, so few of them are different."""
        key = json.dumps([messages, generation])
        if key in self._rendered:
            return self._rendered[key]
        renderer = self.processor if self.is_vision else self.tokenizer
        text = render_limited(renderer, messages, generation=generation, where=self.model_path)
        if len(self._rendered) < _MOST_RENDERED:
            self._rendered[key] = text
        return text

    def expand(self, sampler_ids: Sequence[int], expansions: Sequence[Sequence[int]]) -> np.ndarray:
        """Return ids with each image's and video's placeholder replaced by its expansion, int32 [P_tokens]."""
        assert sum(i in self._placeholders for i in sampler_ids) == len(expansions)
        rest = iter(expansions)
        expanded = [part for i in sampler_ids for part in (next(rest) if i in self._placeholders else (i,))]
        if expansions and self.family is not None:
            expanded = self.family.joined(expanded, self.tokenizer)
        return np.array(expanded, dtype=np.int32)

    def _probe_chat_template(self) -> tuple[str, str]:
        """Return the chat template's text at a response's start ("" or from <think> on), and after its end.

        GLM ends a turn with the token that begins the next one, which its configuration declares as an end.
        """
        question, answer = "[[question]]", "[[answer]]"
        user = self._user([question], [])
        tail = self.render([*self._system(), user]).rpartition(question)[2]
        turn = [*self._system(), user, {"role": "assistant", "content": self.as_content(answer)}]
        _, shown, after = self.render(turn, generation=False).rpartition(answer)
        if not shown:
            raise UserError(f"{self.model_path}: the chat template does not show the assistant's answer")
        if not after.strip():
            following = self.render([*turn, user], generation=False).rpartition(answer)[2].lstrip()
            first = self.tokenizer.encode(following, add_special_tokens=False)[:1]
            if {*first} & {*declared_eos_ids(self.model_path, self.config, self.tokenizer)}:
                after = following.partition(question)[0]
        start = tail.find(THINK)
        return tail[start:] if start >= 0 else "", after

    def _wants_strings(self) -> bool:
        """Tell whether the chat template takes an assistant's and a system's message as a string alone.

        Of a list of parts GLM's prints what Python writes, and Pixtral's fails. Idefics3's drops a string instead.
        """
        if not self.is_vision:
            return True
        said = [{"type": "text", "text": "[[said]]"}]
        turn = [self._user(["[[question]]"], []), {"role": "assistant", "content": said}]
        try:
            return str(said) in self.render(turn, generation=False)
        except UserError:  # a template that fails for every message is refused when it is rendered next
            return True

    def _find_eos(self, turn_tail: str) -> tuple[int, ...]:
        """Return all ids that end a response; the one that the chat template ends a turn with comes first."""
        declared = declared_eos_ids(self.model_path, self.config, self.tokenizer)
        after = self.tokenizer.encode(turn_tail, add_special_tokens=False)
        if not after or after[0] not in {*self._encoder.control_tokens.values(), *declared}:
            raise UserError(
                f"{self.model_path}: the chat template ends an assistant's turn with {turn_tail!r}, which is not a "
                "special token, so a response could not end; use a model with an end-of-turn token"
            )
        return tuple(dict.fromkeys([after[0], *declared]))

    def _find_banned(self) -> tuple[int, ...]:
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        placeholders = {getattr(self.config, name, None) for name in names}
        banned = {*self._encoder.control_tokens.values(), *placeholders} - {None} - set(self.eos_ids)
        return tuple(sorted(i for i in banned if i < self.config.get_text_config().vocab_size))


class PromptCache:
    """The prompts of one training step, each built once. It ends with its step: an epoch's pixels fill the memory."""

    def __init__(self, builder: PromptBuilder, build: Callable[[Problem], Prompt] | None = None) -> None:
        """Begin without a prompt.

        Args:
            builder: the prompt builder of the model.
            build: builds a prompt with it, with what an environment shows first; None: there is no environment.
        """
        self._builder, self._build = builder, builder.build if build is None else build
        self._prompts: dict[str, Prompt] = {}
        self._faults: dict[str, StartError] = {}  # an environment is not asked for a start twice

    def __getitem__(self, problem: Problem) -> Prompt:
        if problem.id in self._faults:
            raise self._faults[problem.id]
        if problem.id not in self._prompts:
            try:
                self._prompts[problem.id] = self._build(problem)
            except StartError as error:
                self._faults[problem.id] = error
                raise
        return self._prompts[problem.id]

    def with_start(self, problem: Problem, start: EpisodeStart | None) -> Prompt:
        """Return the prompt of a problem whose start is known, maybe from another rank."""
        if problem.id not in self._prompts:
            self._prompts[problem.id] = self._builder.build(problem, start=start)
        return self._prompts[problem.id]

    @contextmanager
    def building(self, problems: Iterable[Problem]) -> Iterator[None]:
        """Build these prompts in a thread for the length of a `with` block; what is not begun by then is left out.

        So is a prompt that cannot be built: whoever asks for it gets the UserError.
        """
        is_over = Event()

        def build() -> None:
            for problem in problems:
                if is_over.is_set():
                    return
                with suppress(UserError):
                    self[problem]

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts") as thread:
            built = thread.submit(build)
            try:
                yield
            finally:
                is_over.set()
        built.result()


def rope_positions(model: nn.Module, prompt: Prompt) -> torch.Tensor:
    """Return the positions of a prompt's tokens, int64 [3, P_tokens]: time, height, width (all equal for text).

    With images they come from the model's own `get_rope_index`, if it has one, called for this prompt alone. A
    response continues from `positions.max() + 1`, which is then not the prompt's length.
    """
    ids = torch.from_numpy(prompt.ids.astype(np.int64))
    owner: Any = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
    if not prompt.vision or owner is None or (family := vision_of(owner.config)) is None:
        return torch.arange(len(ids)).expand(3, -1).clone()
    types = family.token_types(owner.config, ids)
    grids = {key: tensor for key, tensor in prompt.vision.items() if not key.startswith("pixel_values")}
    positions, _ = owner.get_rope_index(ids[None], **types, **grids)
    return _past_the_times(positions[:, 0], types["mm_token_type_ids"][0])


def _past_the_times(positions_3T: torch.Tensor, types_T: torch.Tensor) -> torch.Tensor:
    """Return positions where what follows a video begins past its last time, as Qwen2.5-VL was published.

    vLLM numbers them so. transformers 5 begins past a video's height and width, even where its time reaches further.
    """
    moved = positions_3T.clone()
    ends = ((types_T[:-1] == 2) & (types_T[1:] != 2)).nonzero()[:, 0] + 1
    for end in ends.tolist():
        missing = int(moved[:, :end].max()) + 1 - int(moved[:, end].min())
        moved[:, end:] += max(0, missing)
    return moved
