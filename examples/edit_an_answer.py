"""A question is asked again with a change; the earlier answer predicts the new one.

python examples/edit_an_answer.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Each text is written without and with the prediction, and it is the same. Where the prompt itself
holds the text to be edited, a prediction adds little: selfspec drafts from the prompt anyway.
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, attach

QUESTION = "Write a Python class {} with the methods push, pop and is_empty."
CODE = "class {}:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # In float32 the text does not depend on how many tokens a forward has.
    model = attach(AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"), pack=True)

    def answer(name: str, prediction: list[int] | None = None) -> tuple[list[int], float]:
        """The answer where the class has this name, and the tokens of a step."""
        # Nothing is learned from one answer for the next, and the figures do not depend on a clock.
        spec = SelfSpec(budget="fixed", max_nodes=16)
        inputs = tokenizer(prompt_of(tokenizer, name), return_tensors="pt").to(model.device)
        how = {"do_sample": False, "max_new_tokens": options.max_new_tokens}
        ids = model.generate(**inputs, assistant=spec, prediction=prediction, **how)
        return ids[0, inputs["input_ids"].shape[1] :].tolist(), spec.stats.tokens_per_step

    earlier, _ = answer("Stack")
    for title, prediction in {"without": None, "with a prediction": earlier}.items():
        ids, tokens_per_step = answer("Queue", prediction)
        print(f"{title}: {tokens_per_step:.2f} tokens per step")
    print(tokenizer.decode(ids, skip_special_tokens=True))


def prompt_of(tokenizer, name: str) -> str:
    """The question in the model's own format, or code to be continued if it has none."""
    if not tokenizer.chat_template:
        return CODE.format(name)
    message = {"role": "user", "content": QUESTION.format(name)}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask again, with a change.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
