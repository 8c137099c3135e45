"""What "the same" means: run stock and selfspec on the same call, compare to the last bit."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from selfspec import GenerationStats, SelfSpec, UnsupportedError, attach, detach, hub_folder
from selfspec.ability.look import look_at
from selfspec.compat.generation import KV
from tests.fakes import SHARED, FutureSource, attached_model, of_library, prompt

NUM_NEW = 24
NUM_COLUMNS = 17  # of a prompt
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}  # of fp32 scores, between forwards of different widths
MODES = {"greedy": GREEDY, "sample": SAMPLE}


def slow(*values: Any) -> Any:
    """Parameters of a case that is left out by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


# architectures whose attention differs most, for what hardly hangs on it
FEW = ("llama", "gemma3", "gpt2", "qwen3-moe", "phi3", "deepseek-v3", "gpt-oss")


def few(names: Iterable[str], tried: Sequence[str] = FEW) -> list[Any]:
    """Parameters of a test of architectures, of which only some are tried by default."""
    return [name if name in tried else slow(name) for name in names]


def some(seeds: range) -> list[Any]:
    """Parameters of a test that is drawn by a seed: the first half is tried by default."""
    half = len(seeds) // 2
    return [*seeds[:half], *map(slow, seeds[half:])]


class Call(NamedTuple):
    """What most tests ask for: the fixture `call` gives each of `CALLS`."""

    num_rows: int
    mode: str

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return prompt(self.num_rows)

    @property
    def options(self) -> dict[str, Any]:
        return MODES[self.mode]


# two of the four by default, and one of these two where a test has many cases
CALLS = [
    pytest.param(Call(1, "greedy"), id="1-greedy", marks=pytest.mark.in_turns),
    pytest.param(Call(3, "sample"), id="3-sample", marks=pytest.mark.in_turns),
    pytest.param(Call(1, "sample"), id="1-sample", marks=pytest.mark.slow),
    pytest.param(Call(3, "greedy"), id="3-greedy", marks=pytest.mark.slow),
]


# all that there are guesses for is verified, whatever it costs
FIXED: dict[str, Any] = {"budget": "fixed", "max_nodes": 16}


class Outcome(NamedTuple):
    """What a `generate()` call leaves behind."""

    output: Any
    rng_state: torch.Tensor

    @property
    def ids(self) -> torch.Tensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


class Both(NamedTuple):
    """Stock's outcome and ours, with what each run's own objects recorded."""

    stock: Outcome
    ours: Outcome
    stats: GenerationStats
    stock_extras: dict[str, Any]
    our_extras: dict[str, Any]


def run(model: Any, inputs: dict[str, Any], *, seed: int = 0, **options: Any) -> Outcome:
    """One seeded call; a loop of ours needs an attached model.

    What stock writes with a model that tests share is asked once.
    """
    key = _key_of(model, inputs, {"seed": seed, **options})
    known = _known.setdefault(model, {}) if key else {}
    if key in known:
        return known[key]._replace(output=known[key].output.clone())
    torch.manual_seed(seed)
    with attached(model) if isinstance(options.get("custom_generate"), SelfSpec) else nullcontext():
        output = model.generate(**inputs, **{"max_new_tokens": NUM_NEW, **options})
    outcome = Outcome(output, torch.get_rng_state())
    if key and isinstance(output, torch.Tensor):
        known[key] = outcome._replace(output=output.clone())
    return outcome


_known: WeakKeyDictionary[Any, dict[Hashable, Outcome]] = WeakKeyDictionary()


def _key_of(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Hashable:
    """What a call of stock depends on; None where it may depend on more, or is not stock's."""
    if model not in SHARED or {"generate", "_get_candidate_generator"} & vars(model).keys():
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()):
        return None
    try:
        given = [(name, str(ids.dtype), ids.tolist()) for name, ids in inputs.items()]
        config = model.generation_config.to_json_string()
        return json.dumps([given, options], sort_keys=True), config, look_at(model).verdict_key
    except (AttributeError, TypeError):  # Not all are plain values.
        return None


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """Inside, the model is attached, which leaves no trace if it was not before."""
    was_attached = "generate" in vars(model)
    attach(model)
    try:
        yield
    finally:
        if not was_attached:
            detach(model)


