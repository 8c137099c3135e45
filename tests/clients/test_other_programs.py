"""Programs that call `generate()` themselves, with the lines of `docs/other-programs.md`.

A test is skipped where its program isn't installed. A program writes the same text with selfspec.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import pipeline

from selfspec import SelfSpec, attach
from selfspec import runner as run
from selfspec.cli import app
from tests.tiny import make_model, make_tokenizer
from tests.waiting import free_port, is_open, wait_until

# Programs warn of each other's versions.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

_CLI = "transformers.cli.transformers"
_JSON = {"content-type": "application/json"}
MESSAGES = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT = "the quick brown fox jumps over the lazy dog\nthe quick"
Given = Callable[[Any], Any]


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return make_model(len(tokenizer)).eval()


def drafted(program: Callable[[Given], Any]) -> SelfSpec:
    """Lets a program write twice, the second time with drafts. It must hand its model over."""
    spec = SelfSpec(budget="fixed")
    texts = []
    for given in (lambda model: model, lambda model: attach(model, spec)):
        torch.manual_seed(0)
        texts.append(program(given))
    assert texts[0] == texts[1]
    assert spec.stats.disabled_reason is None
    assert spec.stats.num_nodes > spec.stats.num_steps
    return spec


def test_lm_eval(model: Any, tokenizer: Any) -> None:
    instance = pytest.importorskip("lm_eval.api.instance")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    told = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}
    asked = [instance.Instance("generate_until", {}, (PROMPT, told), 0)]

    def program(given: Given) -> Any:
        evaluated = huggingface.HFLM(pretrained=given(model), tokenizer=tokenizer)
        return evaluated.generate_until(asked, disable_tqdm=True)

    drafted(program)


def test_smolagents(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    smolagents = pytest.importorskip("smolagents")
    tokenizer.chat_template = MESSAGES
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]

    def program(given: Given) -> Any:
        agents = smolagents.TransformersModel(str(tmp_path), max_new_tokens=16, device_map="cpu")
        given(agents.model)
        return agents.generate(messages).content

    drafted(program)


def test_langchain(model: Any, tokenizer: Any) -> None:
    langchain = pytest.importorskip("langchain_huggingface")

    def program(given: Given) -> Any:
        pipe = pipeline(
            "text-generation", model=given(model), tokenizer=tokenizer, max_new_tokens=16
        )
        return langchain.HuggingFacePipeline(pipeline=pipe).invoke(PROMPT)

    drafted(program)


def test_outlines(model: Any, tokenizer: Any) -> None:
    outlines = pytest.importorskip("outlines")

    def program(given: Given) -> Any:
        guided = outlines.from_transformers(given(model), tokenizer)
        return guided(PROMPT, outlines.regex("[a-z ]{12,16}"), max_new_tokens=16)

    drafted(program)


def test_xgrammar(model: Any, tokenizer: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar", exc_type=ImportError)
    processors = pytest.importorskip("xgrammar.contrib.hf")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    grammar = xgrammar.GrammarCompiler(info).compile_regex("(the quick brown fox )+")

    def program(given: Given) -> Any:
        inputs = tokenizer(PROMPT, return_tensors="pt")
        guide = [processors.LogitsProcessor(grammar)]
        return given(model).generate(**inputs, logits_processor=guide, max_new_tokens=16).tolist()

    drafted(program)


def test_lm_format_enforcer(model: Any, tokenizer: Any) -> None:
    enforcer = pytest.importorskip("lmformatenforcer")
    made = pytest.importorskip("lmformatenforcer.integrations.transformers", exc_type=ImportError)
    allowed = made.build_transformers_prefix_allowed_tokens_fn(
        tokenizer, enforcer.RegexParser("[a-z ]{12,16}")
    )

    def program(given: Given) -> Any:
        inputs = tokenizer(PROMPT, return_tensors="pt")
        made = given(model).generate(**inputs, prefix_allowed_tokens_fn=allowed, max_new_tokens=16)
        return made.tolist()

    drafted(program)


@pytest.mark.parametrize("uses_generate_batch", [False, True])
def test_grpo_of_trl(
    model: Any, tokenizer: Any, monkeypatch: Any, tmp_path: Path, *, uses_generate_batch: bool
) -> None:
    """Checkpointing is on and off again in each step, and one trial serves all steps."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    spec, tried, reasons = SelfSpec(budget="fixed"), [], []
    probe = run.probe
    monkeypatch.setattr(run, "probe", lambda *args: tried.append(1) or probe(*args))

    def reward(completions: list[str], **_: Any) -> list[float]:
        reasons.append(spec.stats.disabled_reason)
        return [float(len(each)) for each in completions]

    tokenizer.padding_side = "left"
    trl.GRPOTrainer(
        model=attach(model, spec),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            max_steps=3,
            gradient_checkpointing=True,
            use_transformers_continuous_batching=uses_generate_batch,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [PROMPT] * 4}),
        processing_class=tokenizer,
    ).train()
    assert reasons == [None, None, None]
    assert len(tried) == 1
    assert spec.total_stats.num_nodes > spec.total_stats.num_steps


@pytest.fixture
def folders(model: Any, tokenizer: Any, tmp_path: Path) -> tuple[Path, Path]:
    """The same model in a plain folder and in one that `selfspec prepare` has prepared."""
    tokenizer.chat_template = MESSAGES
    for name in ("plain", "prepared"):
        tokenizer.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / name)
    assert app.run(["prepare", str(tmp_path / "prepared")]) == 0
    return tmp_path / "plain", tmp_path / "prepared"


def test_lm_eval_of_a_prepared_folder(folders: tuple[Path, Path]) -> None:
    instance = pytest.importorskip("lm_eval.api.instance")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    options = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}
    texts = []
    for folder in folders:
        request = instance.Instance("generate_until", {}, (PROMPT, options), 0)
        program = huggingface.HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu")
        texts.append(program.generate_until([request], disable_tqdm=True))
    assert texts[0] == texts[1]
    assert vars(program.model)["_selfspec_attachment"].spec.stats.num_steps


def test_the_server_of_transformers_of_a_prepared_folder(folders: tuple[Path, Path]) -> None:
    pytest.importorskip(_CLI)
    answers = [answer_of_server(folder) for folder in folders]
    assert answers[0] == answers[1]


def answer_of_server(folder: Path) -> str:
    port = free_port()
    words = ["serve", str(folder), "--trust-remote-code", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", _CLI, *words]) as server:
        try:
            wait_until(lambda: is_open(port) or server.poll() is not None)
            body = {
                "model": str(folder),
                "messages": [{"role": "user", "content": PROMPT}],
                **{"max_tokens": 16, "stream": False},
            }
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            with urlopen(Request(url, json.dumps(body).encode(), _JSON)) as response:
                return str(json.loads(response.read())["choices"][0]["message"]["content"])
        finally:
            server.terminate()
