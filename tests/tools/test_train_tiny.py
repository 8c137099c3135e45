"""The program that made the embedded model."""

from __future__ import annotations

import argparse
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.errors import EvalError
from tools import train_tiny


@pytest.mark.slow
def test_a_model_is_trained_and_saved(tmp_path, capsys):
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    for number in range(6):
        text = "".join(f"def f{number}_{i}(x):\n    return x + {i}\n\n\n" for i in range(20))
        (sources / f"m{number}.py").write_text(text, encoding="utf-8")
    options = f"--out {out} --sources {sources} --steps 3 --batch-tokens 64 --seq-len 32"
    parser = argparse.ArgumentParser()
    train_tiny.add_options(parser)
    assert train_tiny.run(parser.parse_args(options.split())) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["num_steps"], found["num_seen"]) == (3, 192)
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    inputs = tokenizer(["def f(x):\n", "é\tx"], padding=True, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[1], skip_special_tokens=True) == "é\tx"
    assert model.generate(**inputs, max_new_tokens=2).shape[0] == 2


def test_what_no_run_can_use(tmp_path):
    parser = argparse.ArgumentParser()
    train_tiny.add_options(parser)
    options = f"--out {tmp_path / 'out'} --steps 1 --seq-len 1"
    with pytest.raises(EvalError, match=r"--seq-len must be 2 to 2048 \(got 1\)"):
        train_tiny.run(parser.parse_args(options.split()))
