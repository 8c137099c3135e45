"""With its own rounded weights as draft model, a model writes what it writes without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import ConfigError, SelfSpec, attach, load
from selfspec.neural import rounded_copy as module
from selfspec.neural.rounded_copy import RoundedCopy
from selfspec.weights.packing import is_packed_in_place
from selfspec.weights.rounded_model import bytes_of_rounded
from selfspec.weights.streamed import loading
from tests.fakes import new_model, packs_here, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import FIXED, GREEDY, MODES, NUM_NEW, few, in_threads, run, run_both, slow
from tests.sessions import TextSession
from tests.streamed import load_tightly, saved_model
from tests.zoo import BRANCHING

ALONE: dict[str, Any] = {"sources": (), **FIXED}


@pytest.mark.parametrize("bits", ["int8", slow("int4")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", few(BRANCHING))
def test_any_family(name: str, mode: str, bits: str) -> None:
    """Windows are shorter than the prompt. Those whose copy is left out say why.

    In 8 bits it names nearly every token, also of those that are drawn.
    """
    spec = SelfSpec(draft_model=bits, **ALONE)
    stats = run_both(tiny_model(name), prompt(length=40), spec, drafts=False, **MODES[mode]).stats
    assert (stats.draft_model_reason is None) == (stats.num_draft_forwards > 0)
    assert (stats.draft_model_reason is None) == (stats.accepted_by_source.total() > 0)
    if bits == "int8" and name in ("llama", "gemma3", "mistral"):
        assert stats.tokens_per_step > 5
        assert stats.draft_model_bytes > 0


@pytest.mark.parametrize("mode", MODES)
def test_beside_tables_and_in_later_calls(mode: str) -> None:
    spec = SelfSpec(draft_model="int8", **FIXED)
    for seed in range(3):
        run_both(tiny_model(), prompt(seed=seed), spec, seed=seed, **MODES[mode])


@pytest.mark.parametrize(
    ("mode", "value"), [("sample", None), ("greedy", float("nan")), ("sample", 1e30)]
)
def test_a_hostile_copy(mode: str, value: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights, or of weights that lead to no number."""
    values = module._values

    def wrong(weight: torch.Tensor) -> torch.Tensor:
        shape, dice = values(weight).shape, torch.Generator().manual_seed(1)
        return torch.randn(shape, generator=dice) if value is None else torch.full(shape, value)

    monkeypatch.setattr(module, "_values", wrong)
    spec = SelfSpec(draft_model="int8", sources=("context",), **FIXED)
    both = run_both(new_model(), prompt(), spec, drafts=False, **MODES[mode])
    assert both.stats.num_draft_forwards > 0


def test_weights_that_change_make_it_worse() -> None:
    model, spec = new_model(), SelfSpec(draft_model="int8", **ALONE)
    before = run_both(model, prompt(), spec, **GREEDY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.0 + 0.5 * torch.rand_like(weight))
    after = run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert before.ours.ids.tolist() != after.ours.ids.tolist()
    assert before.stats.num_steps < after.stats.num_steps


