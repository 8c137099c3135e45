"""Several prompts in one batch: each row has its own tree and stops by itself.

python examples/batch.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, attach

PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n        return",
    "class TestStack(unittest.TestCase):\n    def test_push(self):\n        stack =",
    "def list_files(folder):\n    for name in",
)


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    spec = SelfSpec()
    inputs = tokenizer(list(PROMPTS), padding=True, return_tensors="pt").to(model.device)
    ids = model.generate(
        **inputs,
        assistant=spec,
        do_sample=False,
        max_new_tokens=options.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    for number, text in enumerate(tokenizer.batch_decode(ids, skip_special_tokens=True), start=1):
        print(f"--- row {number}\n{text}")
    print(spec.stats)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue several prompts together.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--max-new-tokens", type=int, default=48)
    return parser.parse_args()


if __name__ == "__main__":
    main()
