"""A transformers pipeline that streams its text, with drafts.

python examples/pipeline_streaming.py --model HuggingFaceTB/SmolLM2-135M-Instruct

The pipeline runs in a thread of its own, and the main thread reads the text piece by piece, as a
server would. One step can commit several tokens, so pieces come in small bursts.
"""

from __future__ import annotations

import argparse
from importlib import resources
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from selfspec import SelfSpec, attach


def main() -> None:
    options = parse_options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = attach(AutoModelForCausalLM.from_pretrained(options.model), pack=True)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    spec = SelfSpec()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    arguments = {"assistant": spec, "streamer": streamer, "max_new_tokens": options.max_new_tokens}
    thread = Thread(target=pipe, args=(options.prompt,), kwargs=arguments)
    thread.start()
    print(options.prompt, end="")
    for piece in streamer:
        print(piece, end="", flush=True)
    thread.join()
    print(f"\n[{spec.stats.tokens_per_step:.2f} tokens per step]")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stream text from a pipeline.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    parser.add_argument(
        "--prompt", default="def read_lines(path):\n    with open(path) as file:\n        return"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    return parser.parse_args()


if __name__ == "__main__":
    main()
