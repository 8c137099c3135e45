"""Self-Draft: branches of guesses that the model answers next to its own text.

"Multi-Branch Self-Drafting for LLM Inference Acceleration" (AAAI 2025). N draft branches τ_i of at
most L tokens ride along in a forward after the text X, blind to one another:

    x_t, D, V = S(P_M(Y | [X; T; C])),

where T are the branches and D what the model predicts after their tokens, C the candidate
drafts and V what it predicts after theirs. A branch begins with several random tokens. It goes on
with the last token of its D, and drops its first one once it is full: τ_i = [τ_i; D_i,|τ_i|]. Each
sub-sequence of G tokens of a branch with the token that the model predicts after it is a draft

    d = [τ_i,k-G:k; D_i,k],

kept under its first token in a context cache, an LRU queue for every token. A corpus cache holds
phrases counted beforehand; there longer prefixes and higher counts come first. While the branches
fill, the first L tokens of an answer, nothing is drafted (algorithm 1).

``SelfSpec.as_in("self-draft", corpus=CorpusCache(texts))``: `docs/papers.md` says which texts the
paper counts, what it leaves open, and what differs here.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from selfspec.config import SpecConfig
from selfspec.draft.calibration import FixedPrior
from selfspec.draft.shape import Shape
from selfspec.draft.sources import Cursor, RowStart, Source
from selfspec.draft.sources.source import LastTokensCursor
from selfspec.draft.tree import TreeGrower
from selfspec.errors import ConfigError
from selfspec.records import Candidate, Evidence, StepRecord

# An n-gram of two tokens or more; the first is its key.
Gram = tuple[int, ...]

# A branch begins with this number of tokens, which are drawn from the prompt. Their generator has
# this seed and is no other's, so that samples are the same as without branches.
_NUM_RANDOM, _SEED = 3, 0
_MAX_DRAFTS = 16  # A context cache keeps as many for one first token.
# No chance is known of a draft. These let a fresh one be taken whole before a stale one begins.
_FRESHEST, _NEXT = 0.95, 0.7


class Branches(Shape):
    """A shape: N branches of L tokens in a tree, which take half of its nodes at most.

    With `fills`, as in the paper, nothing else is in the tree until they are full.
    """

    def __init__(
        self, num_branches: int = 6, length: int = 6, gram_length: int = 4, *, fills: bool = True
    ) -> None:
        counts = {"num_branches": num_branches, "length": length, "gram_length": gram_length}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number >= 1 (got {value!r})")
        self._num_branches, self._length = num_branches, length
        self._gram_length, self._fills = min(gram_length, length), fills
        self.num_nodes = num_branches * length
        self.tokens: list[list[int]] = []
        self._nodes: list[list[int]] = []  # Each branch's nodes in the tree being verified.
        self._caches: list[ContextCacheCursor] = []  # The row's caches.
        self._num_filling = 0  # The tokens of an answer before anything is drafted.

    def for_row(self, prompt_ids: Sequence[int], *, learns: bool) -> Branches:
        twin, dice = copy.copy(self), random.Random(_SEED)
        num_tokens = min(_NUM_RANDOM, self._length)
        num_branches = self._num_branches if prompt_ids and learns else 0
        twin.tokens = [dice.choices(prompt_ids, k=num_tokens) for _ in range(num_branches)]
        twin._num_filling = self._length if num_branches and self._fills else 0
        return twin

    def grow(self, grower: TreeGrower) -> None:
        """A tree once the branches are full, and chains below its root.

        A branch shares the nodes that begin as it does.
        """
        cursors = grower.cursors
        self._caches = [cursor for cursor in cursors if isinstance(cursor, ContextCacheCursor)]
        if self._num_filling <= 0:
            of_branches = min(self.num_nodes, grower.max_nodes // 2) if self.tokens else 0
            grower.best_first(max_nodes=grower.max_nodes - of_branches)
        self._nodes = []
        for branch in self.tokens:
            if len(grower.tree) + len(branch) > grower.max_nodes:
                break
            nodes = [0]
            for token in branch:
                if (node := grower.add(nodes[-1], token)) is None:
                    break
                nodes.append(node)
            self._nodes.append(nodes[1:])

    def observe(self, record: StepRecord) -> None:
        """Takes the model's answers to a whole branch as drafts; then the branch moves on."""
        self._num_filling -= len(record.committed_ids)
        if record.top is None:
            return
        likeliest: list[int] = record.top.ids[:, 0].tolist()
        for index, nodes in enumerate(self._nodes):
            branch = self.tokens[index]
            # A budget may have cut nodes.
            if len(nodes) == len(branch) and nodes[-1] < len(likeliest):
                answers = [likeliest[node] for node in nodes]
                if len(branch) == self._length:
                    self._keep_drafts(branch, answers)
                self.tokens[index] = [*branch, answers[-1]][-self._length :]
        self._nodes = []

    def _keep_drafts(self, branch: list[int], answers: list[int]) -> None:
        """Keeps the sub-sequences of G tokens of a full branch, with their successors."""
        for end in range(self._gram_length, len(answers) + 1):
            draft = (*branch[end - self._gram_length : end], answers[end - 1])
            for cache in self._caches:
                cache.keep(draft)


