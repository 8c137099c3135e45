"""A process of its own that answers questions with one method, within a budget of memory.

    echo '{"model": PATH, "method": "streamed", ...}' | python -m eval.jobs.streamed

Reads a job as JSON from its standard input and prints a result as one line of JSON, for
`eval bench_streamed`. What the process takes is sampled meanwhile: its own memory beyond what it
had before the model, and the model's files in the page cache. Each sample then drops them from the
page cache, which on a machine that is too small for the model would not hold them either.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import transformers

from eval.methods.method import Method, SelfSpecMethod
from eval.methods.registry import LOOKUP_TOKENS
from eval.runs.timing import FirstToken, num_new_tokens, timed
from selfspec import SelfSpec, load
from selfspec.weights.streamed.stream import stream_of

ACCELERATE, ALONE, LOOKUP, OURS, SMALL = STREAMED_METHODS = (
    "accelerate",
    "streamed",
    "streamed prompt-lookup",
    "streamed selfspec",
    "streamed draft model",
)
_EVERY = 0.25  # seconds between two samples of memory


class Job(NamedTuple):
    """What to load and what to ask."""

    model: str
    method: str
    max_memory: int
    max_length: int
    prompts: list[list[int]]
    max_new_tokens: int
    dtype: str
    threads: int | None
    knobs: dict[str, Any]
    draft_model: str | None = None


class Result(NamedTuple):
    """Of all questions together, but for `texts`, the new ids of each."""

    texts: list[list[int]]
    seconds: float  # of decoding, without the prompts' forwards
    num_steps: int  # forwards after the prompts'
    num_nodes: int | None  # None where the method does not count what it drafts
    bytes_read: int  # while decoding and over the prompts; of accelerate what its process read
    num_forwards: int
    seconds_read: float
    seconds_waited: float
    peak_bytes: int  # of the process, beyond what it had before the model
    peak_cached: int  # of the model's files in the page cache, at the same moment


def main() -> int:
    job = Job(**json.loads(sys.stdin.read()))
    print(json.dumps(_run(job)._asdict()))
    return 0


def _run(job: Job) -> Result:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        memory = stack.enter_context(_Memory(sorted(Path(job.model).glob("*.safetensors"))))
        small = _draft_model(job) if job.method == SMALL else None
        model = _load(job, small, stack)
        # All methods write the same number of tokens, whatever half precision makes of the text.
        model.generation_config.eos_token_id = None
        return _answer(job, model, _method(job, small), memory)


def _load(job: Job, small: Any, stack: ExitStack) -> Any:
    if job.method != ACCELERATE:
        limits: Any = {"max_memory": job.max_memory, "max_length": job.max_length}
        return load(job.model, dtype=job.dtype, draft_model=small, **limits)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return transformers.AutoModelForCausalLM.from_pretrained(
        job.model,
        dtype=job.dtype,
        device_map="auto",
        max_memory={"cpu": job.max_memory},
        offload_folder=folder,
    ).eval()


def _answer(job: Job, model: Any, method: Method, memory: _Memory) -> Result:
    seconds, texts = 0.0, []
    with _counted_forwards(model) as all_forwards:
        if isinstance(method, SelfSpecMethod):
            # Is tried out once, with the hook that counts, and is not part of an answer.
            method.spec.support(model)
        before, tried = _read(model), all_forwards()
        for prompt in job.prompts:
            ids = torch.tensor([prompt])
            answer = timed(model, partial(_one, method, model, ids, job.max_new_tokens))
            seconds += answer.seconds - answer.prefill_seconds
            texts.append(answer.output[0, -num_new_tokens(answer.output, ids) :].tolist())
    read = [now - then for now, then in zip(_read(model), before, strict=True)]
    num_forwards = all_forwards() - tried
    num_steps = num_forwards - len(job.prompts)
    memory.look()  # Short jobs may have had no sample.
    return Result(
        texts=texts,
        seconds=seconds,
        num_steps=num_steps,
        num_nodes=_num_nodes(method, num_steps),
        bytes_read=int(read[0]),
        num_forwards=num_forwards,
        seconds_read=read[1],
        seconds_waited=read[2],
        peak_bytes=memory.peak[0],
        peak_cached=memory.peak[1],
    )


def _num_nodes(method: Method, num_steps: int) -> int | None:
    if isinstance(method, SelfSpecMethod):
        return method.spec.total_stats.num_nodes
    return None if method.name == LOOKUP else num_steps


@contextmanager
def _counted_forwards(model: Any) -> Iterator[Callable[[], int]]:
    """Yields what tells how many forwards were run inside."""
    ended: list[None] = []
    handle = model.register_forward_hook(lambda *_: ended.append(None))
    try:
        yield lambda: len(ended)
    finally:
        handle.remove()


def _method(job: Job, small: Any) -> Method:
    if job.method in (OURS, SMALL):
        return SelfSpecMethod(
            job.method, SelfSpec(**job.knobs, draft_model=small, trust_hooks=True)
        )
    arguments = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if job.method == LOOKUP else {}
    return Method(job.method, arguments)


def _draft_model(job: Job) -> Any:
    """The small model, in memory of its own: what is mapped from a file would not be counted."""
    model = transformers.AutoModelForCausalLM.from_pretrained(job.draft_model, dtype=job.dtype)
    for weights in model.parameters():
        weights.data = weights.data.clone()
    return model


def _one(
    method: Method, model: Any, ids: torch.Tensor, max_new_tokens: int, streamer: FirstToken
) -> torch.Tensor:
    asked: Any = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "seed": 0}
    return method.answer(model, ids, streamer=streamer, **asked)


def _read(model: Any) -> tuple[float, float, float]:
    """Bytes read, seconds of reading, and seconds of waiting for it, since the model was loaded."""
    if (stream := stream_of(model)) is not None:
        reader = stream.reader
        return reader.buffers.bytes_read, reader.seconds_read, reader.seconds_waited
    return float(psutil.Process().io_counters().read_bytes), 0.0, 0.0


class _Memory:
    """Samples in a thread what the process and the page cache hold of a model.

    `peak` is the moment with the largest sum. The page cache starts without the files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.peak = (0, 0)
        self._files = files
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._start = 0

    def __enter__(self) -> _Memory:
        for file in self._files:
            _drop_from_cache(file)
        self._start = _anonymous()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(_EVERY):
            self.look()
            for file in self._files:
                _drop_from_cache(file)

    def look(self) -> None:
        """Takes one sample."""
        now = (_anonymous() - self._start, sum(map(_cached_bytes, self._files)))
        self.peak = max(self.peak, now, key=sum)


def _anonymous() -> int:
    """The memory of this process without what it has mapped from files."""
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def _drop_from_cache(file: Path) -> None:
    """Drops what the page cache holds of a file, as far as nobody has it mapped."""
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached_bytes(file: Path) -> int:
    with _mapped(file) as (address, length):
        pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(length)
        _LIBC.mincore(*arguments, pages.ctypes.data_as(ctypes.c_void_p))
    return int((pages & 1).sum()) * mmap.PAGESIZE


_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def _mapped(file: Path) -> Iterator[tuple[int, int]]:
    """The address and the length of a file in memory; nothing of it is read."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        try:
            yield ctypes.addressof(first), len(mapped)
        finally:
            del first


if __name__ == "__main__":
    sys.exit(main())
