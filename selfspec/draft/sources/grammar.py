"""What a grammar forces: the tokens that the processors of a call will leave.

Follows the text with a grammar of its own, and looks a few characters ahead. Where only one text
can come next, such as a key, its token is a draft, and where only few can come, the token of each.
What other sources name and the grammar forbids gets no node. A wrong belief may cost a node, and
never a token: each token is chosen with the processors of the call, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from selfspec.draft.sources.json_text import JsonText, Spacing
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.records import Candidate, Evidence, StepRecord

_AHEAD = 24  # A text's first 24 characters are looked for, which tell its first token.
_FEW = 8  # A text is free where more than 8 characters are allowed next.
# At first, a text is as sure as a match of this many tokens: the only token that is allowed; the
# only text, where its whitespace was seen before; the only text; one of several.
_ONLY_TOKEN, _SEEN_TEXT, _ONLY_TEXT, _ONE_OF_SEVERAL = 24, 8, 4, 2
_NUMBER = ord("1")
_DIGITS, _AFTER_NUMBER = b"0123456789", b",}]"


class TokenBytes:
    """The bytes of each token of a vocabulary, and the token of some bytes."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._words = list(words)
        self._token_of = {word: token for token, word in enumerate(self._words) if word}
        self._longest = max(map(len, self._token_of), default=0)
        chars = [c for c in range(256) if bytes((c,)) in self._token_of]
        self.chars = {char: self._token_of[bytes((char,))] for char in chars}
        self._visible = [char for char in chars if 32 < char < 127]

    def __contains__(self, word: bytes) -> bool:
        return word in self._token_of

    def of(self, token: int) -> bytes:
        """The bytes of a token; none for one that is not in the vocabulary."""
        return self._words[token] if token < len(self._words) else b""

    def first(self, text: bytes) -> bytes:
        """The longest word that a text begins with, as most tokenizers write short texts.

        The last of several spaces belongs to the word after it.
        """
        num_spaces = len(text) - len(text.lstrip())
        longest = num_spaces - 1 if 1 < num_spaces < len(text) else self._longest
        ends = range(min(longest, len(text)), 0, -1)
        return next((text[:end] for end in ends if text[:end] in self._token_of), b"")

    def token(self, word: bytes) -> int:
        return self._token_of[word]

    def visible(self, mask: NDArray[np.uint32]) -> list[int]:
        """The printable characters, spaces apart, that are tokens of a mask."""
        return [char for char in self._visible if _has(mask, self.chars[char])]


class Grammar(Protocol):
    """A grammar at some place of the text of one row."""

    token_bytes: TokenBytes

    def accept(self, token: int) -> bool:
        """Goes on by a token; False where that is not allowed, and then nothing has changed."""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def mask(self) -> NDArray[np.uint32] | None:
        """One bit for each token that is allowed next, the lowest first; None: nothing is known."""
        ...

    def forced(self) -> bytes:
        """The text that is sure to come next, as far as that is known without a mask."""
        ...


class _GrammarState(NamedTuple):
    """A place after the committed text."""

    path: tuple[int, ...]  # The tokens from there.
    text: JsonText


class GrammarSource(Source):
    """The grammar that the processors of one row follow; they may hold none before they are used.

    `find` says those of all rows when the cursor is opened, after the first token was chosen.
    """

    name = "grammar"

    def __init__(self, find: Callable[[], Sequence[Grammar | None]], number: int) -> None:
        self._find = find
        self._number = number  # of the row

    def open(self, row: RowStart) -> GrammarCursor | None:
        grammar = self._find()[self._number]
        return None if grammar is None else GrammarCursor(grammar)


