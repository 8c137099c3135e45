"""What of torch's compiler is relied on, and what happens without it."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from selfspec.compat import compilers


class Numbered(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
        return x * self.weight + (self.layer_idx - self.layer_idx) + len(numbers)


def test_neither_a_number_nor_a_width_makes_another_graph(monkeypatch):
    """The first width is that of the weight, which is fixed."""
    torch._dynamo.reset()
    counted = CompileCounter()
    monkeypatch.setattr(compilers, "_BACKEND", counted)

    def forward(layer, x):
        return layer.forward(x, [layer.layer_idx])

    run = compilers.compiled(forward)
    with compilers.tracing(), torch.no_grad():
        for number in range(2, 8):
            assert run(Numbered(number), torch.ones(number, 2)).tolist() == [[2.0] * 2] * number
    assert counted.frame_count == 1


def test_the_settings_are_there_and_are_put_back():
    """Without the last, half precision is rounded elsewhere than by single operations."""
    from torch._inductor import config as kernels
    from torch.compiler import config as names
    from torch.fx.experimental import _config as shapes

    def found():
        return names.dynamic_sources, shapes.use_duck_shape, kernels.emulate_precision_casts

    before = found()
    with compilers.tracing():
        assert found() == (r".*\.layer_idx?$", False, True)
    assert found() == before


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(compilers, "find_spec", lambda _: None)
    assert compilers.missing_compiler(torch.device("cpu")) is None
    assert compilers.missing_compiler(torch.device("cuda")) == "Triton is not installed"
