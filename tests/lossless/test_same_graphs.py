"""Captured graphs change no token: on a device whose replays run operations and no Python.

Every capture works on the very tensors that it was made with, so what a real device would get wrong
comes out wrong here.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from selfspec import SelfSpec
from selfspec.cuda.runner import ForwardKey, StaticRunner
from tests.fakes import new_model, of_library, prompt, tiny_model, with_lora
from tests.lossless.same import (
    FIXED,
    GREEDY,
    SAMPLE,
    Call,
    assert_same_ids,
    doubting,
    few,
    knowing,
    run,
    run_both,
    run_both_on_a_kv,
    slow,
)
from tests.lossless.test_same_architectures import ending
from tests.lossless.test_same_entrances import PEFT_NOTE
from tests.recorder import use_recorders
from tests.zoo import BRANCHING

NOT_CAPTURED = {"llama4": "it scales its queries by their column in the KV"}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return use_recorders(monkeypatch)


def run_graphs(model: Any, inputs: dict[str, Any], spec: SelfSpec | None = None, **options: Any):
    """Stock and captured graphs on one call: the same text, by graphs."""
    both = run_both(model, inputs, spec, **options)
    assert both.stats.forward == "graph"
    assert both.stats.eager_reason is None
    return both


@pytest.mark.parametrize("name", few(BRANCHING))
def test_every_architecture(name: str, call: Call, log: list[str]) -> None:
    model, inputs = tiny_model(name), call.inputs
    both = run_both(model, inputs, **ending(model, inputs, call.options))
    assert both.stats.tokens_per_step > 1.2
    assert both.stats.eager_reason == NOT_CAPTURED.get(name)
    assert (both.stats.forward == "graph") == (name not in NOT_CAPTURED) == ("replay" in log)


@pytest.mark.parametrize("name", [slow("llama"), "gemma3", slow("mistral")])
@pytest.mark.parametrize("num_rows", [1, slow(3)])
def test_texts_that_cross_length_buckets(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    """17 + 250 tokens: keys come in 256 columns, then in more; arenas of 16 more are outgrown."""
    monkeypatch.setattr("selfspec.forward.sizes._MORE_FIXED", 16)
    run_graphs(tiny_model(name), prompt(num_rows), max_new_tokens=250, **SAMPLE)


def test_inference_mode_and_back(log: list[str]) -> None:
    model, spec = new_model("gemma3"), SelfSpec()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            run_both(model, prompt(3), spec, drafts=False, **GREEDY)
            assert spec.stats.forward == "graph"


def compile_the_model(model: Any, backend: Any) -> None:
    model.compile(backend=backend)


def compile_its_forward(model: Any, backend: Any) -> None:
    model.forward = torch.compile(model.forward, backend=backend)


@pytest.mark.parametrize(
    ("compiling", "forward"), [(compile_the_model, "auto"), (compile_its_forward, "eager")]
)
def test_a_model_that_is_compiled_runs_as_it_is(
    compiling: Any, forward: str, log: list[str]
) -> None:
    """torch would compile it anew for each width; its own `generate()` goes on as before."""
    torch._dynamo.reset()  # Else torch compiles nothing once a process has compiled much.
    model, counted = new_model(), CompileCounter()
    stock = run(model, prompt(), **GREEDY)
    compiling(model, counted)
    spec = knowing(stock.ids, prompt(), forward=forward, **FIXED)
    ours = run(model, prompt(), custom_generate=spec, **GREEDY)
    assert_same_ids(ours.ids, stock.ids)
    assert (spec.stats.forward, spec.stats.eager_reason) == (
        "graph" if forward == "auto" else forward,
        None,
    )
    assert counted.frame_count == 0
    assert_same_ids(run(model, prompt(), max_new_tokens=1, **GREEDY).ids, stock.ids[:, :18])
    assert counted.frame_count == 1


@pytest.mark.slow
def test_all_of_these_tests_by_captured_graphs() -> None:
    """In a process of its own, which takes some minutes."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__).parent), "--recorded"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-5000:]


# who may not use graphs, and why


def spread(model: Any) -> None:
    """As `device_map` would; the other device is one that holds no values."""
    model.lm_head.register_parameter("elsewhere", torch.nn.Parameter(torch.empty(2, device="meta")))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
