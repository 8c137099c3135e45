"""Recorded answers decoded again beside a forward that takes a given time: what Python costs.

Drafting, inputs, walks, the KV's bookkeeping and learning are the engine's own. The device is
played: what was recorded arrives as soon as the forward would be over, and nobody waits for it but
in numbers. So the times do not contain what a driver takes to start kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from eval.runs.recorded import RecordedText, lessons_of, paths_of, top_of
from selfspec import GenerationStats, SelfSpec, SpecConfig, sequence
from selfspec.compat.generation import KV
from selfspec.cost import Ledger
from selfspec.draft.memory import Memory
from selfspec.engine import Decoder, first_tokens
from selfspec.machine.device import Replay
from selfspec.records import DraftTree
from selfspec.run.costs import Costs
from selfspec.run.graphs.runner import StaticRunner
from selfspec.run.layout import Window
from selfspec.run.model import AttentionTypes
from selfspec.run.prepared import Prepared
from selfspec.run.probe import Ability
from selfspec.run.prompt import Prompt
from selfspec.verify.choosers import GreedyChooser, Said

_FULL = "full_attention"


@dataclass
class HostTimes:
    """Seconds of the steps whose trees were full: the CPU's by stage, and whole steps."""

    num_steps: int = 0
    num_tokens: int = 0
    by_stage: Counter[str] = field(default_factory=Counter)
    whole: float = 0.0

    def a_step(self, seconds: float) -> float:
        """So many seconds of all steps, in milliseconds of one."""
        return 1000 * seconds / max(self.num_steps, 1)


def host_times(texts: Sequence[RecordedText], config: SpecConfig, forward: float) -> HostTimes:
    """All texts in turn beside forwards of so many seconds, by one `SelfSpec` that starts cold."""
    vocab_size = max(text.vocab_size for text in texts)
    memory = SelfSpec(config).memory(vocab_size)
    device, times = _PlayedDevice(forward), HostTimes()
    prepared = _prepared(config, vocab_size, device)
    with torch.inference_mode():
        for text in texts:
            memory.observe_pairs(*lessons_of(text, memory.top_k))
            _decode(_opened(text, memory, prepared, device), device.clock, times)
    return times


def _decode(decoder: _Replay, clock: _Clock, times: HostTimes) -> None:
    seconds = decoder.stats.seconds
    while not all(row.is_done for row in decoder.rows):
        start, before = clock.now(), seconds.copy()
        (record,) = decoder.step()
        if len(record.tree) == decoder.config.max_nodes:
            times.num_steps += 1
            times.num_tokens += len(record.committed_ids)
            times.whole += clock.now() - start
            times.by_stage.update(seconds)
            times.by_stage.subtract(before)


def _opened(
    text: RecordedText, memory: Memory, prepared: Prepared, device: _PlayedDevice
) -> _Replay:
    """A decoder behind the first token of a text."""
    config = prepared.config
    prompt, reach = _read(prepared.model, text.prompt_ids), len(text.output_ids)
    length = len(text.prompt_ids) + reach
    chooser = _Chooser(device)
    row = sequence.Sequence(
        prompt=prompt.input_ids,
        prompt_ids=text.prompt_ids,
        chooser=chooser,
        max_length=length,
        stats=GenerationStats(num_calls=1),
    )
    decoder = _Replay(
        backend=prepared.backend(prompt, reach=reach, width=config.max_nodes),
        config=config,
        stats=row.stats,
        device=device,
        clock=device.clock.host,
        text=text,
    )
    chooser.look = decoder.look
    first = first_tokens([row], prompt.logits, device)
    row.begin(memory, config)
    decoder.add([row], first)
    return decoder


