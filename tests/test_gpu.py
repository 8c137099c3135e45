"""On a CUDA device: same text, same generator state, however forwards are run."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

import selfspec
from selfspec.ability.probe import attention_for_trees
from selfspec.compat.generation import KV
from selfspec.forward.backends import TreeBackend
from selfspec.forward.model import AttentionTypes
from selfspec.machine.device import CudaDevice
from selfspec.records import DraftTree
from selfspec.verify.tape import NoiseTape
from tests.fakes import VOCAB, new_model, prompt, tiny_tokenizer
from tests.lossless.same import FIXED, GREEDY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),
]

SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
ASKED = {"greedy": GREEDY, "penalty": {**GREEDY, "repetition_penalty": 1.2}, "sample": SAMPLE}
FORWARDS = ("eager", "graph")


def on_gpu(
    dtype: torch.dtype = torch.float32, name: str = "llama", **changes: Any
) -> PreTrainedModel:
    return selfspec.attach(new_model(name, dtype=dtype, **changes).to("cuda"))


def prompts(num_rows: int, length: int = 17, *, seed: int = 1) -> dict[str, torch.Tensor]:
    inputs = prompt(num_rows, length, seed=seed)
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def check_same(
    model: PreTrainedModel, spec: selfspec.SelfSpec, inputs: dict[str, Any], **asked: Any
) -> None:
    """Stock's ids, and its generator state behind them."""
    outputs, states = [], []
    for extra in ({}, {"custom_generate": spec}):
        torch.manual_seed(5)
        outputs.append(model.generate(**inputs, **{"max_new_tokens": 48, **asked, **extra}))
        states.append(torch.cuda.get_rng_state())
    assert torch.equal(*outputs)
    assert torch.equal(*states)
    assert spec.stats.disabled_reason is None


@pytest.fixture(autouse=True)
def own_costs(measuring: None) -> None:
    """What a forward costs is measured here, and found anew by every test."""


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("forward", FORWARDS)
def test_same_text_and_generator_state(forward: str, asked: dict[str, Any], num_rows: int) -> None:
    model = on_gpu()
    spec = selfspec.SelfSpec(forward=forward, budget="fixed", max_nodes=8)
    for _ in range(2):
        check_same(model, spec, prompts(num_rows), **asked)
        assert (spec.stats.forward, spec.stats.eager_reason) == (forward, None)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "name", ["gemma3", "gpt2", "phi3", "mistral", "qwen3-moe", "deepseek-v3", "gpt-oss"]
)
def test_architectures_by_graphs(name: str, num_rows: int) -> None:
    """Or, where one can't be captured, eagerly with the reason."""
    model, spec = on_gpu(name=name), selfspec.SelfSpec(**FIXED)
    for asked in (GREEDY, SAMPLE):
        check_same(model, spec, prompts(num_rows), **asked)
        assert (spec.stats.forward == "graph") == (spec.stats.eager_reason is None)


def test_rows_that_come_and_go_by_graphs() -> None:
    model, spec = on_gpu(), selfspec.SelfSpec(**FIXED)
    given = [list(range(3, 3 + length)) for length in (9, 31, 1, 14, 5)]
    for _ in range(2):
        for answer in selfspec.generate_many(
            model, tiny_tokenizer(), given, assistant=spec, max_rows=3, max_new_tokens=24
        ):
            ids = torch.tensor([given[answer.index]], device="cuda")
            stock = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24)
            assert answer.ids == stock[0, ids.shape[1] :].tolist()
            assert (answer.stats.forward, answer.stats.eager_reason) == ("graph", None)


def test_long_contexts() -> None:
    model = on_gpu(max_position_embeddings=8192)
    spec = selfspec.SelfSpec(forward="graph", **FIXED)
    for num_rows in (1, 2):
        check_same(model, spec, prompts(num_rows, 3000), **GREEDY)
        assert spec.stats.forward == "graph"