# What is done to which model, and why it can't be captured then.
REASONS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "hook": (
        new_model,
        lambda model: model.register_forward_pre_hook(of_library(lambda *_: None)),
        "it has the hook '<lambda>', whose Python a replay would leave out",
    ),
    "accelerate": (
        new_model,
        lambda model: add_hook_to_module(model.model.layers[1], AlignDevicesHook()),
        "accelerate's hooks move its tensors about",
    ),
    "compiled": (
        new_model,
        lambda model: model.model.layers[0].mlp.compile(backend="eager"),
        "torch.compile runs it",
    ),
    "spread": (new_model, spread, "it is spread over cpu, meta"),
    "experts": (
        partial(new_model, "qwen3-moe"),
        lambda model: model.set_experts_implementation("eager"),
        "capturing it fails",
    ),
    "rope": (
        partial(new_model, rope_parameters=DYNAMIC),
        lambda _: None,
        "its dynamic rotary embedding changes with the length of a forward",
    ),
    "chain": (partial(new_model, "bloom"), lambda _: None, "a chain grows transformers' KV cache"),
}


@pytest.mark.parametrize(("new", "prepare", "reason"), REASONS.values(), ids=REASONS)
def test_a_model_that_can_not_be_captured_goes_on_eagerly(
    new: Callable[[], Any], prepare: Callable[[Any], Any], reason: str, log: list[str]
) -> None:
    model = new()
    prepare(model)
    both = run_both(model, prompt(2), SelfSpec(), drafts=False, **GREEDY)
    assert both.stats.forward == "eager"
    assert reason in str(both.stats.eager_reason)
    assert "replay" not in log


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_router_that_chooses_fewer_experts(name: str, log: list[str]) -> None:
    """Their number is no switch of the config, and a replay would not ask for it."""
    model, inputs, spec = new_model(name), prompt(), SelfSpec(**FIXED)
    for number in (2, 1):
        for layer in model.model.layers:
            layer.mlp.gate.top_k = number
        run_graphs(model, inputs, spec, **GREEDY)
    assert "replay" in log


def test_a_hook_that_comes_and_goes(log: list[str]) -> None:
    """It is heard while it is there; then the graphs of before serve on."""
    model, inputs, heard = new_model(), prompt(), []
    stock = run(model, inputs, **GREEDY)
    spec = knowing(stock.ids, inputs, **FIXED)
    run_graphs(model, inputs, spec, **GREEDY)
    num_captures = log.count("capture")
    handle = model.lm_head.register_forward_hook(of_library(lambda *_: heard.append(1)))
    run_both(model, inputs, spec, **GREEDY)
    assert "has the hook" in str(spec.stats.eager_reason)
    assert len(heard) > spec.stats.num_steps
    handle.remove()
    run_graphs(model, inputs, spec, **GREEDY)
    assert log.count("capture") == num_captures


def test_a_cpu_captures_no_graphs() -> None:
    model, inputs = tiny_model(), prompt()
    asked = run_both(model, inputs, SelfSpec(forward="graph"), drafts=False, **GREEDY)
    assert asked.stats.eager_reason == "a CPU captures no graphs"
    auto = run_both(model, inputs, SelfSpec(), drafts=False, **GREEDY)
    assert (auto.stats.forward in ("eager", "packed"), auto.stats.eager_reason) == (True, None)


def test_eager_asks_for_no_graph(log: list[str]) -> None:
    both = run_both(tiny_model(), prompt(), SelfSpec(forward="eager"), drafts=False, **GREEDY)
    assert (both.stats.forward, both.stats.eager_reason) == ("eager", None)
    assert "capture" not in log


# what changes under a graph


def test_weights_that_are_written_in_place_are_followed(log: list[str]) -> None:
    model, spec, texts = new_model(), SelfSpec(), []
    for _ in range(2):
        texts.append(run_graphs(model, prompt(), spec, drafts=False, **GREEDY).ours.ids)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    assert not torch.equal(*texts)


