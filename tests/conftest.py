"""What every test shares: one thread for each worker, and the option for a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# tiny tensors gain nothing from threads, and workers side by side would fight over the cores
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", default=None, help="folder of a small chat model to measure on")


@pytest.fixture(scope="session")
def chat_model_folder(request: pytest.FixtureRequest) -> Path:
    """The folder given with --model; the test is skipped where there is none."""
    folder = request.config.getoption("--model")
    if folder is None:
        pytest.skip("needs a trained chat model: pass --model FOLDER")
    return Path(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is slow unless it is asked for, and what needs a GPU where there is none."""
    if not config.getoption("markexpr"):
        _skip(items, "slow", "takes minutes: run with -m slow")
    if not torch.cuda.is_available():
        _skip(items, "gpu", "needs a CUDA device")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if marker in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