def path_logits(
    model: PreTrainedModel, ids: torch.Tensor, path: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, V) of a path: in a tree, with a wrong child before each right one, and plainly."""
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, **{KV: cache}, use_cache=True)
    types = attention_for_trees(model)
    assert isinstance(types, AttentionTypes)
    positions = torch.full((1, 1), ids.shape[1], device="cuda")
    backend = TreeBackend(model, types)
    rows = backend.add(cache, positions)
    tree, nodes = DraftTree.of_root(path[0]), [0]
    for token in path[1:]:
        tree.add(nodes[-1], (token + 1) % VOCAB, 0.5)
        nodes.append(tree.add(nodes[-1], token, 0.4))
    of_tree = backend.lay_out(rows, [tree])()[0, nodes]
    whole = torch.cat([ids, torch.tensor([list(path)], device="cuda")], dim=1)
    with sdpa_kernel(SDPBackend.MATH):
        plain = model(input_ids=whole, use_cache=False).logits[0, ids.shape[1] :]
    return of_tree.float(), plain.float()


@pytest.mark.parametrize("length", [200, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_exact_logits(dtype: torch.dtype, length: int) -> None:
    """No farther from those of float32 than the math kernel's, but for a factor."""
    ids, path = prompts(1, length)["input_ids"], range(3, 15)
    changes = {"max_position_embeddings": 4096}
    with torch.no_grad():
        _, exact = path_logits(on_gpu(**changes), ids, path)
        of_tree, plain = path_logits(on_gpu(dtype, **changes), ids, path)
    assert (of_tree - exact).norm() <= 2 * (plain - exact).norm()


def test_a_capture_beside_a_thread_that_samples() -> None:
    """Greedy text here, since the draws of the other thread move the one generator."""
    model, other, spec = on_gpu(), on_gpu(name="gemma3"), selfspec.SelfSpec(**FIXED)
    expected = model.generate(**prompts(2), max_new_tokens=64, **GREEDY)
    stop, errors, num_texts = threading.Event(), [], []

    def sample() -> None:
        try:
            while not stop.is_set():
                num_texts.append(other.generate(**prompts(1), max_new_tokens=8, **SAMPLE))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for _ in range(3):
            ids = model.generate(**prompts(2), max_new_tokens=64, assistant=spec, **GREEDY)
            assert torch.equal(ids, expected)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert num_texts
    assert (spec.stats.forward, spec.stats.eager_reason) == ("graph", None)


def memory_in_use() -> int:
    """On the card; an attached model refers to itself, so only the garbage collector frees it."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def break_captures(patch: pytest.MonkeyPatch, fails_at: int) -> None:
    """Captures from this one on break off, with the model's own work under way."""
    number, capture = count(1), CudaDevice.capture

    def failing(self: CudaDevice, work: Any) -> Any:
        if next(number) < fails_at:
            return capture(self, work)

        def broken() -> None:
            work()
            if torch.cuda.is_current_stream_capturing():
                torch.zeros(1, device="cuda").item()

        return capture(self, broken)

    patch.setattr(CudaDevice, "capture", failing)


@pytest.mark.parametrize("fails_at", [1, 2, 1000])
def test_a_dropped_model_leaves_no_memory_behind(fails_at: int) -> None:
    """With all that belongs to it, also if a capture broke off; then another one is captured."""

    def run_it() -> None:
        model, spec = on_gpu(), selfspec.SelfSpec(**FIXED)
        with pytest.MonkeyPatch.context() as patch:
            break_captures(patch, fails_at)
            check_same(model, spec, prompts(1), **GREEDY)
        assert ("capturing it fails" in str(spec.stats.eager_reason)) == (fails_at < 1000)

    run_it()
    before = memory_in_use()
    for _ in range(3):
        run_it()
    assert memory_in_use() <= before + 2**20
    spec = selfspec.SelfSpec(forward="graph", **FIXED)
    check_same(on_gpu(), spec, prompts(1), **SAMPLE)
    assert (spec.stats.forward, spec.stats.eager_reason) == ("graph", None)


