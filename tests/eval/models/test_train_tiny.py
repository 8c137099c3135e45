from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
def test_three_steps_on_a_toy_corpus_write_a_loadable_folder(tmp_path: Path, told) -> None:
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    for number in range(6):
        text = "".join(f"def f{number}_{i}(x):\n    return x + {i}\n\n\n" for i in range(20))
        (sources / f"m{number}.py").write_text(text, encoding="utf-8")
    options = f"--out {out} --sources {sources} --steps 3 --batch-tokens 64 --seq-len 32"
    status, lines, error = told(
        "train_tiny", *options.split(), "--long-every", "0", "--validate-every", "2"
    )
    assert status == 0, error
    assert any(line.startswith("step 2  validation") for line in lines)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "3 steps, 192 tokens seen" in card
    assert "5 for training, 1 held out" in card
    assert "python -m eval train_tiny --out FOLDER --sources FOLDER --steps 3" in card
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    assert model.dtype == torch.bfloat16
    inputs = tokenizer(["def f(x):\n", "é\tx"], padding=True, return_tensors="pt")
    assert tokenizer.decode(inputs.input_ids[1], skip_special_tokens=True) == "é\tx"
    assert model.generate(**inputs, max_new_tokens=2).shape[0] == 2