def _prepared(config: SpecConfig, vocab_size: int, device: _PlayedDevice) -> Prepared:
    """How a device runs forwards, over a model that only has to have a KV."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    shape = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=8192, **sizes, **heads)
    attention = AttentionTypes((_FULL,), {_FULL: Window()}, 0)
    runner = StaticRunner(attention, device, torch.device("cpu"))
    ability = Ability("tree", None, attention)
    return Prepared(LlamaForCausalLM(shape).eval(), ability, config, Costs(), Ledger(), runner)


def _read(model: Any, prompt_ids: Sequence[int]) -> Prompt:
    ids, cache = torch.tensor([prompt_ids]), DynamicCache(config=model.config)
    logits = model(input_ids=ids, **{KV: cache}, use_cache=True).logits[:, -1]
    kwargs = {KV: cache, "position_ids": torch.tensor([[len(prompt_ids)]])}
    return Prompt(ids, kwargs, logits, None)


class _Clock:
    """A thread's time, without what only the script takes, and with what it would have waited."""

    def __init__(self) -> None:
        self._left_out = self._waited = 0.0

    def host(self) -> float:
        """The time that the CPU worked."""
        return thread_time() - self._left_out

    def now(self) -> float:
        """The time that has passed."""
        return self.host() + self._waited

    def wait_until(self, then: float) -> None:
        self._waited += max(then - self.now(), 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside takes no time."""
        start = thread_time()
        yield
        self._left_out += thread_time() - start


class _PlayedDevice:
    """A device whose forwards take a given time, beside the CPU; see `Device` for its methods."""

    name = "played device"
    can_capture = True

    def __init__(self, forward: float) -> None:
        self.clock = _Clock()
        self._forward, self._done = forward, 0.0

    def side(self, *tensors: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def fetch(self, *tensors: torch.Tensor) -> _Arriving:
        return _Arriving(tensors, self)

    def send(self, host: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(host)

    def capture(self, work: Callable[[], None]) -> Replay | str:
        with self.clock.stopped():
            work()  # It makes the buffer of the logits.
        return self.start

    def start(self) -> None:
        self._done = self.clock.now() + self._forward

    def wait(self) -> None:
        self.clock.wait_until(self._done)


@dataclass
class _Arriving:
    """Tensors that are there once the forward is over."""

    tensors: tuple[torch.Tensor, ...]
    device: _PlayedDevice

    def get(self) -> tuple[torch.Tensor, ...]:
        self.device.wait()
        return self.tensors


class _Chooser(GreedyChooser):
    """Chooses what was recorded."""

    look: Callable[[], torch.Tensor]

    def __init__(self, device: _PlayedDevice) -> None:
        self._played = device

    def read(self, said: Said, index: int) -> None:
        with self._played.clock.stopped():
            self._fetched = self._played.fetch(self.look())

    def commit(self, rows: Any, nodes: Any) -> tuple[list[int], bool]:
        (choices,) = self._fetched.get()
        token = int(choices[0, nodes[0]])
        return [token], rows[0].commit(token)


@dataclass(kw_only=True)
class _Replay(Decoder):
    """The engine, with recorded tables in place of those of the logits."""

    text: RecordedText
    stats: GenerationStats
    _tables: tuple[torch.Tensor, ...] = ()
    _tree: DraftTree = field(default_factory=lambda: DraftTree.of_root(0))

    def look(self) -> torch.Tensor:
        """What the model would choose at each node (1, Q) of the last tree."""
        num_before = self.stats.num_new_tokens
        paths = paths_of(self._tree)
        rows = [self.text.row(num_before, path) for path in paths]
        top = top_of(rows, self.config.top_k)
        self._tables = tuple(torch.from_numpy(table)[None] for table in top)
        chosen = [row[0][0] for row in rows]
        for node, path in enumerate(paths):  # On its own path, the answer decides.
            end = num_before + len(path)
            if list(path) == self.text.output_ids[num_before:end]:
                chosen[node] = self.text.output_ids[end]
        return torch.tensor([chosen])

    def _draft(self, step: Any) -> Any:
        trees = super()._draft(step)
        (self._tree,) = trees
        return trees

    def _fetch_tops(self, logits: torch.Tensor, memory: Memory) -> Any:
        return self.device.fetch(*self._tables)