def test_no_hook_of_the_model_runs_in_it() -> None:
    model, calls = new_model(), list[int]()
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    spec = SelfSpec(draft_model="int8", trust_hooks=True, **ALONE)
    run(model, prompt(), custom_generate=spec, **GREEDY)  # The model is tried.
    calls.clear()
    run(model, prompt(), custom_generate=spec, **GREEDY)
    assert len(calls) == spec.stats.num_steps + 1
    assert spec.stats.num_draft_forwards > len(calls)
    handle.remove()


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_its_forward(
    error: type[BaseException], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts nothing more in this call, which an interrupt ends."""
    model, spec = new_model(), SelfSpec(draft_model="int8", **ALONE)
    copy = module.rounded_copy(model, "int8")
    assert isinstance(copy, RoundedCopy)
    forward, calls = copy.run, list[int]()

    def failing(**arguments: Any) -> Any:
        calls.append(1)
        output = forward(**arguments)
        if len(calls) == at:
            raise error("on purpose")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(copy, "run", failing)
        if error is ValueError:
            run_both(model, prompt(), spec, drafts=False, **GREEDY)
            assert len(calls) == at
        else:
            with pytest.raises(KeyboardInterrupt):
                run(model, prompt(), custom_generate=spec, **GREEDY)
    assert run_both(model, prompt(), spec, **GREEDY).stats.tokens_per_step > 5


def test_threads_share_it() -> None:
    model, spec = new_model(), SelfSpec(draft_model="int8", **ALONE)
    expected = [run(model, prompt(seed=seed), **GREEDY).ids for seed in range(4)]
    texts: dict[int, Any] = {}

    def write(seed: int) -> None:
        inputs = prompt(seed=seed)
        texts[seed] = model.generate(
            **inputs, assistant=spec, max_new_tokens=NUM_NEW, pad_token_id=0, **GREEDY
        )

    attach(model)
    in_threads(write, 4, 4)
    assert [texts[seed].tolist() for seed in range(4)] == [ids.tolist() for ids in expected]


LEFT_OUT: dict[str, tuple[str, int, str]] = {
    "rows": ("llama", 3, "several texts share its forwards"),
    "states": ("lfm2", 1, "running states"),
    "chains": ("bloom", 1, "no trees are verified"),
    "no linear layers": ("gpt2", 1, "in no linear layers"),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_where_it_is_left_out_it_says_why(what: str) -> None:
    name, num_rows, reason = LEFT_OUT[what]
    spec = SelfSpec(draft_model="int8", **ALONE)
    both = run_both(tiny_model(name), prompt(num_rows), spec, drafts=False, **GREEDY)
    assert both.stats.num_draft_forwards == 0
    assert reason in str(both.stats.draft_model_reason)
    assert reason in str(both.stats)


def test_no_code_of_a_users_runs_for_it() -> None:
    """Not even to try the copy."""
    calls = list[int]()

    class Own(type(tiny_model())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().forward(*args, **kwargs)

    model = new_model()
    model.__class__ = Own
    spec = SelfSpec(draft_model="int8", **ALONE)
    outcome = run(model, prompt(), custom_generate=spec, **GREEDY)
    assert len(calls) == outcome.ids.shape[1] - prompt()["input_ids"].shape[1]
    assert spec.stats.draft_model_bytes == 0


def test_rows_that_come_and_go_are_drafted_for_by_others() -> None:
    session = TextSession(
        tiny_model(), tiny_tokenizer(), SelfSpec(draft_model="int8", **ALONE), max_rows=3
    )
    for index in range(3):
        session.submit(index, [5 + index, 6, 7], 0, {"max_new_tokens": 6 + 9 * index})
        session.step()
    texts = {answer.index: answer.ids for answer in session.work()}
    for index, ids in texts.items():
        inputs = {"input_ids": torch.tensor([[5 + index, 6, 7]])}
        stock = run(tiny_model(), inputs, max_new_tokens=6 + 9 * index, **GREEDY).ids
        assert ids == stock[0, 3:].tolist()


@pytest.mark.parametrize("name", ["int2", "INT4", "", 4])
def test_another_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"'int4' or 'int8'.*got"):
        SelfSpec(draft_model=name)


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a small model, which would leave its memory to layers."""
    monkeypatch.setattr(loading, "copy_pays", lambda *_: True)


@pytest.mark.parametrize(
    ("mode", "bits"),
    [("greedy", "int8"), ("sample", "int4"), slow("sample", "int8"), slow("greedy", "int4")],
)
@pytest.mark.usefixtures("pays")
def test_streamed(mode: str, bits: str, tmp_path: Path) -> None:
    """What stands for streamed layers stays in memory, within `max_memory`."""
    stock = saved_model(tmp_path)
    model = load_tightly(tmp_path, draft_model=bits)
    spec = SelfSpec(draft_model=bits, **ALONE)
    for _ in range(2):
        ids = run(model, prompt(), custom_generate=spec, **MODES[mode]).ids
        assert ids.tolist() == run(stock, prompt(), **MODES[mode]).ids.tolist()
    assert spec.stats.forward == "streamed"
    assert spec.stats.draft_model_reason is None
    assert spec.stats.tokens_per_step > (5 if bits == "int8" else 1.2)
    planned = sum(bytes_of_rounded(layer, int(bits[-1])) for layer in stock.model.layers)
    assert spec.stats.draft_model_bytes == planned


def test_where_more_layers_bring_more_it_is_left_out(tmp_path: Path) -> None:
    stock = saved_model(tmp_path, num_hidden_layers=24)
    model = load(str(tmp_path), max_memory="100%", max_length=1, draft_model="int8")
    spec = SelfSpec(draft_model="int8", **ALONE)
    ids = run(model, prompt(), custom_generate=spec, **GREEDY).ids
    assert ids.tolist() == run(stock, prompt(), **GREEDY).ids.tolist()
    assert "layers that stay in memory bring more" in str(spec.stats.draft_model_reason)
    assert spec.stats.draft_model_bytes == 0


@pytest.mark.usefixtures("packs_at_once")
def test_weights_that_are_packed_in_place_stay_packed(tmp_path: Path) -> None:
    stock = saved_model(tmp_path)
    model, spec = load(str(tmp_path)), SelfSpec(draft_model="int8", **ALONE)
    packed = [is_packed_in_place(part) for part in model.modules()]
    ids = run(model, prompt(), custom_generate=spec, **GREEDY).ids
    assert ids.tolist() == run(stock, prompt(), **GREEDY).ids.tolist()
    assert spec.stats.tokens_per_step > 5
    assert [is_packed_in_place(part) for part in model.modules()] == packed
    assert any(packed) or not packs_here()