def run_both(
    model: Any,
    inputs: dict[str, Any],
    spec: SelfSpec | Callable[..., SelfSpec] | None = None,
    *,
    fresh: Callable[[], dict[str, Any]] = dict,
    drafts: bool = True,
    entrance: str = "custom_generate",
    told: Callable[[torch.Tensor], dict[str, Any]] | None = None,
    **options: Any,
) -> Both:
    """Stock and selfspec on one call; asserts the same ids and the same random state behind it.

    `spec` may be made of stock's ids and the inputs, as `doubting` is, which is the default.
    `fresh` makes the arguments that a call uses up: streamers, criteria, caches. `drafts` tells
    whether drafting is expected to happen at all, `entrance` the way in that takes `spec`, and
    `told` makes arguments of stock's ids that only ours gets.
    """
    stock_extras = fresh()
    stock = run(model, inputs, **options, **stock_extras)
    if not isinstance(spec, SelfSpec):
        spec = (spec or doubting)(stock.ids, inputs)
    our_extras = {**fresh(), **(told(stock.ids) if told else {})}
    ours = run(model, inputs, **through(entrance, spec), **options, **our_extras)
    assert_same_ids(ours.ids, stock.ids)
    assert torch.equal(ours.rng_state, stock.rng_state), "the random state behind the call differs"
    if drafts:
        assert spec.stats.disabled_reason is None
        assert spec.stats.num_nodes > spec.stats.num_steps or spec.stats.num_steps <= 1
    return Both(stock, ours, spec.stats, stock_extras, our_extras)


def run_both_on_a_kv(
    model: Any, inputs: dict[str, Any], kind: str, spec: Any = None, **options: Any
) -> Both:
    """The same with a cache that is handed in; asserts the same KV behind it."""
    options["fresh"] = lambda: {KV: new_kv(model, kind)}
    both = run_both(model, inputs, spec, **options)
    assert_same_kv(both.our_extras[KV], both.stock_extras[KV])
    return both


def new_kv(model: Any, kind: str) -> DynamicCache:
    """A cache that knows the model's windows, or one that knows nothing."""
    return DynamicCache() if kind == "bare" else DynamicCache(config=model.config)


