"""The parts that plug into lm-evaluation-harness: MGSM tasks with our filter, and a model with progress.

Processes share whole batches. Padding, and with it every bit of an answer, is therefore the same for any number of
processes. A PeftModel is a model like any other. Importing this module imports the harness, and with it torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from lm_eval.api.filter import Filter
from lm_eval.api.metrics import exact_match_fn
from lm_eval.api.task import ConfigurableTask
from lm_eval.filters import build_filter_ensemble
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from adapterswap.core import ModelConfig
from adapterswap.engines.live import Reading
from adapterswap.experiments.evaluation.answers import extract_answer
from adapterswap.experiments.evaluation.choices import SharedContexts, answer_shared, shared_contexts
from adapterswap.experiments.evaluation.documents import check_prompt
from adapterswap.experiments.evaluation.mgsm import mgsm_task
from adapterswap.experiments.evaluation.outputs import OutputReader
from adapterswap.experiments.evaluation.prompts import Vocabulary, chat_prompts
from adapterswap.experiments.evaluation.settings import Settings
from adapterswap.kit.errors import ArgumentError, BaseModelError, DataError, RunError, reason_of
from adapterswap.kit.processes import Processes


def request_key(prompt: str, rest: dict[str, Any] | str) -> str:
    """A key for a prompt with its generation settings or its continuation: equal keys mean equal outputs."""
    return json.dumps([prompt, rest], sort_keys=True)


def in_batches(
    requests: Sequence[Any],
    size: int,
    measured: Callable[[list[str]], Sequence[int]],
    alone: Callable[[Any], bool] = lambda request: False,
) -> list[list[int]]:
    """The indices of the requests, in batches of texts of about equal length, the longest first.

    Requests with the same text stay together, because a model may read it once for all of them: the choices of a
    question, or several samples of one prompt. A batch has one set of generation settings.

    Args:
        requests: the harness's instances of one kind: a prompt with settings, a context with a continuation, or a text.
        size: texts in a batch, at most.
        measured: returns the lengths of texts in tokens.
        alone: whether a request must have a batch of its own.
    """
    # Generation settings → text → the places of its requests; and the longest text that a request of it reads.
    kinds: dict[str, dict[str, list[int]]] = {}
    longest: dict[tuple[str, str], str] = {}
    batches: list[list[int]] = []
    for place, request in enumerate(requests):
        if alone(request):
            batches.append([place])
            continue
        text, *more = request.args
        kind = ""
        full_text = text
        if more and isinstance(more[0], dict):
            kind = request_key("", more[0])
        else:
            full_text = "".join(request.args)
            text = text or full_text  # a continuation without a context is a text of its own
        kinds.setdefault(kind, {}).setdefault(text, []).append(place)
        longest[kind, text] = max(longest.get((kind, text), ""), full_text, key=len)

    lengths = dict(zip(longest, measured(list(longest.values())), strict=True))
    for kind, places in kinds.items():
        texts = sorted(places, key=lambda text: (-lengths[kind, text], text))
        for begin in range(0, len(texts), size):
            batch = []
            for text in texts[begin : begin + size]:
                batch += places[text]
            batches.append(batch)
    return batches


def seed_of(seed: int, batch: int) -> int:
    """The seed for sampling a batch, from 0 to 2⁶⁴ - 1, unrelated to those of other batches and seeds."""
    import numpy

    return int(numpy.random.SeedSequence((seed, batch)).generate_state(1, numpy.uint64)[0])


NO_LIMIT = 2**31 - 1
"""The longest prompt of models without a limit, such as recurrent ones."""


class CutOutput(str):
    """An output that ended at the limit of tokens."""


_FLEXIBLE = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"  # the stock flexible-extract filter, and its last match


class NormalizedFilter(Filter):  # type: ignore[misc]
    """Reads the answer of an output as an exact number, or None: see `extract_answer`."""

    def __init__(self, language: str) -> None:
        self._language = language

    def apply(self, resps: Sequence[Sequence[str]], docs: Sequence[Any]) -> list[Decimal | None]:
        """Reads the first response to each document."""
        return [extract_answer(responses[0], self._language) for responses in resps]


class OfflineTask(ConfigurableTask):  # type: ignore[misc]
    """A harness task over rows in memory, by split."""

    def __init__(self, splits: Mapping[str, list[dict[str, Any]]], config: dict[str, Any]) -> None:
        self._splits = splits
        super().__init__(config=config)

    def download(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is downloaded."""
        self.dataset = {name: Dataset.from_list(rows) for name, rows in self._splits.items()}


