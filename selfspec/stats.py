"""`GenerationStats`: what is counted and timed of one or more `generate()` calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from selfspec.records import Laps, StepRecord, sources_of

_ENOUGH = 4  # plain steps, for a mean of their times
_MOST_POSITIONS = 8  # of which the report has acceptance rates

# These properties are computed from the fields, and are written with them.
_DERIVED = (
    *("tokens_per_step", "nodes_per_step", "speed_up"),
    *("num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"),
)

# How the values of a field are merged: summed, or the later call's if it has one.
_LATEST = {"merge": "latest"}


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of one or more `generate()` calls; `a + b` merges those of `b` after `a`.

    Attributes:
        num_calls: Calls of `generate()`.
        num_new_tokens: Tokens that went to the output.
        num_prompt_tokens_out: How many of these the prompts' forwards yielded.
        num_prompt_tokens_kept: Tokens of prompts that were not read, since another text had their
            keys and values.
        num_steps: Forwards after the prompt's, counted once for each row in them.
        num_nodes: Verified nodes, the roots included.
        num_drafts: Steps that verified a draft.
        num_draft_forwards: Forwards of the draft model or of heads, with those over the prompts.
        accepted_lengths: How many steps there were by the number of accepted drafts.
        drafted_by_source: Drafted tokens by source. One that two sources name counts for both.
        accepted_by_source: Accepted tokens by source, counted in the same way.
        seconds: Time by stage.
        step_seconds: Time of all steps, so without prompts and what is prepared once.
        num_plain_steps: Steps that verified no draft.
        plain_seconds: Time of steps that verified no draft.
        num_disabled_calls: Calls that were decoded plainly, or drafted for in chains.
        disabled_reason: Why the last such call was.
        paused: Why the last call that drafted nothing for a good part of it did so.
        mode: What the last call verified: ``"tree"``, ``"chain"``, or ``"plain"`` for no drafts.
        forward: How the last call ran the model over drafts: ``"eager"``, as transformers does,
            ``"packed"``, ``"graph"`` or ``"streamed"``.
        eager_reason: Why that is not what `config.forward` says.
        packing_note: What packing the model's weights would bring on this machine; None if nothing
            is known to.
        heads_reason: Why the heads that the model's config names were not asked.
        draft_model_reason: Why a draft model, or the model's own rounded weights, was not asked, or
            hardly ever.
        kept_reason: Why the last prompt that could not go on after another text's could not, where
            keys and values are kept.
        table_bytes: What the LUTs and the memory of texts take.
        draft_model_bytes: What the model's rounded weights that draft for it take.
        captured_bytes: What captured forwards keep from call to call: KV slots and logits.
    """

    num_calls: int = 0
    num_new_tokens: int = 0
    num_prompt_tokens_out: int = 0
    num_prompt_tokens_kept: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_drafts: int = 0
    num_draft_forwards: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    step_seconds: float = 0.0
    num_plain_steps: int = 0
    plain_seconds: float = 0.0
    num_disabled_calls: int = 0
    disabled_reason: str | None = field(default=None, metadata=_LATEST)
    paused: str | None = field(default=None, metadata=_LATEST)
    mode: str = field(default="", metadata=_LATEST)
    forward: str = field(default="", metadata=_LATEST)
    eager_reason: str | None = field(default=None, metadata=_LATEST)
    packing_note: str | None = field(default=None, metadata=_LATEST)
    heads_reason: str | None = field(default=None, metadata=_LATEST)
    draft_model_reason: str | None = field(default=None, metadata=_LATEST)
    kept_reason: str | None = field(default=None, metadata=_LATEST)
    table_bytes: int = field(default=0, metadata=_LATEST)
    draft_model_bytes: int = field(default=0, metadata=_LATEST)
    captured_bytes: int = field(default=0, metadata=_LATEST)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a forward after the prompt's yields on average; 0.0 before the first.

        1 for plain decoding, whatever the batch: the prompts' own tokens are left out.
        """
        return (self.num_new_tokens - self.num_prompt_tokens_out) / max(self.num_steps, 1)

    @property
    def nodes_per_step(self) -> float:
        return self.num_nodes / max(self.num_steps, 1)

    # vLLM has three counts of these names; its drafts are chains.

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens that were verified, those of all branches."""
        return self.num_nodes - self.num_steps

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(length * steps for length, steps in self.accepted_lengths.items())

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """The same by the position of the token in its draft; the first position is 0."""
        longest = max(self.accepted_lengths, default=0)
        steps = self.accepted_lengths.items()
        return [sum(n for length, n in steps if length > position) for position in range(longest)]

    @property
    def speed_up(self) -> float | None:
        """How many times sooner the steps yielded their tokens than plain steps would have.

        A plain step is taken to cost what those of the same calls did. None if there were fewer
        than four, or if the call was decoded plainly: then it is unknown.
        """
        if self.num_plain_steps < _ENOUGH or not self.step_seconds:
            return None
        tokens = self.num_new_tokens - self.num_prompt_tokens_out
        return tokens * self.plain_seconds / self.num_plain_steps / self.step_seconds

    def disable(self, reason: str | None) -> None:
        """Notes why this call is decoded plainly, or drafted for in chains; None: it is not."""
        self.disabled_reason = reason
        self.num_disabled_calls = int(reason is not None)

    def count_step(self, record: StepRecord) -> None:
        """Counts what came of the tree of one row."""
        tree, accepted = record.tree, set(record.accepted_nodes())
        self.num_steps += 1
        self.num_nodes += len(tree)
        self.num_drafts += len(tree) > 1
        self.num_new_tokens += len(record.committed_ids)
        self.accepted_lengths[record.num_accepted] += 1
        for node in range(1, len(tree)):
            sources = sources_of(tree.evidence[node])
            self.drafted_by_source.update(sources)
            if node in accepted:
                self.accepted_by_source.update(sources)

    def count_draft_forward(self) -> None:
        self.num_draft_forwards += 1

    def count_time(self, laps: Laps, num_rows: int, width: int | None = None) -> None:
        """Adds the part of one of `num_rows` rows in the time of a step, by stage and in all.

        Without a width it is the time of a first token, which the prompt's forward has yielded.
        """
        for stage, seconds in laps.seconds.items():
            self.seconds[stage] += seconds / num_rows  # type: ignore[assignment]
        if width is None:
            self.num_new_tokens += 1
            self.num_prompt_tokens_out += 1
            return
        seconds = laps.total / num_rows
        self.step_seconds += seconds
        if width == 1:
            self.num_plain_steps += 1
            self.plain_seconds += seconds

    def spend(self, stage: str, seconds: float) -> None:
        self.seconds[stage] += seconds  # type: ignore[assignment]

    def __add__(self, other: GenerationStats) -> GenerationStats:
        if not isinstance(other, GenerationStats):
            return NotImplemented
        merged: dict[str, Any] = {}
        for stat in fields(self):
            mine, theirs = getattr(self, stat.name), getattr(other, stat.name)
            merged[stat.name] = theirs or mine if stat.metadata == _LATEST else mine + theirs
        return GenerationStats(**merged)

    def as_dict(self) -> dict[str, Any]:
        """All fields and the properties computed from them, in types that JSON knows."""
        values = {stat.name: getattr(self, stat.name) for stat in fields(self)}
        plain = {k: dict(v) if isinstance(v, Counter) else v for k, v in values.items()}
        return plain | {name: getattr(self, name) for name in _DERIVED}

    def __str__(self) -> str:
        """At most six lines; what does not apply has none."""
        lines = [
            f"{self.num_new_tokens} new tokens in {self.num_steps} steps: "
            f"{self.tokens_per_step:.2f} tokens per step, {self.nodes_per_step:.1f} nodes verified"
        ]
        if self.step_seconds:
            lines.append(self._verdict)
        if self.drafted_by_source:
            drafted, accepted = self.drafted_by_source, self.accepted_by_source
            by_source = [f"{name} {accepted[name]} of {n}" for name, n in sorted(drafted.items())]
            is_shared = drafted.total() > self.num_draft_tokens
            note = " (a token may have several)" if is_shared else ""
            lines.append(f"accepted by source{note}: {', '.join(by_source)}")
        if self.num_drafts:
            lines.append(self.acceptance)
        if notes := [note for note in self._notes if note]:
            lines.append(f"note: {'; '.join(notes)}")
        if self.seconds:
            stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in self.seconds.items())
            total = sum(self.seconds.values())
            lines.append(f"{total:.3f} s with prompts: {stages}")
        return "\n  ".join(lines)

    @property
    def idle_reason(self) -> str | None:
        """Why a draft model was hardly ever asked; None if it was."""
        looks, steps = self.num_draft_forwards, self.num_steps
        is_idle = 2 * looks < steps
        return f"{looks} looks in {steps} steps, since more did not pay" if is_idle else None

    @property
    def _notes(self) -> Iterator[str | None]:
        """Why something is not as one would expect, and what else was done."""
        if self.disabled_reason:
            disabled, calls = self.num_disabled_calls, self.num_calls
            some = f"{disabled} of {calls} calls " if disabled not in (0, calls) else ""
            drafted = "drafted in chains" if self.mode == "chain" else "not drafted"
            yield f"{some}{drafted}: {self.disabled_reason}"
        yield self.paused
        yield self.heads_reason and f"its heads were not asked: {self.heads_reason}"
        little = "its draft model drafted little or nothing"
        yield self.draft_model_reason and f"{little}: {self.draft_model_reason}"
        yield self.kept_reason and f"a prompt was read whole: {self.kept_reason}"
        if self.num_prompt_tokens_kept:
            yield f"{self.num_prompt_tokens_kept} tokens of prompts were not read again"
        if self.num_draft_forwards:
            yield f"{self.num_draft_forwards} forwards for drafts"
        if self.forward not in ("", "eager") or self.eager_reason:
            reason = f": {self.eager_reason}" if self.eager_reason else ""
            yield f"{self.forward or 'eager'} forwards{reason}"
        yield self.packing_note

    @property
    def _verdict(self) -> str:
        if self.speed_up is None:
            return "whether this was faster is unknown: there were too few plain steps"
        took, plain = self.step_seconds, self.speed_up * self.step_seconds
        return f"{self.speed_up:.2f}x: {took:.2f} s for the steps, {plain:.2f} s had all been plain"

    @property
    def acceptance(self) -> str:
        """How many drafted tokens were accepted, as vLLM puts it."""
        accepted, num_drafts = self.num_accepted_tokens, max(self.num_drafts, 1)
        first = enumerate(self.num_accepted_tokens_per_pos[:_MOST_POSITIONS])
        rates = ", ".join(f"{position}: {n / num_drafts:.2f}" for position, n in first)
        line = (
            f"Mean acceptance length {1 + accepted / num_drafts:.2f}: {accepted} of "
            f"{self.num_draft_tokens} drafted tokens accepted"
        )
        return f"{line}, rate by position {rates}" if rates else line
