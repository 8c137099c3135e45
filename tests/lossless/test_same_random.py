"""Random calls: what was not thought of, in combinations that nobody would write down.

Each call is made of its seed alone, so a failure names all that it takes to see it again.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from eval.papers.self_draft import Branches
from selfspec import SelfSpec, generate_many
from selfspec.compat.generation import KV
from selfspec.compat.states import states_by_place
from tests.fakes import VOCAB, WildSource, new_model, of_library, tiny_model, tiny_tokenizer
from tests.lossless.same import (
    assert_begins,
    assert_same_ids,
    assert_same_kv,
    attached,
    doubting,
    run,
    some,
)
from tests.lossless.test_same_failures import Broken, Fuse, Told
from tests.lossless.test_same_positions import with_odd_steps
from tests.lossless.test_same_streamers import Recorder
from tests.recorder import use_recorders

HYBRIDS = ("qwen3-5", "kimi-linear", "falcon-h1", "lfm2")
NAMES = ("llama", "mistral", "gemma3", "gpt2", "gpt-oss", "qwen3-moe", "bloom", "llama4", *HYBRIDS)
CHAINS = ("bloom",)
STRINGS = ["a", "th", "e ", "ra", "on"]
PLACES = ("processor", "criterion", "streamer", "forward")


@cache
def moved_model(name: str, move: str | None) -> Any:
    """A tiny model that moves positions in its plain steps, where stock can."""
    is_table = name == "gpt2" and move == "floats"  # It looks positions up.
    is_plain = move is None or is_table or name in HYBRIDS
    return tiny_model(name) if is_plain else with_odd_steps(new_model(name), move)


class RandomCall:
    """One call of `generate()` that a seed stands for."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.seed = seed
        self.name = dice.choice(NAMES)
        self.move = dice.choice([None, None, "shifted", "dropped", "floats", "doubled"])
        self.model = moved_model(self.name, self.move)
        self.num_rows = dice.choice([1, 1, 2, 3])
        self.inputs = self._inputs()
        self.options = self._options()
        self.num_rows *= self.options.get("num_return_sequences", 1)
        self.has_kv = dice.random() < 0.4 and "num_return_sequences" not in self.options
        self.breaks = dice.choice(PLACES) if dice.random() < 0.3 else None
        self.breaks_at = dice.randrange(1, 12)
        self.error = dice.choice([Broken, KeyboardInterrupt])
        self.streams = self.breaks == "streamer" or dice.random() < 0.2
        # Stock's own windows and criteria make tensors that name no device.
        stays = self.name in ("llama", "gpt2", "bloom") and self.breaks != "criterion"
        stays = stays and not (
            self.criteria() or {"eos_token_id", "stop_strings"} & {*self.options}
        )
        self.on_meta = stays and dice.random() < 0.6

    def _inputs(self) -> dict[str, torch.Tensor]:
        dice, length = self.dice, self.dice.randrange(1, 24)
        ids = torch.tensor(
            [[dice.randrange(1, VOCAB) for _ in range(length)] for _ in range(self.num_rows)],
            dtype=dice.choice([torch.int32, torch.int64, torch.int64]),
        )
        mask = torch.ones_like(ids)
        for row in range(1, self.num_rows):
            num_pads = dice.choice([length, *[dice.randrange(length)] * 4])
            ids[row, :num_pads] = mask[row, :num_pads] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def _options(self) -> dict[str, Any]:
        dice = self.dice
        options: dict[str, Any] = {"max_new_tokens": dice.randrange(1, 30)}
        if dice.random() < 0.5:
            options |= {"do_sample": True, "temperature": dice.choice([0.5, 0.9, 1.3])}
            options |= {"top_k": dice.choice([0, 5, 40]), "top_p": dice.choice([0.7, 1.0])}
        else:
            options["do_sample"] = False
        if dice.random() < 0.6:
            options["eos_token_id"] = dice.sample(range(1, VOCAB), dice.randrange(1, 6))
        if dice.random() < 0.3:
            options["min_new_tokens"] = min(dice.randrange(1, 9), options["max_new_tokens"])
        if self.inputs["input_ids"].dtype == torch.int64 and dice.random() < 0.3:
            options["repetition_penalty"] = dice.choice([0.8, 1.3])  # Stock's needs int64.
        if dice.random() < 0.3:
            options |= {"stop_strings": dice.sample(STRINGS, 2), "tokenizer": tiny_tokenizer()}
        if dice.random() < 0.3:
            options["return_dict_in_generate"] = True
            options["output_scores"] = dice.random() < 0.5
        if options["do_sample"] and dice.random() < 0.2:
            options["num_return_sequences"] = 2
        return options

    @property
    def may_be_chains(self) -> bool:
        return self.name in CHAINS or self.move in ("dropped", "doubled")

    def criteria(self) -> list[Any]:
        """Criteria of the caller's: up to two of each kind, in any order."""
        dice = random.Random(self.seed + 1)
        length = self.inputs["input_ids"].shape[1]
        made: list[Any] = []
        if dice.random() < 0.4:
            numbers = [dice.randrange(1, length + 40) for _ in range(dice.randrange(1, 3))]
            made += map(MaxLengthCriteria, numbers)
        if "eos_token_id" in self.options and dice.random() < 0.4:
            kinds: list[Any] = [torch.tensor(7), [5, 6], torch.tensor([[11], [12]]), 9]
            made += map(EosTokenCriteria, dice.sample(kinds, dice.randrange(1, 3)))
        if dice.random() < 0.3:
            for _ in range(dice.randrange(1, 3)):
                made.append(StopStringCriteria(tiny_tokenizer(), dice.sample(STRINGS, 2)))
        dice.shuffle(made)
        return made

    def spec(self, ids: torch.Tensor) -> SelfSpec:
        dice = random.Random(self.seed + 2)
        knobs: dict[str, Any] = {"max_nodes": dice.choice([2, 6, 16, 40])}
        knobs["shape"] = dice.choice([None, None, Branches(2)])
        knobs["learning"] = dice.choice(["session", "request", "frozen"])
        return doubting(ids, self.inputs, seed=self.seed, **knobs)

    def extras(self, *, breaks: bool) -> dict[str, Any]:
        """The arguments that a call uses up."""
        fuse = Fuse(self.error, self.breaks_at) if breaks else None
        extras: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList(self.criteria())}
        if self.has_kv:
            extras[KV] = self._kv()
        if fuse is not None and self.breaks == "criterion":
            extras["stopping_criteria"].append(fuse.stop)
        if fuse is not None and self.breaks == "processor":
            extras["logits_processor"] = [fuse.process]
        if self.streams and self.num_rows == 1:
            extras["streamer"] = Told(fuse if self.breaks == "streamer" else None)
        return extras

    def _kv(self) -> DynamicCache:
        """A cache of the caller's, which may hold the beginning of a prompt without pads."""
        kv, ids = DynamicCache(config=self.model.config), self.inputs["input_ids"]
        num_known = random.Random(self.seed + 3).choice([0, 0, 1, 5])
        if self.inputs["attention_mask"].all() and ids.shape[1] > num_known > 0:
            with torch.no_grad():
                self.model(input_ids=ids[:, :num_known], use_cache=True, **{KV: kv})
        return kv

    def run(self, extras: dict[str, Any], **more: Any) -> Any:
        with torch.device("meta") if self.on_meta else nullcontext():
            return run(self.model, self.inputs, seed=self.seed, **self.options, **extras, **more)

    def check(self) -> None:
        """Stock and ours, to the end; then ours broken off, if this call is."""
        stock_extras, our_extras = self.extras(breaks=False), self.extras(breaks=False)
        stock = self.run(stock_extras)
        spec = self.spec(stock.ids)
        if self.dice.random() < 0.2:
            our_extras["prediction"] = stock.ids[0, self.inputs["input_ids"].shape[1] :].tolist()
        if self.dice.random() < 0.3:  # A call before, which is learned from.
            self.run(self.extras(breaks=False), custom_generate=spec)
        with torch.inference_mode(self.dice.random() < 0.1):
            ours = self.run(our_extras, custom_generate=spec)
        assert ours.ids.dtype == stock.ids.dtype
        assert_same_ids(ours.ids, stock.ids)
        assert torch.equal(ours.rng_state, stock.rng_state)
        assert spec.stats.disabled_reason is None or self.may_be_chains
        if self.has_kv and self.name in HYBRIDS:
            assert_same_states(our_extras[KV], stock_extras[KV])
        elif self.has_kv:
            assert_same_kv(our_extras[KV], stock_extras[KV])
        if "streamer" in our_extras:
            assert_same_told(our_extras["streamer"], stock_extras["streamer"])
        if self.breaks is not None:
            self._check_broken_off(stock.ids, stock_extras.get(KV))

    def _check_broken_off(self, whole: torch.Tensor, whole_kv: Any) -> None:
        extras = self.extras(breaks=True)
        handle = None
        spec = self.spec(whole)
        spec.support(self.model)  # Found out before, so that the fuse burns in the call.
        if self.breaks == "forward":
            lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
            # Of a prompt's forward that breaks off, stock too leaves what the first layers read.
            fuse = Fuse(self.error, self.breaks_at + 1)
            handle = lists[0][-1].register_forward_pre_hook(of_library(lambda *_: fuse.burn()))
        try:
            self.run(extras, custom_generate=spec)
        except (Broken, KeyboardInterrupt):
            pass
        finally:
            if handle is not None:
                handle.remove()
        if self.has_kv:
            assert_begins(extras[KV], whole_kv)