class ContextCache(Source):
    name = "grams"

    def open(self, row: RowStart) -> ContextCacheCursor:
        return ContextCacheCursor(row.prompt_ids[-1] if row.prompt_ids else -1)


class ContextCacheCursor(Cursor):
    """The drafts that begin with the last token, the freshest first."""

    def __init__(self, last_token: int) -> None:
        self._last_token = last_token
        self._drafts: dict[int, list[Gram]] = {}

    def root(self) -> list[Gram]:
        return self._drafts.get(self._last_token, [])

    def expand(self, state: list[Gram]) -> list[Candidate]:
        tokens = dict.fromkeys(draft[0] for draft in state)
        return [(token, Evidence("grams", rank=n)) for n, token in enumerate(tokens, start=1)]

    def follow(self, state: list[Gram], token: int) -> list[Gram] | None:
        return [draft[1:] for draft in state if draft[0] == token and draft[1:]] or None

    def observe(self, record: StepRecord) -> None:
        self._last_token = record.committed_ids[-1]

    def keep(self, gram: Gram) -> None:
        """Takes a draft of a branch in; the stalest one with its first token makes room."""
        key, draft = gram[0], gram[1:]
        others = [other for other in self._drafts.get(key, []) if other != draft]
        self._drafts[key] = [draft, *others][:_MAX_DRAFTS]


class CorpusCache(Source):
    """Phrases of texts: after up to `max_prefix` tokens, the tokens that most often came next.

    A phrase that came fewer than `min_count` times is left out. Counting takes some 120 bytes of
    memory a token.
    """

    name = "corpus"

    def __init__(
        self,
        texts: Iterable[Sequence[int]],
        *,
        max_prefix: int = 4,
        min_count: int = 2,
        top_k: int = 8,
    ) -> None:
        self.max_prefix, self._top_k = max_prefix, top_k
        self._next_tokens: dict[Gram, list[int]] = {}
        ends = np.full(max_prefix, -1, np.int32)  # No phrase reaches from text to text.
        parts = [part for ids in texts for part in (np.asarray(ids, np.int32), ends)]
        corpus = np.concatenate([*parts, ends, ends])
        for length in range(1, max_prefix + 1):
            grams = np.lib.stride_tricks.sliding_window_view(corpus, length + 1)
            grams, counts = np.unique(grams[(grams >= 0).all(axis=1)], axis=0, return_counts=True)
            # Where two phrases are equally frequent, the one with the smaller id comes first.
            order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts >= min_count)]
            for *prefix, token in grams[order].tolist():
                following = self._next_tokens.setdefault(tuple(prefix), [])
                if len(following) < top_k:
                    following.append(token)

    def open(self, row: RowStart) -> LastTokensCursor:
        return LastTokensCursor(self.next_tokens, row.prompt_ids, self.max_prefix)

    def next_tokens(self, last: Gram) -> list[Candidate]:
        """The candidates after the end of a text: the longest prefix first, then by frequency."""
        lengths: dict[int, int] = {}
        for length in range(len(last), 0, -1):
            for token in self._next_tokens.get(last[-length:], ()):
                lengths.setdefault(token, length)
        tokens = list(lengths)[: self._top_k]
        return [(token, Evidence("corpus", match_length=lengths[token])) for token in tokens]


def freshest_first(evidence: Evidence) -> float:
    """Ranks drafts where chances would: fresh ones first, and phrases equal to fresh ones."""
    return float(_FRESHEST * _NEXT ** (evidence.rank - 1))


def method(
    *,
    num_branches: int = 6,
    length: int = 6,
    gram_length: int = 4,
    max_nodes: int = 64,
    corpus: CorpusCache | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of `SelfSpec`; `max_nodes` are those of the tree without branches."""
    if not isinstance(corpus, CorpusCache | None):
        raise ConfigError(
            f"corpus must be a CorpusCache of selfspec.papers.self_draft (got {corpus!r:.40}); "
            "CorpusCache(texts) counts the token ids of texts"
        )
    branches = Branches(num_branches, length, gram_length)
    return {
        "sources": (),
        "extra_sources": [ContextCache()] if corpus is None else [corpus, ContextCache()],
        "shape": branches,
        "max_nodes": SpecConfig.of(max_nodes=max_nodes).max_nodes + branches.num_nodes,
        "calibration": FixedPrior(freshest_first),
        "budget": "fixed",
        **options,
    }
