from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.errors import EvalError
from eval.models.tiny_corpus import build_corpus
from eval.models.tiny_model import MAX_POSITIONS, MasterAdamW, build_model
from eval.models.training import (
    WARM_UP,
    Ledger,
    Options,
    Trainer,
    next_length,
    progress,
    rate_factor,
    train,
)
from eval.train_tiny import main

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(6):
        text = "".join(f"def f{number}_{i}(x):\n    return x + {i}\n\n\n" for i in range(20))
        (folder / f"m{number}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def options(tmp_path: Path, sources: Path) -> Options:
    return Options(
        out=tmp_path / "out", sources=sources, steps=3, batch_tokens=64, seq_len=32, long_every=0
    )


def build_trainer(options: Options) -> Trainer:
    assert options.sources is not None
    tokenizer_path = options.checkpoint / "tokenizer.json"
    corpus, tokenizer = build_corpus(options.sources, tokenizer_path, seed=options.seed)
    return Trainer(build_model(tokenizer, seed=options.seed, device="cpu"), corpus, options)


def one_weight(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.bfloat16))


def test_small_steps_add_up_that_bf16_alone_would_lose() -> None:
    kept, lost = one_weight(1.0), one_weight(1.0)
    master = MasterAdamW([kept], lr=1e-4)
    plain = torch.optim.AdamW([lost], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        kept.grad, lost.grad = torch.ones_like(kept), torch.ones_like(lost)
        master.step(1.0)
        plain.step()
    assert lost.item() == 1.0
    assert kept.item() == pytest.approx(0.99, abs=2**-8)
    assert master.masters[0].item() == pytest.approx(0.99, abs=1e-4)


def test_the_rate_rises_then_falls_to_zero_at_the_budget() -> None:
    assert rate_factor(0.0) == 0.0
    assert rate_factor(WARM_UP) == 1.0
    assert rate_factor(1.0) == pytest.approx(0.0, abs=1e-12)
    falling = [rate_factor(WARM_UP + i * (1 - WARM_UP) / 50) for i in range(51)]
    assert falling == sorted(falling, reverse=True)


def test_progress_is_by_steps_or_by_time_and_never_over_one(options: Options) -> None:
    assert progress(options, Ledger(step=1, seconds=1e9)) == pytest.approx(1 / 3)
    assert progress(options, Ledger(step=3)) == 1.0
    timed = replace(options, steps=None, minutes=2.0)
    assert progress(timed, Ledger(step=99, seconds=30.0)) == 0.25
    assert progress(timed, Ledger(seconds=121.0)) == 1.0


def test_every_so_often_a_batch_is_long(options: Options) -> None:
    lengths = [next_length(replace(options, long_every=3), step) for step in range(6)]
    assert lengths == [32, 32, MAX_POSITIONS] * 2
    assert next_length(options, 0) == 32


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_undisturbed_one_does(options: Options) -> None:
    undisturbed = build_trainer(options)
    train(undisturbed)
    killed = build_trainer(options)
    killed.step()
    killed.save()
    resumed = build_trainer(options)
    resumed.resume()
    train(resumed)
    assert resumed.ledger.losses == undisturbed.ledger.losses
    for one, other in zip(resumed.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_with_other_options_is_not_resumed(options: Options) -> None:
    build_trainer(options).save()
    other = build_trainer(replace(options, lr=1.0))
    with pytest.raises(EvalError, match="must be those of the killed run"):
        other.resume()


def test_too_little_text_is_one_line(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--out", str(options.out), "--sources", str(options.sources), "--steps", "1"]
    assert main([*asked, "--seq-len", "2048"]) == 2
    assert "at least one window of 2048 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_three_steps_on_a_toy_corpus_write_a_loadable_folder(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    main(f"--out {options.out} --sources {options.sources} --steps 3 --batch-tokens 64 "
         "--seq-len 32 --long-every 0 --save-every 2".split())  # fmt: skip
    assert {path.name for path in options.out.iterdir()} == FILES
    card = (options.out / "README.md").read_text(encoding="utf-8")
    assert "3 steps, 192 tokens seen" in card
    assert "5 for training, 1 held out" in card
    assert "python -m eval.train_tiny --out FOLDER --sources FOLDER --steps 3" in card
    assert str(options.sources) not in card
    assert "step 2  validation" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(options.out, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(options.out, local_files_only=True)
    assert model.dtype == torch.bfloat16
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 1)
    assert not model.generation_config.do_sample
    inputs = tokenizer(["def f(x):\n", "é\tx"], padding=True, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[1], skip_special_tokens=True) == "é\tx"
    assert model.generate(**inputs, max_new_tokens=2).shape[0] == 2