def build_mgsm_task(name: str, folder: Path | None = None) -> ConfigurableTask:
    """The task of MGSM or a variant, with eight fixed shots by default; for the arguments see `mgsm_task`.

    Its filters are the stock ones (`strict-match` or `remove_whitespace`, and `flexible-extract`) and `normalized`.
    Each is scored as exact_match: the stock ones as text without case and punctuation, as the harness does; ours as a
    number.
    """
    spec = mgsm_task(name, folder)
    rows = [{"question": question, "answer": str(number)} for question, number in spec.language.questions]
    shots = [{"question": question, "answer": answer} for question, answer in spec.shots()]

    first = {"function": "take_first"}
    if spec.strict_pattern is None:  # direct tasks compare the whole output
        stock = {"name": "remove_whitespace", "filter": [{"function": "remove_whitespace"}, first]}
    else:
        strict = {"function": "regex", "regex_pattern": spec.strict_pattern}
        stock = {"name": "strict-match", "filter": [strict, first]}
    flexible = {"function": "regex", "regex_pattern": _FLEXIBLE, "group_select": -1}

    return OfflineTask(
        {"test": rows},
        {
            "task": name,
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": lambda doc: spec.prompt(doc["question"]),
            "doc_to_target": lambda doc: doc["answer"],
            "target_delimiter": spec.answer_space,
            "fewshot_config": {"sampler": "first_n", "samples": shots},
            "num_fewshot": 8,
            "generation_kwargs": {
                "until": [spec.language.question_word, "</s>", "<|im_end|>"],
                "do_sample": False,
            },
            "filter_list": [
                stock,
                {"name": "flexible-extract", "filter": [flexible, first]},
                _normalized(spec.solutions_from.code),
            ],
            "process_results": _score,
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": "1.2"},  # 1.1 took another number if it could not read the answer
        },
    )


def add_normalized(task: ConfigurableTask, language: str) -> None:
    """Score a task of the harness's own by `normalized` too, besides its own filters, which stay as they are."""
    for number, row in enumerate(task.eval_docs):  # raises before the model is asked
        _gold(task, number, row["answer_number"])
    stock = task.process_results

    def scored(doc: dict[str, Any], results: list[str | Decimal | None]) -> dict[str, float]:
        (answer,) = results
        if isinstance(answer, str):
            return dict(stock(doc, results))
        return {"exact_match": float(answer == _gold(task, 0, doc["answer_number"]))}

    task.set_config("filter_list", [*task.config.filter_list, _normalized(language)])
    task._filters.append(build_filter_ensemble("normalized", [(NormalizedFilter, {"language": language})]))
    task.process_results = scored


def _normalized(language: str) -> dict[str, Any]:
    """Our filter, as a task's config has it."""
    return {"name": "normalized", "filter": [{"function": NormalizedFilter, "language": language}]}


def _gold(task: ConfigurableTask, number: int, text: Any) -> Decimal:
    """AfriMGSM has its answers as text."""
    plain = str(text).strip().replace(",", "")
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", plain):
        raise DataError(
            f"{task.task_name}: the answer_number of document {number} is {text!r}, which is not a number",
            "Correct the data, or download it again",
            parameter="tasks",
        )
    return Decimal(plain)


def _score(doc: dict[str, str], results: list[str | Decimal | None]) -> dict[str, float]:
    """exact_match of what a filter read: a text of the stock filters, a number or None of ours."""
    (answer,) = results
    if isinstance(answer, str):
        score = exact_match_fn(
            references=[doc["answer"]], predictions=[answer], ignore_case=True, ignore_punctuation=True
        )
        return {"exact_match": float(score["exact_match"])}
    return {"exact_match": float(answer == Decimal(doc["answer"]))}


def output_limit(gen_kwargs: Mapping[str, Any] | None, default: int) -> int:
    """The longest output in tokens: the task's own limit, under any of the harness's names for it, or the default."""
    return int(normalize_gen_kwargs(dict(gen_kwargs or {}), default)["max_gen_toks"])