def assert_same_told(ours: Recorder, stock: Recorder) -> None:
    assert [str(each) for each in ours.told] == [str(each) for each in stock.told]


def assert_same_states(ours: DynamicCache, stock: DynamicCache) -> None:
    """All running states, beside the keys of the layers that have some."""
    mine, theirs = (states_by_place(kv.layers) for kv in (ours, stock))
    assert mine.keys() == theirs.keys()
    pairs = [(mine[place], state) for place, state in theirs.items()]
    pairs += [
        (our_layer.keys, layer.keys)
        for our_layer, layer in zip(ours.layers, stock.layers, strict=True)
        if getattr(layer, "keys", None) is not None
    ]
    for held, true in pairs:
        assert held.shape == true.shape
        assert torch.allclose(held, true, rtol=1e-4, atol=1e-4)


def check_many(seed: int) -> None:
    """Rows that come and go: each text is what stock gives for that prompt alone."""
    dice, call = random.Random(seed), RandomCall(seed)
    name = dice.choice(["llama", "mistral", "gemma3", "gpt2", "bloom", *HYBRIDS])
    move = dice.choice([None, "shifted", "dropped", "floats", "doubled"])
    model = moved_model(name, move)
    left_out = ("return_dict_in_generate", "output_scores", "num_return_sequences", "tokenizer")
    options = {name: value for name, value in call.options.items() if name not in left_out}
    options["stopping_criteria"] = StoppingCriteriaList(call.criteria())
    strings = {"tokenizer": tiny_tokenizer()} if "stop_strings" in options else {}
    given = [
        [dice.randrange(1, VOCAB) for _ in range(dice.randrange(1, 40))]
        for _ in range(dice.randrange(1, 9))
    ]
    spec = SelfSpec(extra_sources=[WildSource(seed=seed)], budget="fixed", max_nodes=8)
    sizes: dict[str, Any] = {"max_rows": dice.randrange(1, 6), "seed": seed}
    with attached(model):
        answers = list(
            generate_many(model, tiny_tokenizer(), given, assistant=spec, **sizes, **options)
        )
    assert sorted(answer.index for answer in answers) == list(range(len(given)))
    for answer in answers:
        ids = torch.tensor([given[answer.index]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        stock = run(model, inputs, seed=seed + answer.index, **options, **strings)
        assert answer.ids == stock.ids[0, ids.shape[1] :].tolist(), f"prompt {answer.index}"


@pytest.mark.parametrize("seed", some(range(40)))
def test_any_call(seed: int) -> None:
    RandomCall(seed).check()


@pytest.mark.parametrize("seed", some(range(10)))
def test_any_prompts(seed: int) -> None:
    check_many(seed)


@pytest.mark.parametrize("seed", some(range(100, 140)))
def test_any_call_by_graphs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays run operations and no Python, and work beside the main stream comes late."""
    log, call = use_recorders(monkeypatch), RandomCall(seed)
    call.check()
    assert "replay" in log or call.may_be_chains or call.name == "llama4"