def in_threads(work: Callable[[int], None], number: int, num_threads: int) -> None:
    """Does `work` of 0, 1, 2, … in threads that take turns in them, and switch as often as can be.

    Returns when all are done.
    """

    def share(first: int) -> None:
        for index in range(first, number, num_threads):
            work(index)

    threads = [threading.Thread(target=share, args=(first,)) for first in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def through(entrance: str, spec: SelfSpec) -> dict[str, Any]:
    """The arguments of a call that drafts, through one of the ways in."""
    if entrance != "hub":
        return {entrance: spec}
    return {"custom_generate": str(hub_folder()), "trust_remote_code": True, "spec": spec}


def assert_same_ids(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal ids; a difference is told by its first place."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, stock {tuple(expected.shape)}"
    places = (got != expected).nonzero().tolist()
    assert not places, (
        f"first difference at {places[0]}:\nours  {got.tolist()}\nstock {expected.tolist()}"
    )


def assert_same_kv(ours: Any, stock: Any) -> None:
    """The same kinds of layers, lengths and, within rounding, keys, values and running states.

    States are computed in another order over several tokens, and layers behind them show it.
    """
    assert type(ours) is type(stock)
    most = 2e-3 if any(hasattr(layer, "conv_states") for layer in stock.layers) else 1e-4
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert type(mine) is type(theirs)
        assert vars(mine).keys() == vars(theirs).keys()
        if hasattr(theirs, "get_seq_length"):  # A layer of states alone knows no length.
            assert mine.get_seq_length() == theirs.get_seq_length()
            assert mine.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        plain = {n: v for n, v in vars(theirs).items() if isinstance(v, (bool, int))}
        assert {n: getattr(mine, n) for n in plain} == plain
    # A model may keep tensors in the cache itself.
    for mine, theirs in zip((ours, *ours.layers), (stock, *stock.layers), strict=True):
        held = tensors_of(mine)
        assert held.keys() == tensors_of(theirs).keys()
        for name, tensor in tensors_of(theirs).items():
            assert held[name].shape == tensor.shape, name
            assert held[name].dtype == tensor.dtype, name
            assert torch.allclose(held[name], tensor, rtol=most, atol=most), name


def assert_begins(kv: DynamicCache, whole: DynamicCache) -> None:
    """All layers have the same columns, which are the first ones of the whole text's."""
    lengths = {x.get_seq_length() for x in kv.layers if hasattr(x, "get_seq_length")}
    assert len(lengths) <= 1, lengths
    for mine, theirs in zip(kv.layers, whole.layers, strict=False):
        if not hasattr(theirs, "get_seq_length"):  # A convolution knows no length.
            held = mine.conv_states[0]
            assert held is None or held.shape == theirs.conv_states[0].shape
        elif mine.keys is not None:
            (length,) = lengths
            assert type(mine) is type(theirs)
            assert length <= theirs.get_seq_length()
            whole_past = not isinstance(theirs, DynamicSlidingWindowLayer)
            held = length if whole_past else min(length, mine.sliding_window - 1)
            assert mine.keys.shape[-2] == mine.values.shape[-2] == held
            assert whole_past or not mine.record_past
            for name in ("keys", "values") if whole_past else ():
                ours, true = getattr(mine, name), getattr(theirs, name)[..., :length, :]
                assert torch.allclose(ours, true, rtol=1e-4, atol=1e-4)


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """What a layer of a cache holds; a running state is one of several in a dict."""
    parts = {n: v if isinstance(v, dict) else {0: v} for n, v in vars(layer).items()}
    held = {f"{name} {i}": v for name, part in parts.items() for i, v in part.items()}
    return {name: v for name, v in held.items() if isinstance(v, torch.Tensor)}


def texts_of(ids: torch.Tensor, inputs: dict[str, Any]) -> list[list[int]]:
    """The rows of an output without the padding on their left."""
    mask = inputs.get("attention_mask")
    starts = [0] * len(ids) if mask is None else (mask.cumsum(-1) == 0).sum(-1).tolist()
    starts = [start for start in starts for _ in range(len(ids) // len(starts))]
    return [row[start:].tolist() for row, start in zip(ids, starts, strict=True)]


def doubting(ids: torch.Tensor, inputs: dict[str, Any], *, seed: int = 0, **knobs: Any) -> SelfSpec:
    """A `SelfSpec` whose drafts are right for a while and then wrong, all over the tree."""
    source = FutureSource(texts_of(ids, inputs), doubt=0.3, seed=seed)
    return SelfSpec(extra_sources=[source], **{**FIXED, **knobs})


def knowing(ids: torch.Tensor, inputs: dict[str, Any], **knobs: Any) -> SelfSpec:
    """A `SelfSpec` that drafts nothing but the truth."""
    source = FutureSource(texts_of(ids, inputs))
    return SelfSpec(extra_sources=[source], **{**FIXED, "sources": (), **knobs})


def assert_clean(model: Any) -> None:
    """No hook of ours, no wrapper, no attribute is left on the model."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            assert "selfspec" not in str(hook.__module__), f"{hook!r} is left on {name!r}"
        assert "forward" not in vars(module), f"a forward is left on {name!r}"
    for name in ("generate", "_get_candidate_generator"):
        assert name not in vars(model), f"{name!r} is left on the model"


def late_token(text: Sequence[int]) -> int:
    """The token that a text brings last for the first time: a good end token.

    >>> late_token([5, 6, 5, 7, 6])
    7
    """
    return list(dict.fromkeys(text))[-1]


@contextmanager
def recorded_forwards(model: Any) -> Iterator[list[int]]:
    """The widths of the forwards inside."""
    widths: list[int] = []

    @of_library
    def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        widths.append(0 if ids is None else ids.shape[1])

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


def refused(
    named: str,
    error: type[Exception] = UnsupportedError,
    *,
    model: Any = None,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Asserts that a call is refused before any forward, by an error that names something."""
    model = attached_model() if model is None else model
    inputs = prompt(2) if inputs is None else inputs
    with recorded_forwards(model) as widths, pytest.raises(error, match=re.escape(named)):
        run(model, inputs, **{**GREEDY, **options})
    assert widths == []
