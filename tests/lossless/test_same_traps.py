"""What no short trial of a model can show: lengths, wrappers, ties that stock has its way with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    PeftConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)

from eval.papers.self_draft import Branches
from selfspec import SelfSpec, attach
from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower
from selfspec.forward.backends import TreeBackend
from selfspec.records import DraftTree, StepRecord
from tests.fakes import VOCAB, new_model, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    SAMPLE,
    Call,
    Outcome,
    assert_same_ids,
    doubting,
    run,
    run_both,
    slow,
    through,
)
from tests.lossless.test_same_entrances import PEFT_NOTE

_LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 5.0, 2.0],
}


def longrope(threshold: int) -> dict[str, Any]:
    """A config whose rotary factors change at a length."""
    return {
        "max_position_embeddings": 512,
        "original_max_position_embeddings": threshold,
        "rope_parameters": {**_LONG, "original_max_position_embeddings": threshold},
    }


def dynamic_rope(threshold: int) -> dict[str, Any]:
    """A config whose rotary base grows with the length, from a length on."""
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    return {"max_position_embeddings": threshold, "rope_parameters": parameters}


@pytest.mark.parametrize("threshold", [10, 16, 17, 18, 30, 56, 57, 90, 300])
@pytest.mark.parametrize(
    ("name", "rope"), [("phi3", longrope), ("llama", dynamic_rope)], ids=["longrope", "dynamic"]
)
def test_rotary_factors_that_hang_on_the_length(
    name: str, rope: Any, threshold: int, call: Call
) -> None:
    """The length is the longest position of a forward: a tree reaches further than its root.

    Short texts of models for long ones are drafted for.
    """
    if rope is dynamic_rope and threshold <= NUM_COLUMNS:
        pytest.skip("stock's second call differs from its first: it keeps the longer one's base")
    model, inputs = new_model(name, **rope(threshold)), call.inputs
    both = run_both(model, inputs, drafts=False, eos_token_id=[15, 81], **call.options)
    assert threshold < 300 or both.stats.num_nodes > both.stats.num_steps


class Telling(Shape):
    """Drafts the answer itself after wrong nodes, in slots that are too late."""

    def __init__(self, answer: list[int]) -> None:
        self.left = answer

    def for_row(self, prompt_ids: Sequence[int], *, learns: bool) -> Shape:
        return Telling(self.left)

    def grow(self, grower: TreeGrower) -> None:
        node: int | None = 0
        for wrong in [token for token in range(8, 13) if token not in self.left][:4]:
            grower.add(0, wrong)
        for token in self.left:
            node = None if node is None else grower.add(node, token)

    def observe(self, record: StepRecord) -> None:
        self.left = self.left[len(record.committed_ids) :]


def test_a_shape_of_ones_own_crosses_no_block_either(monkeypatch: Any) -> None:
    lay_out = TreeBackend.lay_out

    def checked(backend: TreeBackend, rows: Any, trees: Sequence[DraftTree]) -> Any:
        assert max(map(len, trees)) <= backend.max_width(100)
        return lay_out(backend, rows, trees)

    monkeypatch.setattr(TreeBackend, "lay_out", checked)
    model, inputs = new_model("llama4", floor_scale=11, attn_scale=20.0), prompt()
    ids = model.generate(**inputs, max_new_tokens=40, **GREEDY)
    shape = Telling(ids[0, inputs["input_ids"].shape[1] :].tolist())
    spec = SelfSpec(max_nodes=12, budget="fixed", shape=shape)
    both = run_both(model, inputs, spec, max_new_tokens=40, **GREEDY)
    assert both.stats.tokens_per_step > 1


VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
PEFT: dict[str, PeftConfig] = {
    "prompt-tuning": PromptTuningConfig(**VIRTUAL),
    "prefix-tuning": PrefixTuningConfig(**VIRTUAL),
    "ia3": IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
}


@pytest.mark.parametrize("where", ["wrapper", slow("inner")])
@pytest.mark.parametrize("config", PEFT.values(), ids=PEFT)
@pytest.mark.filterwarnings(PEFT_NOTE)
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # peft's own
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")  # peft's own
def test_virtual_tokens(config: PeftConfig, where: str, call: Call) -> None:
    """Prompt learning puts columns into the KV cache that generate() knows nothing of."""
    torch.manual_seed(3)
    model = get_peft_model(new_model(), config).eval()
    attach(model if where == "wrapper" else model.get_base_model())
    inputs = call.inputs
    run_both(model, inputs, SelfSpec(), entrance="assistant", drafts=False, **call.options)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_nothing_left_to_say(num_rows: int) -> None:
    """Where every token is banned, sampling fails as stock's does."""
    model, inputs, banned = tiny_model(), prompt(num_rows), {"suppress_tokens": [*range(VOCAB)]}
    for extra in ({}, {"custom_generate": SelfSpec()}):
        with pytest.raises(RuntimeError, match="probability tensor"):
            run(model, inputs, **banned, **extra, **SAMPLE)
    run_both(model, inputs, drafts=False, **banned, **GREEDY)


