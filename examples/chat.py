"""A chat in which one `SelfSpec` learns from the whole conversation.

python examples/chat.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Type a message and press Enter; an empty line ends the chat. Without --model, the small model that
comes with selfspec is used. It can't chat: it goes on with your text as if it were Python code.
"""

from __future__ import annotations

import argparse
from importlib import resources

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from selfspec import SelfSpec, attach


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    spec = SelfSpec()
    conversation = []
    for message in options.message or iter(lambda: input("> ").strip(), ""):
        conversation.append({"role": "user", "content": message})
        inputs = encode(tokenizer, conversation).to(model.device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = model.generate(
            **inputs, assistant=spec, streamer=streamer, max_new_tokens=options.max_new_tokens
        )
        answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        conversation.append({"role": "assistant", "content": answer})
        print(f"[{spec.stats.tokens_per_step:.2f} tokens per step]")


def encode(tokenizer, conversation):
    """The conversation in the model's own format, or as plain text if it has none."""
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(turn["content"] for turn in conversation), return_tensors="pt")
    return tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Chat with a model.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument("--message", action="append", help="say this instead of asking; repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
