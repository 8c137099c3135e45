from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.command import main
from eval.models.tiny_corpus import build_corpus
from eval.models.tiny_model import build_model
from eval.models.training import (
    Options,
    Trainer,
    train,
)

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


@pytest.mark.slow
def test_three_steps_on_a_toy_corpus_write_a_loadable_folder(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    main(f"train_tiny --out {options.out} --sources {options.sources} --steps 3 --batch-tokens 64 "
         "--seq-len 32 --long-every 0 --save-every 2".split())  # fmt: skip
    assert {path.name for path in options.out.iterdir()} == FILES
    card = (options.out / "README.md").read_text(encoding="utf-8")
    assert "3 steps, 192 tokens seen" in card
    assert "5 for training, 1 held out" in card
    assert "python -m eval train_tiny --out FOLDER --sources FOLDER --steps 3" in card
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