def test_a_step_waits_once() -> None:
    """For its tokens, by an event. Torch counts all other waits, and longer texts have no more.

    The first text makes the slots and all captures, which wait too.
    """
    model, counts = on_gpu(), []
    spec = selfspec.SelfSpec(learning="frozen", forward="graph", **FIXED)
    for length in (96, 24, 96):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                model.generate(**prompts(1), max_new_tokens=length, assistant=spec, **GREEDY)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchronizing" in str(wait.message) for wait in waits))
    assert counts[2] <= counts[1] + 4, [str(wait.message) for wait in waits]


@pytest.mark.parametrize("asked", [GREEDY, SAMPLE], ids=["greedy", "sample"])
def test_a_draft_model(asked: dict[str, Any]) -> None:
    model, draft = on_gpu(), on_gpu(num_hidden_layers=1)
    spec = selfspec.SelfSpec(draft_model=draft, **FIXED)
    check_same(model, spec, prompts(1), **asked)
    assert spec.stats.num_draft_forwards > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("forward", FORWARDS)
def test_the_second_device(forward: str) -> None:
    """The first one is neither drawn from nor waited for."""
    model, states = new_model().to("cuda:1"), []
    given = {name: tensor.to("cuda:1") for name, tensor in prompt().items()}
    spec, texts = selfspec.SelfSpec(forward=forward, **FIXED), []
    first = torch.cuda.get_rng_state(0)
    for extra in ({}, {"custom_generate": spec}):
        torch.cuda.default_generators[1].manual_seed(5)
        texts.append(model.generate(**given, max_new_tokens=48, **extra, **SAMPLE))
        states.append(torch.cuda.get_rng_state(1))
    assert torch.equal(*texts)
    assert torch.equal(*states)
    assert torch.equal(torch.cuda.get_rng_state(0), first)
    assert (spec.stats.forward, spec.stats.eager_reason) == (forward, None)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_every_forward(dtype: torch.dtype, forward: str) -> None:
    """Near-ties may fall differently, so no text is compared."""
    spec = selfspec.SelfSpec(forward=forward, budget="fixed", max_nodes=8)
    on_gpu(dtype).generate(**prompts(2), max_new_tokens=24, assistant=spec)
    assert (spec.stats.forward, spec.stats.eager_reason) == (forward, None)


def test_ids_on_the_cpu_are_served() -> None:
    model = on_gpu(torch.float32)
    inputs = prompt(3)
    stock = model.generate(**inputs, max_new_tokens=20)
    ours = model.generate(**inputs, max_new_tokens=20, assistant=selfspec.SelfSpec())
    assert torch.equal(ours.cpu(), stock.cpu())


def test_what_is_sent_may_be_overwritten_at_once() -> None:
    """The copy waits for earlier work, and a draft model's text is sent in many parts."""
    device = CudaDevice(torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    hosts = [torch.empty(512, dtype=torch.long), torch.empty(512, dtype=torch.long).pin_memory()]
    arrived = []
    for part in range(12):
        busy = busy @ busy / 64
        host, into = hosts[part % 2], torch.empty(512, dtype=torch.long, device="cuda")
        host.fill_(part)
        device.send(host, into=into)
        host.fill_(-1)
        arrived.append(into)
    assert [each.unique().tolist() for each in arrived] == [[part] for part in range(12)]


def test_noise_that_was_forgotten_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row reads its noise when that of both was drawn and forgotten."""
    monkeypatch.setattr("selfspec.verify.tape._MOST_BYTES", 1)
    table = torch.randn(6, 2, 5000, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    torch.manual_seed(3)
    expected = [torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist() for scores in table]
    state = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    tape = NoiseTape(2)
    drawn = [
        [tape.draw(scores[row], row, step) for step, scores in enumerate(table)] for row in (0, 1)
    ]
    assert [list(tokens) for tokens in zip(*drawn, strict=True)] == expected
    assert torch.equal(torch.cuda.get_rng_state(), state)