@pytest.mark.parametrize(
    ("dtype", "apart"), [(torch.float32, 0.0), (torch.float64, 1e-13)], ids=["fp32", "fp64"]
)
def test_ties(dtype: torch.dtype, apart: float, call: Call) -> None:
    """Each token has a twin: of equal logits, stock takes the first, once rounded to fp32."""
    model = new_model(dtype=dtype)
    weight = model.get_output_embeddings().weight.data
    weight[0:96:2] = weight[1:96:2] * (1 - apart)
    run_both(model, call.inputs, drafts=False, **call.options)


@pytest.mark.parametrize("entrance", ["assistant", "hub"])
def test_what_is_none_on_purpose_stays_none(entrance: str, modules_cache: Any) -> None:
    """`eos_token_id=None` writes on past the end token of the model's generation config."""
    model, inputs = attach(new_model()), prompt()
    endless = run(model, inputs, **GREEDY).ids
    model.generation_config.eos_token_id = int(endless[0, NUM_COLUMNS + 4])
    extra = through(entrance, SelfSpec())
    assert run(model, inputs, **extra, **GREEDY).ids.shape[1] == NUM_COLUMNS + 5
    assert_same_ids(run(model, inputs, eos_token_id=None, **extra, **GREEDY).ids, endless)


def test_right_padding(call: Call) -> None:
    """Stock warns of it and goes on; so do we, to the same text."""
    inputs = call.inputs
    inputs["attention_mask"][:] = 1
    inputs["attention_mask"][0, -4:] = 0
    run_both(tiny_model(), inputs, **call.options)


def test_the_models_own_generation_config() -> None:
    """Sampling, processors and limits may all come from the model's defaults."""
    model = new_model("qwen2")
    config = model.generation_config
    config.do_sample, config.temperature, config.top_k = True, 0.8, 12
    config.repetition_penalty, config.eos_token_id = 1.1, [4, 5]
    config.return_dict_in_generate = config.output_scores = True
    for num_rows in (1, 3):
        both = run_both(model, prompt(num_rows))
        assert len(both.ours.output.scores) == len(both.stock.output.scores)


@pytest.mark.parametrize(("num_read", "num_said"), [(VOCAB, VOCAB - 9), (VOCAB - 9, VOCAB)])
def test_a_head_for_other_ids_than_the_embedding(num_read: int, num_said: int, call: Call) -> None:
    model: Any = new_model(vocab_size=VOCAB - 9)
    wide = new_model()
    if num_read == VOCAB:
        model.set_input_embeddings(wide.get_input_embeddings())
    else:
        model.set_output_embeddings(wide.get_output_embeddings())
        with torch.no_grad():  # Often the second best, and never the best.
            model.lm_head.weight[num_said - 9 :] = 0.98 * model.lm_head.weight[5:14]
    inputs = call.inputs
    inputs["input_ids"] %= num_read
    inputs["input_ids"][:, [-9, -5, -1]] = num_read - 1
    spec = SelfSpec(budget="fixed", shape=Branches(2))
    for _ in range(2):  # The second call knows the first one's text.
        both = run_both(model, inputs, spec, drafts=False, suppress_tokens=None, **GREEDY)
        assert both.stats.num_nodes > both.stats.num_steps


# half precision: stock's text up to near-ties, which other widths round differently

NUM_PROMPTS = 3
_MAX_ULPS = 4  # of bf16, between the tokens that two roundings of the whole model may choose from


def gap_at(logits: torch.Tensor, token: int) -> float:
    """How far stock's logits (V,) put a token behind the best one, in ulps of bf16."""
    best = float(logits.max())
    ulp = 2.0 ** (math.floor(math.log2(max(abs(best), 1e-30))) - 7)
    return (best - float(logits[token])) / ulp


def gaps_between(ours: torch.Tensor, stock: Outcome) -> list[float]:
    """For each row that differs from stock's: the gap where it does so first."""
    gaps = []
    for row, text in enumerate(ours):
        differs = (text != stock.ids[row]).nonzero()
        if len(differs):
            column = int(differs[0])
            logits = stock.output.logits[column - NUM_COLUMNS][row]
            gaps.append(gap_at(logits, int(text[column])))
    return gaps


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma3", slow("qwen3-moe")])
def test_bf16(name: str, num_rows: int) -> None:
    model = new_model(name, dtype=torch.bfloat16)
    gaps = []
    for seed in range(NUM_PROMPTS):
        inputs = prompt(num_rows, seed=seed)
        stock = run(model, inputs, return_dict_in_generate=True, output_logits=True, **GREEDY)
        spec = doubting(stock.ids, inputs, seed=seed)
        ours = run(model, inputs, custom_generate=spec, **GREEDY).ids
        assert ours.shape == stock.ids.shape == (num_rows, NUM_COLUMNS + NUM_NEW)
        assert spec.stats.disabled_reason is None
        gaps += gaps_between(ours, stock)
    assert max(gaps, default=0.0) <= _MAX_ULPS
