"""Answers many prompts with workers on Ray, each a process with a model of its own.

python examples/ray_batch.py --model HuggingFaceTB/SmolLM2-135M-Instruct --cores 4

Needs `pip install ray`. There are as many workers as fit on all machines of the Ray that was
started with `ray start`, or on this one. If a worker dies, this ends with an error.
"""

from __future__ import annotations

import argparse
from importlib import resources

import ray
from ray.util import ActorPool
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec import SelfSpec, generate_many

# With more prompts, make parts of about 100, so that the rows of a batch stay filled.
PARTS = [[f"def {verb}_file(", f"def {verb}_line("] for verb in ("read", "list", "find")]


class Worker:
    def __init__(self, model, device):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model).to(device)
        self.how = {"assistant": SelfSpec(), "max_new_tokens": 48}

    def answers(self, prompts):
        found = generate_many(self.model, self.tokenizer, prompts, **self.how)
        return [(prompts[answer.index], answer.text, repr(answer.error)) for answer in found]


def main() -> None:
    options = parse_options()
    ray.init()
    share = {"CPU": options.cores, "GPU": options.gpus}
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    number = sum(int(min(has.get(k, 0) // n for k, n in share.items() if n)) for has in machines)
    if not number:
        raise SystemExit(f"no machine of this Ray has {share}")
    worker = ray.remote(num_cpus=options.cores, num_gpus=options.gpus)(Worker)
    device = "cuda" if options.gpus else "cpu"
    pool = ActorPool([worker.remote(options.model, device) for _ in range(number)])
    for answers in pool.map_unordered(lambda worker, part: worker.answers.remote(part), PARTS):
        for prompt, text, error in answers:
            print(f"--- {prompt}{text}", "" if error == "None" else f"failed: {error}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer many prompts with workers on Ray.")
    parser.add_argument("--model", default=str(resources.files("selfspec") / "models" / "tiny"))
    for name, default in {"--cores": 1, "--gpus": 0}.items():
        parser.add_argument(name, type=int, default=default, help="of each worker")
    return parser.parse_args()


if __name__ == "__main__":
    main()