def move(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def replace_one(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight.data.roll(1, 0))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "moved": move,
    "narrow": lambda model: model.to(torch.bfloat16),
    "one replaced": replace_one,
    "attends eagerly": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changed_is_captured_anew(change: Any, log: list[str]) -> None:
    model, inputs = new_model(), prompt()
    spec = SelfSpec()
    run_graphs(model, inputs, spec, drafts=False, **GREEDY)
    num_captures = log.count("capture")
    change(model)
    run_graphs(model, inputs, spec, drafts=False, **GREEDY)
    assert log.count("capture") > num_captures


@pytest.mark.filterwarnings(PEFT_NOTE)
def test_adapters_that_are_switched(log: list[str]) -> None:
    model, spec, texts = with_lora(new_model(), "one", "other"), SelfSpec(), []
    for name in ("one", "other", "one"):
        model.set_adapter(name)
        texts.append(run_graphs(model, prompt(), spec, drafts=False, **GREEDY).ours.ids.tolist())
    with model.disable_adapter():
        texts.append(run_graphs(model, prompt(), spec, drafts=False, **GREEDY).ours.ids.tolist())
    assert texts[0] == texts[2]
    assert len({str(text) for text in texts}) == 3


def test_autocast_is_no_part_of_a_graph_without(log: list[str]) -> None:
    model, spec = new_model(), SelfSpec()
    run_graphs(model, prompt(), spec, drafts=False, **GREEDY)
    num_captures = log.count("capture")
    with torch.autocast("cpu", torch.bfloat16):
        run(model, prompt(), custom_generate=spec, **GREEDY)
    assert log.count("capture") > num_captures
    run_graphs(model, prompt(), spec, drafts=False, **GREEDY)


# failures


@pytest.mark.parametrize("fails_at", [1, slow(2), slow(3)])
def test_a_failed_capture_leaves_everything_whole(
    fails_at: int, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the trial before the first call, or in its midst: the text and the cache are stock's."""
    log = use_recorders(monkeypatch, fails_at=fails_at)
    model = tiny_model("gemma3")
    stock = run(model, call.inputs, **call.options)
    spec = doubting(stock.ids, call.inputs, **FIXED)
    for _ in range(2):
        both = run_both_on_a_kv(model, call.inputs, "configured", spec, **call.options)
        assert both.stats.forward == "eager"
        reason = "capturing it fails (RuntimeError: operation not permitted"
        assert reason in str(both.stats.eager_reason)
    assert log.count("capture") == fails_at


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets captures of more nodes than this run out of memory, until another number is named."""
    work_of, most = StaticRunner._work, [1 << 30]

    def new_work(runner: StaticRunner, model: Any, key: ForwardKey) -> Callable[[], None]:
        work = work_of(runner, model, key)

        def full() -> None:
            if key.shape.width > most[0] and _get_current_dispatch_mode() is not None:
                raise torch.OutOfMemoryError("on purpose")
            work()

        return full

    monkeypatch.setattr(StaticRunner, "_work", new_work)
    return lambda number: most.__setitem__(0, number)


@pytest.mark.parametrize("limit", [16, 4])
def test_without_memory_for_a_capture_forwards_are_run_eagerly(
    limit: int, short: Callable[[int], None], log: list[str]
) -> None:
    """At the trial before the first call, or in its midst; once there is memory, by graphs."""
    model, inputs = tiny_model(), prompt()
    stock = run(model, inputs, **GREEDY)
    spec = doubting(stock.ids, inputs, budget="fixed", max_nodes=64)
    short(limit)
    both = run_both(model, inputs, spec, **GREEDY)
    assert both.stats.forward == "eager"
    assert "no memory" in str(both.stats.eager_reason)
    assert both.stats.nodes_per_step > 16
    short(64)
    both = run_both(model, inputs, spec, **GREEDY)
    assert (both.stats.forward, both.stats.eager_reason) == ("graph", None)


def test_logits_have_one_buffer_for_all_forwards(log: list[str]) -> None:
    """Of one row as of three, narrow or wide; statistics count it with the slots."""
    model, spec = tiny_model(), SelfSpec(budget="fixed", max_nodes=8)
    for num_rows in (1, 3, 2, 1):
        both = run_graphs(model, prompt(num_rows), spec, drafts=False, **GREEDY)
    runner = spec.runner(model)._captured._runner
    assert isinstance(runner, StaticRunner)
    one = 64 * model.config.vocab_size * 4
    assert both.stats.captured_bytes - runner.kv.nbytes == one


# who shares what


@pytest.mark.parametrize("fails_at", [None, 3])
def test_a_model_that_is_dropped_takes_its_graphs_along(
    fails_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a capture failed in the midst: what runs without a graph then holds the model."""
    use_recorders(monkeypatch, fails_at=fails_at)
    spec, model = SelfSpec(**FIXED), new_model()
    both = run_both(model, prompt(), spec, drafts=False, **GREEDY)
    assert both.stats.forward == ("eager" if fails_at else "graph")
    assert len(spec._runners) == 1
    gone = weakref.ref(model)
    del model, both
    gc.collect()
    assert gone() is None
    assert len(spec._runners) == 0


# costs


@pytest.mark.parametrize(("fails_at", "forwards"), [(None, ["graph"]), (3, ["graph", "eager"])])
def test_the_cost_curve_is_of_the_forward_that_is_used(
    fails_at: int | None, forwards: list[str], measuring: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_recorders(monkeypatch, fails_at=fails_at)
    model, inputs = tiny_model(), prompt()
    spec = knowing(run(model, inputs, **GREEDY).ids, inputs, budget="measured", max_nodes=8)
    both = run_both(model, inputs, spec, drafts=False, **GREEDY)
    assert both.stats.forward == forwards[-1]
    assert [forward for _, forward in spec.runner(model).costs.curves] == forwards
