"""Drafts for vLLM: `config` names the options, and `Proposer` is the class that vLLM calls.

vLLM runs the model, verifies one chain of tokens for each row of its batch, and chooses the tokens.
It hands over token ids alone. So tables learn from accepted tokens, not from logits, and a row is
known by its text. Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfspec.cache import Remembered, load_cache
from selfspec.cache.contents import KEY_OF
from selfspec.cache.knowledge import Knowledge
from selfspec.config import SpecConfig
from selfspec.engines.answers import Answers
from selfspec.engines.chains import LONGEST, NUM_LENGTHS, Chains, windows
from selfspec.errors import ConfigError, unknown_name

_SOURCES = ("lut", "lut2", "corpus")  # What a cache keeps.
_OPTIONS = ("cache", "least_chance", "remember")
_LEAST_CHANCE = 0.02
# A row is recognised by its length and its last 32 tokens.
_TAIL = 32
_TAIL_WEIGHTS = np.random.default_rng(2).integers(1, 1 << 62, _TAIL)
# The last 4,096 rows are known, also those that left the batch: vLLM does not say which ended.
_MAX_SESSIONS = 4096

_SAVE_SECONDS = 20.0
_LESSON = 64  # Tokens that tables learn at once; of a pair that comes twice, one counts.

Ids = NDArray[np.int64]


def config(
    *,
    cache: str | None = None,
    remember: str | None = None,
    tokens: int = 8,
    least_chance: float = _LEAST_CHANCE,
) -> dict[str, Any]:
    """The arguments that make vLLM draft with selfspec: ``LLM("your/model", **config())``.

    Args:
        cache: A cache that `selfspec cache build` or `save_pretrained` wrote, or a Hub id.
        remember: A file to keep in what is learned, as of `SelfSpec`; both may share one.
        tokens: The longest draft.
        least_chance: A draft ends before the token that is accepted less often than this.

    >>> config(remember="learned")["additional_config"]
    {'selfspec': {'remember': 'learned', 'least_chance': 0.02}}
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tokens must be a whole number >= 1 (got {tokens!r})")
    options = {"cache": cache, "remember": remember, "least_chance": least_chance}
    options = {name: value for name, value in options.items() if value is not None}
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": f"{__name__}.{Proposer.__name__}",
            "num_speculative_tokens": tokens,
        },
        "additional_config": {"selfspec": _checked(options)},
    }


class Proposer:
    """Knows the rows of vLLM's batch by their texts, and drafts for them.

    vLLM makes one in each process that holds the last layers. All of a tensor-parallel group see
    the same tokens and so propose the same drafts; the first of them saves what was learned.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = _checked(vllm_config.additional_config.get("selfspec", {}))
        self._num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._max_length = vllm_config.model_config.max_model_len
        self._memory = memory = VllmMemory(vllm_config, options)
        least_chance = float(options.get("least_chance", _LEAST_CHANCE))
        self._chains = memory.chains(self._num_tokens, least_chance)
        if "remember" in options:
            threading.Thread(target=memory.keep_saving, daemon=True).start()
            # `atexit` does not run at the end of processes that vLLM starts; this does.
            Finalize(self, memory.end, exitpriority=1)
        # By the name of a text. Several rows may have the same text.
        self._sessions: dict[int, list[_Session]] = {}
        self._num_rows = self._num_steps = 0

    def load_model(self, model: Any) -> None:
        """vLLM hands over its model, which drafts do not need."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain of drafts for each row; none for a row whose prompt is still being read.

        `token_ids_cpu` (rows, length) holds each row's prompt and all that it committed, up to
        `num_tokens_no_spec`, the tokens in `sampled_token_ids` included.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        num_new = np.array([len(new_ids) for new_ids in sampled_token_ids], np.int64)
        rows = np.flatnonzero(num_new)
        if not len(rows):
            return drafts
        ends = num_tokens_no_spec[rows].astype(np.int64)
        step = _Step(token_ids_cpu, rows, ends, num_new[rows])
        serials, places = self._found(step)
        self._observe(step, serials, places)
        before = windows(token_ids_cpu, rows, ends, _TAIL)
        self._keep(before, ends, serials)
        limits = np.minimum(self._num_tokens, self._max_length - ends - 1)
        chains = self._chains.draft(before[:, :LONGEST], serials, limits)
        for row, chain in zip(rows.tolist(), chains, strict=True):
            drafts[row] = chain
        return drafts

    def _found(self, step: _Step) -> tuple[Ids, Ids]:
        """The serial number of each row, and its place in the last step, or -1.

        A text that is longer than when it was last seen may be the next prompt of a conversation,
        which is no answer. So it counts as a new one, and is read.
        """
        ends = step.ends - step.num_new
        names = _names(windows(step.token_ids, step.rows, ends, _TAIL), ends)
        found = []
        for row, end, name in zip(step.rows.tolist(), ends.tolist(), names, strict=True):
            sessions = self._sessions.get(name)
            if sessions is None:
                self._num_rows += 1
                self._chains.read(step.token_ids[row, :end].astype(np.int64), self._num_rows)
                found.append((self._num_rows, -1))
                continue
            session = sessions.pop()
            if not sessions:
                del self._sessions[name]
            was_last = session.step == self._num_steps
            found.append((session.serial, session.place if was_last else -1))
        serials, places = np.array(found, np.int64).T
        return serials, places

    def _observe(self, step: _Step, serials: Ids, places: Ids) -> None:
        of = np.repeat(np.arange(len(step.rows)), step.num_new)
        depths = np.arange(len(of)) - (np.cumsum(step.num_new) - step.num_new)[of]
        rows, ends = step.rows[of], (step.ends - step.num_new)[of] + depths
        tokens = step.token_ids[rows, ends].astype(np.int64)
        before = windows(step.token_ids, rows, ends, LONGEST)
        self._chains.count(places[of], depths, tokens)
        self._chains.observe(before, tokens, serials[of])
        text = np.stack([before[:, 1], before[:, 0], tokens], axis=1)
        self._memory.append(serials[of], text)

    def _keep(self, before: Ids, ends: Ids, serials: Ids) -> None:
        """Keeps the name by which each row will be found in the next step."""
        self._num_steps += 1
        names = _names(before, ends)
        for place, (name, serial) in enumerate(zip(names, serials.tolist(), strict=True)):
            session = _Session(serial, self._num_steps, place)
            self._sessions.setdefault(name, []).append(session)
        while len(self._sessions) > _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]


