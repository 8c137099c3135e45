"""OpenVINO as a method: it answers in a process of its own, with the libraries that it asks for.

    python -m venv openvino && openvino/bin/pip install 'optimum-intel[openvino]' openvino-genai
    openvino/bin/optimum-cli export openvino --model PATH --weight-format int8 EXPORTED
    python -m eval run --model PATH --methods stock selfspec openvino \\
        --openvino openvino/bin/python EXPORTED ...

It answers greedily, and writes as many tokens as it may, past any end; a speed-up counts a text of
another length as if it had stock's. Its prompts are not timed apart from its steps.
"""

from __future__ import annotations

import json
import subprocess
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from eval.errors import EvalError
from eval.jobs import openvino_job
from eval.methods.method import Method


class OpenVinoMethod(Method):
    """`where` names a Python that has OpenVINO GenAI, and the exported model."""

    def __init__(self, name: str, where: Sequence[str] | None) -> None:
        super().__init__(name)
        self._where = where
        self._process: Any = None  # Started at the first answer, ended with this method.

    def refusal(self, model: Any) -> str | None:
        return None if self._where else "--openvino names no Python and no exported model"

    def answer(
        self, model: Any, ids: torch.Tensor, *, max_new_tokens: int, temperature: float, **_: Any
    ) -> torch.Tensor:
        """Of one prompt (1, L)."""
        if temperature:
            raise EvalError(f"openvino answers greedily (got --temperature {temperature})")
        if self._process is None:
            self._start()
        asked = {"ids": ids[0].tolist(), "max_new_tokens": max_new_tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return torch.cat([ids, torch.tensor([self._said()["ids"]], device=ids.device)], dim=1)

    def _start(self) -> None:
        python, folder = self._where or ("", "")
        command = [python, openvino_job.__file__, folder, str(torch.get_num_threads())]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)
        weakref.finalize(self, _end, self._process)
        self._said()  # That the model is loaded.

    def _said(self) -> Any:
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._process = None
        raise EvalError(f"--openvino {self._where} must run OpenVINO GenAI; it says why above")


def _end(process: Any) -> None:
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()