class GrammarCursor(Cursor):
    """The grammar of one row, at the end of its text or after its drafts.

    A place costs a mask, and some more of them where what comes next is nearly sure.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._words = grammar.token_bytes
        self._spacing = Spacing()
        self._text = JsonText()
        self._path: list[int] = []  # Tokens after the committed text that the grammar has taken.
        self._is_lost = False  # Has a token come that the grammar does not know?
        self._mask: NDArray[np.uint32] | None = None  # At the place that was expanded last.
        self._ending: tuple[JsonText, list[Candidate]] | None = None  # How a free value ends.

    def root(self) -> _GrammarState:
        return _GrammarState((), self._text)

    def follow(self, state: _GrammarState, token: int) -> _GrammarState:
        return _GrammarState((*state.path, token), state.text.read(self._words.of(token)))

    def expand(self, state: _GrammarState) -> list[Candidate]:
        """The tokens of the texts that can come next, if these are few."""
        mask = self._grammar.mask() if self._go(state.path) else None
        self._mask = None if mask is None else mask.copy()  # A grammar may write into it again.
        if self._mask is None:
            return []
        if (token := _only(self._mask)) is not None:
            return [(token, Evidence("grammar", _ONLY_TOKEN))]
        chars, is_free = self._next(self._mask, state.text)
        if not is_free:
            return self._texts(state.text, chars)
        if not chars:
            return self._space(state.text)
        if self._ending is None or self._ending[0] is not state.text:
            ends = self._texts(state.text, chars)
            self._ending = state.text, [(token, _as_end(sign)) for token, sign in ends]
        return self._ending[1]

    def possible(self, state: _GrammarState, tokens: Iterable[int]) -> list[int]:
        mask = self._mask
        return [token for token in tokens if mask is None or _has(mask, token)]

    def observe(self, record: StepRecord) -> None:
        self._is_lost = self._is_lost or not self._go(())
        for token in record.committed_ids:
            if self._is_lost or not self._grammar.accept(token):
                self._is_lost = True
                return
            self._text = self._text.read(self._words.of(token), self._spacing)

    def _go(self, path: tuple[int, ...]) -> bool:
        """Moves the grammar to the place after some tokens; False where it can't."""
        same = 0
        while same < min(len(path), len(self._path)) and path[same] == self._path[same]:
            same += 1
        if same < len(self._path):
            self._grammar.rollback(len(self._path) - same)
            del self._path[same:]
        for token in path[same:]:
            if self._is_lost or not self._grammar.accept(token):
                return False
            self._path.append(token)
        return not self._is_lost

    def _next(self, mask: NDArray[np.uint32], text: JsonText) -> tuple[list[int], bool]:
        """The characters that may come next, spaces apart, or those that may end a free value."""
        chars = self._words.visible(mask)
        if len(chars) <= _FEW and sum(char in _DIGITS for char in chars) <= 1:
            return chars, False
        ends = b'"' if text.is_string else _AFTER_NUMBER
        return [char for char in chars if char in ends], True

    def _gap(self, text: JsonText, char: int) -> tuple[bytes | None, bool]:
        """What comes before a character, None if something else is there; was it seen before?"""
        if text.is_string:
            return b"", True
        gap, is_seen = self._spacing.before(text, char)
        return (gap[len(text.space) :] if gap.startswith(text.space) else None), is_seen

    def _texts(self, text: JsonText, chars: list[int]) -> list[Candidate]:
        """The first token of each text that begins with one of some characters."""
        candidates: dict[int, Evidence] = {}
        for rank, char in enumerate(chars, start=1):
            gap, is_seen = self._gap(text, char)
            word = b"" if gap is None else self._word(text, gap + bytes((char,)))
            if word:
                alone = _SEEN_TEXT if is_seen else _ONLY_TEXT
                sure_as = alone if len(chars) == 1 else _ONE_OF_SEVERAL
                evidence = Evidence("grammar", sure_as, rank, count_bin=2 * len(chars) + is_seen)
                candidates.setdefault(self._words.token(word), evidence)
        return list(candidates.items())

    def _space(self, text: JsonText) -> list[Candidate]:
        """The space before a number, if numbers do not begin with it."""
        gap, is_seen = self._gap(text, _NUMBER)
        word = self._words.first(gap) if gap and gap + b"1" not in self._words else b""
        evidence = Evidence("grammar", _ONLY_TEXT, count_bin=int(is_seen))
        return [(self._words.token(word), evidence)] if word else []

    def _word(self, text: JsonText, piece: bytes) -> bytes:
        """The first word of a text that begins with a piece; none if it may be longer."""
        grammar, written, others = self._grammar, b"", list[bytes]()
        while piece and self._write(piece):
            written, text = written + piece, text.read(piece)
            piece = b"" if len(written) >= _AHEAD else grammar.forced()
            mask = None if piece or len(written) >= _AHEAD else grammar.mask()
            if mask is not None:
                chars, is_free = self._next(mask, text)
                others = [(self._gap(text, c)[0] or b"") + bytes((c,)) for c in chars]
                piece = others[0] if len(chars) == 1 and not is_free else b""
                others = [] if is_free else others
        grammar.rollback(len(written))
        word = self._words.first(written)
        is_open = word == written and any(word + other[:1] in self._words for other in others)
        return b"" if is_open else word

    def _write(self, piece: bytes) -> bool:
        """Lets the grammar take some bytes, or none of them."""
        for number, char in enumerate(piece):
            token = self._words.chars.get(char)
            if token is None or not self._grammar.accept(token):
                self._grammar.rollback(number)
                return False
        return True


def _as_end(sign: Evidence) -> Evidence:
    """The end of a free value; a chance of one in six is assumed."""
    return Evidence("grammar", rank=sign.rank, probability_bin=2)


def _has(mask: NDArray[np.uint32], token: int) -> bool:
    index = token >> 5
    return index < len(mask) and bool(int(mask[index]) >> (token & 31) & 1)


def _only(mask: NDArray[np.uint32]) -> int | None:
    """The only token of a mask; None if there are others."""
    parts = np.flatnonzero(mask)
    if len(parts) != 1:
        return None
    bits = int(mask[parts[0]])
    return int(parts[0]) * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None