class _Step(NamedTuple):
    token_ids: NDArray[np.int32]
    rows: Ids
    ends: Ids
    num_new: Ids


class _Session(NamedTuple):
    """A row: its number, the step that it was last in, and its place among that step's rows."""

    serial: int
    step: int
    place: int


def _names(before: Ids, ends: Ids) -> list[int]:
    """The name of each text: a number made of its last tokens and its length."""
    names: list[int] = (before @ _TAIL_WEIGHTS + ends).tolist()
    return names


class VllmMemory:
    """What a cache and a memory file hold, and what is to be saved in the latter."""

    def __init__(self, vllm_config: Any, options: Mapping[str, Any]) -> None:
        model = vllm_config.model_config
        cache, remember = options.get("cache"), options.get("remember")
        tokenizer = None if cache is None and remember is None else _tokenizer(model)
        loaded = None if cache is None else load_cache(cache, tokenizer=tokenizer)
        self._remembered: Remembered | None = None
        if remember is not None:
            parallel = vllm_config.parallel_config
            saves = parallel.rank % parallel.tensor_parallel_size == 0
            self._remembered = Remembered(remember, tokenizer, saves=saves)
        self._answers = Answers()
        self._vocab_size = model.get_vocab_size()
        self._learned = Knowledge(
            SpecConfig(sources=_SOURCES),
            loaded=loaded,
            remembered=self._remembered,
            extra_sources=(self._answers,),
        ).learned(self._vocab_size)
        self._corpus = None if loaded is None else loaded.corpus
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def chains(self, max_tokens: int, least_chance: float) -> Chains:
        """Chains that have read the cache and the memory file, the answers in the latter last."""
        answers, tables = self._answers.kept, self._learned.tables()
        num_known = 0 if self._corpus is None else self._corpus.num_prefixes
        num_known += sum(len(table["ids"]) for table in tables.values() if "ids" in table)
        num_known += NUM_LENGTHS * len(answers)
        chains = Chains(max_tokens, least_chance, self._vocab_size, num_known)
        if self._corpus is not None:
            chains.read_corpus(self._corpus)
        for name, key in KEY_OF.items():
            table = tables[name]
            keys = table[key].astype(np.int64)
            keys = keys if keys.ndim == 2 else keys[:, None]
            chains.read_table(keys, table["ids"][:, 0], table["probabilities"][:, 0])
        for answer in np.split(answers.astype(np.int64), np.flatnonzero(answers < 0) + 1):
            chains.read(answer[:-1])
        return chains

    def append(self, serials: Ids, text: Ids) -> None:
        """Keeps new tokens for the next save, each after the two before it."""
        if self._remembered is not None:
            self._answers.append(serials, text)

    def save(self) -> None:
        """Saves what was learned since; the tables of `generate()` learn it here."""
        with self._lock:
            text = self._answers.taken()
            if self._remembered is None or not len(text):
                return
            for start in range(0, len(text), _LESSON):
                part = text[start : start + _LESSON]
                for source in self._learned.sources:
                    source.observe_text(part[:, :2], part[:, 2])
            self._remembered.end()

    def keep_saving(self) -> None:
        """Saves every now and then: a server kills its workers without notice."""
        while not self._ended.wait(_SAVE_SECONDS):
            self.save()

    def end(self) -> None:
        self._ended.set()
        self.save()


def _checked(options: Any) -> dict[str, Any]:
    """The options, if they are such; vLLM passes on whatever it was given."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"the options of selfspec must be a table (got {options!r:.80})")
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(unknown_name("option of selfspec", name, _OPTIONS))
    least = options.get("least_chance", _LEAST_CHANCE)
    if isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least < 1:
        raise ConfigError(f"least_chance must be in [0, 1) (got {least!r})")
    return dict(options)


def _tokenizer(model: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer,
        revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )
