"""Drafts for vLLM: `config` names the options, and `Proposer` is the class that vLLM calls.

vLLM runs the model, verifies one chain of tokens for each row of its batch, and chooses the tokens.
It hands over token ids alone. So tables learn from accepted tokens, not from logits, and a row is
known by its text. Nothing here imports vLLM or torch.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.cache import Remembered, load_cache
from selfspec.cache.persistent import new_memory
from selfspec.config import SpecConfig
from selfspec.draft.memory import Memory
from selfspec.draft.tree import TreeGrower
from selfspec.engines.answers import AnswersSource
from selfspec.errors import ConfigError, unknown_name
from selfspec.records import DraftTree, StepRecord

__all__ = ["Proposer", "config"]

_SOURCES = ("lut", "lut2", "context", "corpus")  # The runners-up would need logits.
_OPTIONS = ("cache", "least_chance", "remember")
_LEAST_CHANCE = 0.05
_TOP_K = 4  # More hardly ever win the one place that a chain has, and take time in every step.
# A row is known by its length and by this many tokens at the end of its text.
_TAIL = 64
# Rows that left the batch are kept in case they come back: vLLM does not say whether they ended.
_MAX_ABSENT, _MAX_ABSENT_TOKENS = 64, 1 << 19

_SAVE_SECONDS = 20.0

Ids = NDArray[np.int32]


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
    {'selfspec': {'remember': 'learned', 'least_chance': 0.05}}
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
    """Keeps a session for each row of vLLM's batch, and drafts for it.

    vLLM makes one in each process that holds the last layers. All of a tensor-parallel group see
    the same tokens and so propose the same drafts; the first of them saves what was learned.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = _checked(vllm_config.additional_config.get("selfspec", {}))
        self._num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._max_length = vllm_config.model_config.max_model_len
        self._least_chance = float(options.get("least_chance", _LEAST_CHANCE))
        self._config = SpecConfig(
            sources=_SOURCES,
            budget="fixed",
            max_depth=self._num_tokens,
            max_nodes=1 + self._num_tokens,
            top_k=_TOP_K,
        )
        self._remembered: Remembered | None = None
        self._news = threading.Event()  # Something was learned since the last save.
        self._memory = self._opened(vllm_config, options)
        self._present: dict[int, _Session] = {}  # By row, as they were in the last step.
        self._absent: list[_Session] = []  # Those that left last are at the end.

    def load_model(self, model: Any) -> None:
        """vLLM hands over its model, which drafts do not need."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: Ids,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain of drafts for each row; none for a row whose prompt is still being read.

        `token_ids_cpu` (rows, length) holds each row's prompt and all that it committed, up to
        `num_tokens_no_spec`, the tokens in `sampled_token_ids` included.
        """
        rows = [row for row, new_ids in enumerate(sampled_token_ids) if new_ids]
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        before = {row: lengths[row] - len(sampled_token_ids[row]) for row in rows}
        sessions = self._found(before, token_ids_cpu)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row in rows:
            sessions[row].observe(token_ids_cpu[row], lengths[row])
        self._teach([sessions[row] for row in rows])
        for row in rows:
            max_depth = min(self._num_tokens, self._max_length - lengths[row] - 1)
            drafts[row] = sessions[row].draft(max_depth, self._pays)
        self._news.set()
        return drafts

    def _pays(self, _tree: DraftTree, score: float) -> bool:
        return score >= self._least_chance

    def _found(self, before: Mapping[int, int], token_ids: Ids) -> dict[int, _Session]:
        """The session of each row: where it was, elsewhere, or a new one. The others are absent."""
        found, others = {}, dict(self._present)
        for row, length in before.items():
            if row in others and others[row].is_of(token_ids[row], length):
                found[row] = others.pop(row)
        self._absent += others.values()
        for row, length in before.items():
            if row not in found:
                found[row] = self._moved(token_ids[row], length)
        self._absent = self._absent[-_MAX_ABSENT:]
        while sum(session.length for session in self._absent) > _MAX_ABSENT_TOKENS:
            del self._absent[0]
        self._present = found
        return found

    def _moved(self, token_ids: Ids, length: int) -> _Session:
        for session in self._absent:
            if session.is_of(token_ids, length):
                self._absent.remove(session)
                return session
        return _Session(token_ids[:length], self._memory, self._config)

    def _teach(self, sessions: list[_Session]) -> None:
        """Shows the tables which token came behind each two."""
        triples = [triple for session in sessions for triple in session.news]
        if triples:
            text = np.array(triples, np.int64)
            for source in self._memory.sources:
                source.observe_text(text[:, :2], text[:, 2])

    def _opened(self, vllm_config: Any, options: Mapping[str, Any]) -> Memory:
        """The memory, with what the cache holds and what is remembered."""
        model = vllm_config.model_config
        cache, remember = options.get("cache"), options.get("remember")
        tokenizer = None if cache is None and remember is None else _tokenizer(model)
        loaded = None if cache is None else load_cache(cache, tokenizer=tokenizer)
        if remember is not None:
            parallel = vllm_config.parallel_config
            saves = parallel.rank % parallel.tensor_parallel_size == 0
            self._remembered = Remembered(remember, tokenizer, saves=saves)
            ended = threading.Event()
            saving = (self._remembered, self._news, ended)
            threading.Thread(target=_keep_saving, args=saving, daemon=True).start()
            # Unlike those of `atexit`, these run at the end of processes that vLLM starts, too.
            Finalize(self, _end_saving, args=(self._remembered, ended), exitpriority=1)
        return new_memory(
            self._config, loaded, self._remembered, (AnswersSource(),), model.get_vocab_size()
        )


