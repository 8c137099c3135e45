"""A tree gives each node what single steps give on its path, and leads to their states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from selfspec.forward.layout import ancestors
from selfspec.forward.states.rules import (
    Ancestry,
    Paths,
    StateUpdate,
    across_rows,
    along,
    convolved,
    delta_rule,
    final_time_steps,
    move_on,
    scan,
)

PARENTS = [[-1, 0, 0, 1, 1, 2, 4, 6, 0], [-1, 0, 1, 2, 3, 4]]  # The second has fewer nodes.
ROWS, WIDTH = len(PARENTS), max(map(len, PARENTS))
NODES = [(row, node) for row, parents in enumerate(PARENTS) for node in range(len(parents))]
STEPS = (qwen.torch_recurrent_gated_delta_rule, kimi.recurrent_kimi_delta_attention)
HEADS, KEYS, VALUES, SIZE, CHANNELS = 4, 8, 6, 4, 10


def path_to(row: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = PARENTS[row][node]
    return path


@pytest.fixture
def ancestry() -> Ancestry:
    depths = [[len(path_to(row, node)) - 1 for node in range(len(PARENTS[row]))] for row in (0, 1)]
    padded = torch.tensor([row + [0] * (WIDTH - len(row)) for row in depths])
    return Ancestry(~torch.from_numpy(ancestors(PARENTS, WIDTH).copy()), padded)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, dtype=torch.float32)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-5, atol=2e-6)


def follow(state: torch.Tensor, told: StateUpdate, paths: Paths) -> None:
    move_on(state, along(told, paths))


def assert_leads_to(state: torch.Tensor, told: StateUpdate, row: int, node: int, end: Any) -> None:
    """The state of a row is that of single steps, and the other row's is what it was."""
    moved = state.clone()
    paths = [path_to(row, node) if row == index else [] for index in range(ROWS)]
    follow(moved, told, Paths.of(paths, WIDTH, state.device))
    assert_near(moved[row], end[0])
    assert torch.equal(moved[1 - row], state[1 - row])


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("num_sharing", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_delta_rule(step: Any, num_sharing: int, normalises: bool, ancestry: Ancestry) -> None:
    """With one decay for each head, and with one for each of its channels."""
    torch.manual_seed(num_sharing)
    is_kimi = step is kimi.recurrent_kimi_delta_attention
    heads = HEADS // num_sharing
    query, key = random(WIDTH, heads, KEYS), random(WIDTH, heads, KEYS)
    value = random(WIDTH, HEADS, VALUES)
    decays = -random(WIDTH, HEADS, *[KEYS] * is_kimi).abs()
    beta, state = random(WIDTH, HEADS).sigmoid(), random(HEADS, KEYS, VALUES)
    parts = (query, key, value, decays, beta)
    outcome, update = delta_rule(*parts, state, ancestry, normalises=normalises)
    query, key = (part.repeat_interleave(num_sharing, dim=2) for part in (query, key))
    for row, node in NODES:
        path = path_to(row, node)
        given = [part[row : row + 1, path] for part in (query, key, value, decays, beta)]
        answer, end = step(
            *given[:3],
            g=given[3],
            beta=given[4],
            initial_state=state[row : row + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalises,
        )
        assert_near(outcome[row, node], answer[0, -1])
        assert_leads_to(state, update, row, node, end)


@pytest.mark.parametrize("groups", [1, 2])
def test_scan(groups: int, ancestry: Ancestry) -> None:
    torch.manual_seed(groups)
    x, steps = random(WIDTH, HEADS, KEYS), random(WIDTH, HEADS)
    inputs, outputs = random(WIDTH, groups, VALUES), random(WIDTH, groups, VALUES)
    rates, skip, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    state = random(HEADS, KEYS, VALUES)
    final = final_time_steps(steps, bias, is_softplus=True)
    outcome, update = scan(x, final, rates, inputs, outputs, state, ancestry, skip=skip)

    def wide(each: torch.Tensor) -> torch.Tensor:
        return each[..., None].expand(*each.shape, KEYS)

    for row, node in NODES:
        end = state[row : row + 1].clone()
        for each in path_to(row, node):
            at = slice(row, row + 1), each
            answer = bamba.mamba2_selective_state_update(
                end,
                x[at],
                wide(steps[at]),
                wide(rates)[..., None].expand(-1, -1, VALUES),
                inputs[at],
                outputs[at],
                wide(skip),
                dt_bias=wide(bias),
                dt_softplus=True,
            )
        assert_near(outcome[row, node], answer[0])
        assert_leads_to(state, update, row, node, end)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(dtype: torch.dtype, activation: str | None, ancestry: Ancestry) -> None:
    """Deeper and less deep nodes than the kernel has columns."""
    torch.manual_seed(0)
    nodes, state = random(WIDTH, CHANNELS).to(dtype), random(SIZE, CHANNELS).to(dtype)
    weight, bias = torch.randn(CHANNELS, SIZE).to(dtype), torch.randn(CHANNELS).to(dtype)
    columns, windows = torch.cat([state, nodes], dim=1), ancestry.windows(SIZE)
    outcome = convolved(columns, windows, weight, bias, activation)
    ends = columns.flatten(0, 1)[across_rows(windows, columns.shape[1])]
    for row, node in NODES:
        end = state[row : row + 1].mT.clone()
        for each in path_to(row, node):
            answer = qwen.causal_conv1d_update(
                nodes[row : row + 1, each, :, None], end, weight, bias, activation
            )
        bound = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(outcome[row, node], answer[0, :, 0], **bound)
        assert torch.equal(ends[row, node].mT, end[0])


def test_what_hidden_nodes_hold_moves_no_state(ancestry: Ancestry) -> None:
    """A NaN beside the path, and one in a row that has no path."""
    torch.manual_seed(0)
    state = random(HEADS, KEYS, VALUES)
    told = StateUpdate(
        random(HEADS, WIDTH, KEYS), random(HEADS, WIDTH, VALUES), -random(HEADS, WIDTH, 1).abs()
    )
    paths, clean, spoiled = (
        Paths.of([[0, 1], []], WIDTH, state.device),
        state.clone(),
        state.clone(),
    )
    follow(clean, told, paths)
    for part in told:
        part[0, :, 2:] = torch.nan
        part[1] = torch.nan
    follow(spoiled, told, paths)
    assert torch.equal(spoiled, clean)
    assert torch.equal(spoiled[1], state[1])
