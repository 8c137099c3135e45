"""What every test shares: one thread for each worker, no clock, the option for a real model."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from rich.live import _RefreshThread
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec.cost import WIDTHS, CostCurve
from selfspec.forward import costs
from tests.recorder import use_recorders
from tests.tiny import make_model, make_tokenizer

TESTS = Path(__file__).parent
# The fast set leaves these out, but for the losslessness tests named below.
LONG = ("building", "eval", "lossless", "test_examples.py")
NOT_LONG = ("criteria", "entrances", "refusals")

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# how long an example takes says nothing on a machine that does other things too
settings.register_profile("any machine", parent=settings(max_examples=50), deadline=None)
settings.load_profile("any machine")

# tiny tensors gain nothing from threads, and workers side by side would fight over the cores
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model", default=None, help="folder of a small chat model to measure on")
    parser.addoption(
        "--recorded",
        action="store_true",
        help="drafts are verified by captured graphs, on a device that a CPU plays",
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Commands that are tested set their own number, and nobody takes it back."""
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_bar_left() -> Iterator[None]:
    """A bar that nobody stopped is drawn ten times a second, and slows down all later tests."""
    yield
    bars = [thread for thread in threading.enumerate() if isinstance(thread, _RefreshThread)]
    assert all(bar.done.is_set() for bar in bars), "a progress bar must be stopped by its test"


@pytest.fixture(autouse=True)
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of the losslessness matrix is one of captured graphs too.

    Those of packed weights are not: a forward is run in one way or the other.
    """
    name, by_itself = request.module.__name__, "use_recorders" in vars(request.module)
    is_packed = name.endswith("packed")
    if request.config.getoption("--recorded") and not (by_itself or is_packed):
        use_recorders(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def own_user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests write doesn't go into the folder of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
        yield


class EvenCurve(CostCurve):
    """Wide forwards cost little more than narrow ones, whatever real steps say."""

    def refine(self, width: int, seconds: float) -> None:
        """Ignored."""


_learned_curve = costs.Costs.curve


def _even_curve(*_args: Any) -> CostCurve:
    return EvenCurve({width: 1 + width / 100 for width in WIDTHS})


@pytest.fixture(scope="session", autouse=True)
def even_costs() -> Iterator[None]:
    """Trees are as wide as in a test before, on whatever machine: nothing depends on a clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs.Costs, "curve", _even_curve)
        yield


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learns costs for real, for the tests that ask for it."""
    monkeypatch.setattr(costs.Costs, "curve", _learned_curve)


@pytest.fixture(scope="session")
def chat_model_folder(request: pytest.FixtureRequest) -> Path:
    """The folder given with --model; the test is skipped where there is none."""
    folder = request.config.getoption("--model")
    if folder is None:
        pytest.skip("needs a trained chat model: pass --model FOLDER")
    return Path(folder)


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory) -> str:
    """A model that only continues text."""
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(len(tokenizer)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat_folder(plain_folder, tmp_path_factory) -> str:
    """The same with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(plain_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(plain_folder).save_pretrained(folder)
    return str(folder)


def is_long(path: Path) -> bool:
    """Whether a file's tests take part in the full run only."""
    in_fast_set = path.stem.startswith("test_same") and path.stem.endswith(NOT_LONG)
    return path.relative_to(TESTS).parts[0] in LONG and not in_fast_set


def pytest_collection_finish() -> None:
    """What is there by now stays: passes over it in search of garbage would slow all tests down."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is slow unless markers are chosen, and GPU tests where there is no GPU.

    Marks what is long, by its path.
    """
    for item in items:
        if is_long(item.path):
            item.add_marker("long")
    if not config.getoption("markexpr"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