def _keep_saving(remembered: Remembered, news: threading.Event, ended: threading.Event) -> None:
    """Saves every now and then, beside vLLM's steps: a server kills its workers without notice."""
    while not ended.wait(_SAVE_SECONDS):
        if news.is_set():
            news.clear()
            remembered.end()


def _end_saving(remembered: Remembered, ended: threading.Event) -> None:
    ended.set()
    remembered.end()


class _Session:
    """One row: its sources behind the end of its text, and the tree that it drafted last."""

    def __init__(self, token_ids: Ids, memory: Memory, config: SpecConfig) -> None:
        ids = token_ids.tolist()
        self.length = len(ids)
        self._tail = token_ids[-_TAIL:].tobytes()
        self._end = (-1, -1, *ids[-2:])[-2:]
        self._calibration = memory.calibration
        self._cursors = [source.open(ids, learns=False) for source in memory.sources]
        self._grower = TreeGrower(self._cursors, config, memory.calibration.probability)
        self._max_nodes = config.max_nodes
        self._tree = DraftTree.of_root(self._end[-1])
        self.news: list[tuple[int, ...]] = []  # Each new token behind the two before it.

    def is_of(self, token_ids: Ids, length: int) -> bool:
        """Is this text, up to `length`, the session's?

        One that is longer may be the next prompt of a conversation, which is no answer.
        """
        start = max(length - _TAIL, 0)
        return length == self.length and token_ids[start:length].tobytes() == self._tail

    def observe(self, token_ids: Ids, length: int) -> None:
        """Moves behind the tokens up to `length`; the sources and the calibration learn them."""
        new_ids = token_ids[self.length : length].tolist()
        path = self._tree.path_of(new_ids)
        record = StepRecord(row=0, tree=self._tree, path=path, committed_ids=new_ids)
        self._calibration.observe(record)
        for cursor in self._cursors:
            cursor.observe(record)
        text = [*self._end, *new_ids]
        self.news = list(zip(text, text[1:], new_ids, strict=False))
        self._end = tuple(text[-2:])
        self.length = length
        self._tail = token_ids[max(length - _TAIL, 0) : length].tobytes()

    def draft(self, max_depth: int, pays: Any) -> list[int]:
        """The best chain of a newly grown tree."""
        self._tree = self._grower.grow(self._end[-1], self._max_nodes, max_depth, pays)
        return _best_chain(self._tree)


def _best_chain(tree: DraftTree) -> list[int]:
    """The path with the most tokens to expect, from the root to a leaf."""
    tokens = [0.0, *tree.scores[1:]]  # What each node's path brings.
    for node in range(1, len(tree)):
        tokens[node] += tokens[tree.parents[node]]
    node, chain = max(range(len(tree)), key=tokens.__getitem__), []
    while node:
        chain.append(tree.tokens[node])
        node = tree.parents[node]
    return chain[::-1]


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
