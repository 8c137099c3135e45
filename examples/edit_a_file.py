"""A name in a file changes; the file as it was predicts the answer.

python examples/edit_a_file.py --model HuggingFaceTB/SmolLM2-135M-Instruct --file settings.py
"""

from __future__ import annotations

import argparse
import json.scanner
from importlib import resources
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, attach


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model))
    text = options.file.read_text(encoding="utf-8")
    inputs = tokenizer(prompt_of(tokenizer, options.order, text), return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    asked = {"do_sample": False, "max_new_tokens": options.max_new_tokens, "tokenizer": tokenizer}
    for name, prediction in {"without": None, "with a prediction": text}.items():
        # Under a fixed budget the figures do not depend on a clock.
        spec = SelfSpec(budget="fixed", max_nodes=16)
        ids = model.generate(
            **inputs.to(model.device), assistant=spec, prediction=prediction, **asked
        )
        print(f"{name}: {spec.stats.tokens_per_step:.2f} tokens per step")
    print(tokenizer.decode(ids[0, length:], skip_special_tokens=True))


def prompt_of(tokenizer, order: str, text: str) -> str:
    """The order and the file, put as the model's chat template has it if there is one."""
    if not tokenizer.chat_template:
        return f"{text}\n# {order}\n"
    message = {"role": "user", "content": f"{order}\n\n{text}"}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Edit a file.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--file", type=Path, default=Path(json.scanner.__file__))
    order = "Rename match to found. Write the whole file again. Answer with the code alone."
    parser.add_argument("--order", default=order)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