def ends_of(generation_config: Any) -> tuple[int, ...]:
    """The ids of the tokens that end an output: a config has one of them, several or none."""
    ends = generation_config.eos_token_id
    if isinstance(ends, int):
        return (ends,)
    return tuple(ends or ())


class EvaluatedModel(HFLM):  # type: ignore[misc]
    """A loaded model for the harness: without bars, and with a record of cut outputs and truncated prompts.

    If the harness divided documents among processes, shots and padding would change. So each process builds all
    requests, answers its share of the batches, and receives the answers of the others. Outputs that ended at the limit
    of tokens are of the class `CutOutput`.

    Attributes:
        truncated: keys of the requests whose prompt loses its beginning.
        alone: kinds of requests that are answered one by one, because padding would change their answers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        settings: Settings,
        batch_size: int,
        processes: Processes,
        check: Callable[[], None],
        on_begin: Callable[[], None] | None,
        on_progress: Callable[[], None] | None,
    ) -> None:
        self._answers_in_batch: list[str] = []  # in the harness's order

        # A loaded model is tied already. If adapters wrap tied embeddings, tying again raises or removes them.
        model.tie_weights = lambda *_, **__: None
        try:
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=batch_size,
                backend="causal",
                think_end_token=settings.think_end_token,
                softmax_dtype="float32",
            )
        finally:
            del model.tie_weights

        # A chat template writes the special tokens itself, as in training and in transformers.
        self.add_bos_token: bool | None = None
        if settings.apply_chat_template:
            self.add_bos_token = False
        self._as_chat = chat_prompts(tokenizer, settings)
        self._may_reason = settings.enable_thinking is not False

        self._max_gen_toks = settings.max_gen_toks
        self._truncate = settings.truncate
        self._seed = settings.seed
        self._requested_length = settings.max_length
        self._requested_size = batch_size
        self._lengths = ModelConfig(self.config.get_text_config().to_dict()).lengths
        self._vocabulary = Vocabulary(self.config, tokenizer)
        self._reader = OutputReader(tokenizer, self.think_end_token)

        self._processes = processes
        self._check = lru_cache(maxsize=1)(check)  # once for all kinds of requests
        self._on_begin, self._on_progress = on_begin, on_progress
        self.set_cache_hook(self)

        # What happened: `_cut_in_batch` is in the harness's order; of equal requests in `_cut_of`, so are the flags.
        self._cut_in_batch: list[bool] = []
        self._cut_of: dict[str, list[bool]] = {}
        self.truncated: set[str] = set()
        self.alone: set[str] = set()

    @property
    def max_gen_toks(self) -> int:
        """The limit for tasks without one (the harness's default of 256 is too short for Telugu and Bengali)."""
        return self._max_gen_toks

    @cached_property
    def max_length(self) -> int:
        """The most tokens of a prompt with its answer."""
        positions = self._positions()
        if self._requested_length is None:
            return min(length for length in (self._lengths.longest, positions, NO_LIMIT) if length is not None)
        if positions is not None and self._requested_length > positions:
            raise ArgumentError(
                f"`max_length` is {self._requested_length}, but the model has learned only {positions} positions",
                f"Pass {positions} or less",
                parameter="max_length",
            )
        return self._requested_length

    def _positions(self) -> int | None:
        """How many positions the model has learned, if it has a table of them."""
        return Reading.of(self.model).positions

    def _check_causal(self) -> None:
        """Refuse a model that sees what it is to predict."""
        if not Reading.of(self.model).causal:
            raise BaseModelError(
                f"The base model, a {self.config.model_type}, reads texts in both directions: it sees what it is to "
                "predict, so its likelihoods say nothing",
                "Use a base that reads from left to right; for some types, config.json needs is_decoder: true",
                parameter="base_model",
            )

    def _choose_size(self, kind: str, side: Literal["left", "right"]) -> None:
        """Answer requests of a kind one by one, if rows that are padded on this side would be answered differently."""
        alike = self._processes.from_main(getattr(Reading.of(self.model), side))
        self.batch_size_per_gpu = self._requested_size if alike else 1
        if self.batch_size < self._requested_size:
            self.alone.add(kind)

    def add_partial(self, method: str, request: Any, response: Any) -> None:
        """Called by the harness after each finished request, in the order of the batch (its hook for caches)."""
        if method == "generate_until":
            self._cut_of.setdefault(request_key(*request), []).append(self._cut_in_batch.pop(0))
        if self._on_progress is not None:
            self._on_progress()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """See the harness. Prompts that do not fit are refused, or counted if truncation is allowed."""
        self._check()
        prompts = dict.fromkeys(request.args[0] for request in requests)
        lengths = dict(zip(prompts, self._measured(list(prompts)), strict=True))
        for request in requests:
            prompt, gen_kwargs = request.args
            check_prompt(request.task_name, request.doc_id, lengths[prompt])
            budget = output_limit(gen_kwargs, self.max_gen_toks)
            if lengths[prompt] + budget <= self.max_length:
                continue
            self.truncated.add(request_key(prompt, gen_kwargs))
            if not self._truncate or budget >= self.max_length:
                raise ArgumentError(
                    f"{request.task_name}: a prompt of {lengths[prompt]} tokens and an output of up to {budget} do not "
                    f"fit in the model's context of {self.max_length} tokens",
                    "Lower `num_fewshot` or `max_gen_toks`, pass `truncate=True` to cut the start of long prompts, or "
                    "pass `max_length` if the model reads more",
                    parameter="max_gen_toks",
                )

        def changes_others(request: Any) -> bool:
            prompt, gen_kwargs = request.args
            return self._changes_others(lengths[prompt] + output_limit(gen_kwargs, self.max_gen_toks))

        self._choose_size("generate_until", "left")
        batches = in_batches(
            requests, self.batch_size, lambda texts: [lengths[text] for text in texts], alone=changes_others
        )
        return self._answers(requests, batches, super().generate_until)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """See the harness. Contexts that do not fit are refused, or counted if truncation is allowed."""
        self._check()
        pairs = list(dict.fromkeys(request.args for request in requests))
        lengths = dict(zip(pairs, self._processes.shared(pairs, self._length), strict=True))
        for request in requests:
            length = lengths[request.args]
            if length <= self.max_length + 1:  # the last token is only predicted
                continue
            self.truncated.add(request_key(*request.args))
            if not self._truncate:
                raise ArgumentError(
                    f"{request.task_name}: a prompt and its continuation have {length} tokens, and do not fit in the "
                    f"model's context of {self.max_length} tokens",
                    "Lower `num_fewshot`, pass `truncate=True` to cut the start of long prompts, or pass `max_length` "
                    "if the model reads more",
                    parameter="num_fewshot",
                )
        by_text = {"".join(pair): length for pair, length in lengths.items()}

        self._check_causal()
        self._choose_size("loglikelihood", "right")
        batches = in_batches(
            requests,
            self.batch_size,
            lambda texts: [by_text[text] for text in texts],
            alone=lambda request: self._changes_others(lengths[request.args]),
        )
        return self._answers(requests, batches, super().loglikelihood)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See the harness, which leaves out a system turn that the template refuses; here that is an error."""
        return self._as_chat(chat_history, add_generation_prompt)

    def tok_encode(self, string: str, *args: Any, **options: Any) -> list[int]:
        """See the harness. Tokens without a row in the embedding are refused."""
        ids: list[int] = super().tok_encode(string, *args, **options)
        self._vocabulary.check(ids)
        return ids

    def _length(self, pair: tuple[str, str]) -> int:
        """The tokens of a context and its continuation, as the harness scores them."""
        context, continuation = pair
        if context:
            return len(self.tok_encode(context + continuation))
        return 1 + len(self.tok_encode(continuation, add_special_tokens=False))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> Any:
        """See the harness. These texts are no conversations, so they get their special tokens."""
        self._check()
        before = self.add_bos_token
        self.add_bos_token = None
        self._check_causal()
        self._choose_size("loglikelihood_rolling", "right")

        texts = [request.args[0] for request in requests]
        lengths = dict(zip(texts, self._measured(texts), strict=True))
        batches = in_batches(
            requests,
            self.batch_size,
            lambda texts: [lengths[text] for text in texts],
            alone=lambda request: self._changes_others(lengths[request.args[0]] + 1),
        )
        try:
            return self._answers(requests, batches, super().loglikelihood_rolling)
        finally:
            self.add_bos_token = before

    def _changes_others(self, length: int) -> bool:
        """Whether a text is so long that rotary embeddings get other frequencies, for its whole batch."""
        return self._lengths.alike is not None and length > self._lengths.alike

    def _measured(self, texts: list[str]) -> list[int]:
        return self._processes.shared(texts, lambda text: len(self.tok_encode(text)))

    def _answers(self, requests: list[Any], batches: list[list[int]], answer: Callable[..., list[Any]]) -> list[Any]:
        """The answers to all requests, in their order, from all processes."""
        size = self.batch_size

        def answer_batch(number: int) -> list[Any]:
            torch.manual_seed(seed_of(self._seed, number))  # sampling does not depend on earlier batches
            self._cut_of, self._answers_in_batch = {}, []
            self.batch_size_per_gpu = size
            batch = [requests[place] for place in batches[number]]
            if self._lengths.alike is not None:
                Reading.of(self.model).forget()
                if len(batch) == 1:  # of a long text, the last window is shorter than the others
                    self.batch_size_per_gpu = 1
            with self._explained_lengths():
                outputs = answer(batch, disable_tqdm=True)

            # Mark the outputs that ended at the limit of tokens.
            if self._cut_of:
                for place, request in enumerate(batch):
                    if self._cut_of[request_key(*request.args)].pop(0):
                        outputs[place] = CutOutput(outputs[place])
            return outputs

        if self._on_begin is not None:
            self._on_begin()
        by_batch = self._processes.shared(range(len(batches)), answer_batch)
        answers: dict[int, Any] = {}
        for batch, batch_answers in zip(batches, by_batch, strict=True):
            answers |= zip(batch, batch_answers, strict=True)
        return [answers[place] for place in range(len(requests))]

    @contextmanager
    def _explained_lengths(self) -> Iterator[None]:
        """Name the length that the user chose, if the model cannot read as much."""
        stated = self._lengths.longest
        try:
            yield
        except (IndexError, RuntimeError) as error:
            beyond = stated is not None and self.max_length > stated
            if not beyond or isinstance(error, torch.OutOfMemoryError):
                raise
            raise RunError(
                f"The model cannot read up to `max_length`, {self.max_length} tokens: {reason_of(error)}",
                f"Pass a lower one; its config states {stated}",
                parameter="max_length",
            ) from error

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None) -> Any:
        """See the harness. On a CPU, a context with several continuations is read once."""
        answers: dict[int, tuple[float, bool]] = {}

        def on_answer(index: int, answer: tuple[float, bool]) -> None:
            answers[index] = answer
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)

        if self.device.type == "cpu" and Reading.of(self.model).right:
            pairs = [(tuple(context), tuple(continuation)) for _, context, continuation in requests]
            longest = self._lengths.alike
            if longest is None:
                longest = self.max_length + 1
            shared = shared_contexts(pairs, longest)
            if shared:
                with torch.no_grad():
                    answer_shared(SharedContexts(self.model), pairs, shared, size=self.batch_size, on_answer=on_answer)

        others = [index for index in range(len(requests)) if index not in answers]
        if others:
            # Rolling likelihoods would show a bar despite the settings.
            rest = super()._loglikelihood_tokens(
                [requests[index] for index in others], disable_tqdm=True, override_bs=override_bs
            )
            answers |= zip(others, rest, strict=True)
        return [answers[index] for index in range(len(requests))]

    def _tokens(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """The context and what follows it."""
        return super()._model_generate(context, max_length=max_length, stop=stop, **kwargs)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """See the harness. A text that ends the answer does not end the reasoning before it."""
        thinks = self.think_end_token is not None
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        tokens = self._tokens(context, max_length, [eos] if thinks else stop, **kwargs)
        ends = set(ends_of(self.model.generation_config))

        for prompt, output in zip(context.tolist(), tokens[:, context.shape[1] :].tolist(), strict=True):
            reasons = self._may_reason and self._reader.reasons_after(prompt)
            is_ended = not ends.isdisjoint(output) or self._reader.is_stopped(output, stop, reasons=reasons)
            self._cut_in_batch.append(len(output) >= max_length - context.shape[1] and not is_ended)
            self._answers_in_batch.append(self._reader.answer(output, stop, reasons=reasons))
        return tokens

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """See the harness, which decodes the outputs of a batch in their order: these have been read already."""
        if skip_special_tokens and self._answers_in_batch:
            return self._answers_in_batch.pop(0)
        return str(super().tok_decode(tokens, skip_special_tokens=skip_special_tokens))
