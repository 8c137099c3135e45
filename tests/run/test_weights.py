"""Weights that must not be written, however torch arranges its own classes."""

from __future__ import annotations

import runpy

import pytest
import torch

from selfspec.weights import copies


@pytest.mark.parametrize("module", [weights, copies])
def test_which_class_of_torch_has_the_data_does_not_matter(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Tensor", type("Tensor", (torch.Tensor,), {}))
    runpy.run_path(module.__file__)  # type: ignore[attr-defined]
