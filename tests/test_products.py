"""A product asked for otherwise is the same one, in the same layout, where and while asked for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize

from selfspec import products
from selfspec.packed import pack
from selfspec.products import (
    LINEAR,
    NUM_TOKENS,
    PACKED,
    TURNED,
    WIDENED,
    Product,
    Table,
    announce,
    best_ways,
    products_of,
    seconds_by_way,
    turned,
    turning,
    widened,
)
from tests.fakes import packs_here

SHAPES = [(16,), (1, 16), (5, 16), (1, 1, 16), (2, 3, 16)]
needs_packs = pytest.mark.skipif(not packs_here(), reason="this build of torch packs no weights")
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Two(nn.Module):
    """Two projections of one kind, one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 24, bias=False)
        self.gate = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x))


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of which a product was turned."""
    numbers: list[int] = []

    def listen(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        numbers.append(x.numel() // x.shape[-1])
        return turned(x, *rest)

    monkeypatch.setitem(products._WAYS, TURNED, listen)
    return numbers


def ways_of(*numbers: int) -> tuple[str, ...]:
    return tuple(TURNED if number in numbers else LINEAR for number in NUM_TOKENS)


def table_of(model: nn.Module, *numbers: int) -> Table:
    return dict.fromkeys(products_of(model), ways_of(*numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_same_product(shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Linear(16, 24, bias=has_bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(shape, dtype=dtype)
    straight = linear(x, module.weight, module.bias)
    other = turned(x, module.weight, module.bias)
    rounding = ROUNDING.get(dtype, 1e-6)
    torch.testing.assert_close(other, straight, rtol=rounding, atol=rounding)
    assert (other.shape, other.stride()) == (straight.shape, straight.stride())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("at_once", [1, 16 * 10, 1 << 20])
def test_widened_part_by_part_too(
    shape: tuple[int, ...],
    has_bias: bool,
    dtype: torch.dtype,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_AT_ONCE", at_once)
    torch.manual_seed(0)
    module = nn.Linear(16, 24, bias=has_bias, dtype=dtype)
    x = torch.randn(*shape[:-1], 32, dtype=dtype)[..., ::2]  # lies apart in memory
    with torch.no_grad():
        straight = module(x)
        other = widened(x, module.weight, module.bias)
    torch.testing.assert_close(other, straight, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert (other.shape, other.stride()) == (straight.shape, straight.stride())


def test_what_stock_converts_or_refuses_is_left_to_stock() -> None:
    module = nn.Linear(16, 24, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(3, 16)
    with pytest.raises(RuntimeError, match="dtype"):
        widened(x, module.weight, module.bias)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(widened(x, module.weight, module.bias), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_half_precision_is_widened(dtype: torch.dtype) -> None:
    module = nn.Linear(16, 24, dtype=dtype).requires_grad_(False)
    seconds = seconds_by_way([(module,)], max_seconds=0)
    assert (WIDENED in seconds) == (dtype != torch.float32)
    model = nn.Sequential(module)
    table = dict.fromkeys(products_of(model), (WIDENED,) * len(NUM_TOKENS))
    x = torch.randn(3, 16, dtype=dtype)
    expected = widened(x, module.weight, module.bias)
    with turning(model, table):
        torch.testing.assert_close(model(x), expected)


def test_what_lies_apart_in_memory_is_read_right() -> None:
    module = nn.Linear(16, 24).requires_grad_(False)
    for x in (torch.randn(16, 3).t(), torch.randn(2, 16, 3).mT, torch.randn(1, 16).expand(4, 16)):
        torch.testing.assert_close(turned(x, module.weight, module.bias), module(x))


def test_those_of_a_kind_are_found_together() -> None:
    model = Two()
    found = products_of(model)
    assert found == {
        Product((24,), 16, torch.float32): [(model.up,), (model.gate,)],
        Product((16,), 24, torch.float32): [(model.down,)],
    }


def test_those_of_one_input_are_found_together_too() -> None:
    model = nn.ModuleDict({"gate_proj": nn.Linear(16, 24), "up_proj": nn.Linear(16, 20)})
    assert products_of(model) == {
        Product((24, 20), 16, torch.float32): [(model["gate_proj"], model["up_proj"])]
    }


@needs_packs
def test_those_of_one_input_are_timed_together() -> None:
    group = (nn.Linear(16, 24).requires_grad_(False), nn.Linear(16, 20).requires_grad_(False))
    seconds = seconds_by_way([group], max_seconds=0)
    assert set(seconds) == {LINEAR, TURNED, PACKED}


def test_what_only_looks_like_a_projection_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)] + [Quantised(4, 4)])
    vars(model[0])["forward"] = lambda x: x  # as accelerate does where it moves tensors about
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    model[2].to("meta")
    assert products_of(model) == {}
    assert list(products_of(nn.Linear(4, 4))) == [Product((4,), 4, torch.float32)]
    monkeypatch.setattr(products, "_LEAST_WEIGHTS", 17)
    assert products_of(nn.Linear(4, 4)) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it loads dynamo
def test_a_compiled_model_is_left_alone() -> None:
    by_method, by_forward = Two(), Two()
    by_method.compile()
    by_forward.forward = torch.compile(by_forward.forward)  # type: ignore[method-assign]
    assert products_of(nn.ModuleList([by_method])) == {}
    assert products_of(by_forward) == {}


def test_what_somebody_else_put_there_meanwhile_stays() -> None:
    model = Two()
    with turning(model, table_of(model, 1)):
        vars(model.up)["forward"] = mine = lambda x: x
    assert vars(model.up)["forward"] is mine
    assert "forward" not in vars(model.down)


def test_only_the_numbers_of_tokens_that_pay(asked: list[int]) -> None:
    model = Two()
    up = Product((24,), 16, torch.float32)
    with turning(model, {up: ways_of(2, 6)}):
        for number in (1, 2, 3, 4, 5, 6, 7, 65, 200):
            model(torch.randn(number, 16))
    assert asked == [2, 2, 5, 5, 6, 6]  # up and gate; 5 goes with 6


def test_all_numbers_but_none_at_all(asked: list[int]) -> None:
    model = nn.Linear(16, 8)
    with turning(model, table_of(model, *NUM_TOKENS)):
        for number in (0, 1, 37, 64, 65, 256, 257, 1000):
            model(torch.randn(number, 16))
    assert asked == [1, 37, 64, 65, 256, 257, 1000]


def test_afterwards_the_model_is_as_before(asked: list[int]) -> None:
    model = Two()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with turning(model, table_of(model, 1)):
        assert "forward" in vars(model.up)
    with pytest.raises(RuntimeError), turning(model, table_of(model, 1)):
        model(torch.randn(1, 17))
    asked.clear()
    assert {name: vars(module) for name, module in model.named_modules()} == before
    model(torch.randn(1, 16))
    assert asked == []


def test_one_inside_another(asked: list[int]) -> None:
    model = Two()
    x = torch.randn(1, 16)
    with turning(model, table_of(model, 1)):
        with turning(model, table_of(model, 1)):
            model(x)
        model(x)
        assert len(asked) == 6
    assert "forward" not in vars(model.up)


def test_what_is_turned_just_now_is_still_found() -> None:
    """By another thread's call, which would go on straight otherwise."""
    model = Two()
    found = products_of(model)
    with turning(model, table_of(model, 1)):
        assert products_of(model) == found


def test_other_threads_are_left_alone(asked: list[int]) -> None:
    model, x = Two(), torch.randn(1, 16)
    with turning(model, table_of(model, 1)):
        other = threading.Thread(target=model, args=(x,))
        other.start()
        other.join()
        assert asked == []
        model(x)
    assert len(asked) == 3


def test_the_last_of_several_threads_undoes_it(asked: list[int]) -> None:
    model, x = Two(), torch.randn(1, 16)
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with turning(model, table_of(model, 1)):
            is_inside.set()
            may_leave.wait(10)

    other = threading.Thread(target=stay)
    other.start()
    is_inside.wait(10)
    with turning(model, table_of(model, 2)):
        model(x)
    assert len(asked) == 3  # by the table of who came first
    assert "forward" in vars(model.up)
    may_leave.set()
    other.join()
    assert "forward" not in vars(model.up)


def test_who_announces_few_tokens_is_spared_what_they_do_not_need(asked: list[int]) -> None:
    model = Two()
    announce(model, 1)
    with turning(model, table_of(model, 6)):
        for number, is_used in ((4, False), (6, True), (8, False), (1, False), (5, True)):
            announce(model, number)
            model(torch.randn(number, 16))
            assert ("forward" in vars(model.up)) == is_used
        announce(model, 1)
    assert asked == [6, 6, 6, 5, 5, 5]
    assert "forward" not in vars(model.up)


def test_what_one_thread_announces_takes_nothing_from_another(asked: list[int]) -> None:
    model, x = Two(), torch.randn(6, 16)
    is_inside, may_go_on = threading.Event(), threading.Event()

    def go_on() -> None:
        with turning(model, table_of(model, 6)):
            is_inside.set()
            may_go_on.wait(10)
            model(x)

    other = threading.Thread(target=go_on)
    with turning(model, table_of(model, 6)):
        announce(model, 1)
        other.start()
        is_inside.wait(10)
        assert "forward" in vars(model.up)
        announce(model, 1)
        may_go_on.set()
        other.join()
        assert asked == [6, 6, 6]
        announce(model, 1)
        assert "forward" not in vars(model.up)


def test_what_somebody_else_put_there_is_not_written_over() -> None:
    model = Two()
    with turning(model, table_of(model, 6)):
        announce(model, 1)
        vars(model.up)["forward"] = mine = lambda x: x
        announce(model, 6)
        assert vars(model.up)["forward"] is mine
    assert vars(model.up)["forward"] is mine


def test_a_hook_still_hears(asked: list[int]) -> None:
    model, heard = Two(), []
    model.up.register_forward_hook(lambda *_: heard.append(1))
    with turning(model, table_of(model, 1)):
        model(torch.randn(1, 16))
    assert (len(heard), len(asked)) == (1, 3)


@needs_packs
def test_copies_are_used_where_the_table_says_so() -> None:
    model = Two().requires_grad_(False)
    wrong = {(module,): pack([-module.weight]) for module in model.children()}
    ways = tuple(PACKED if number in (2, 3) else LINEAR for number in NUM_TOKENS)
    with turning(model, dict.fromkeys(products_of(model), ways), wrong):
        for number in (1, 2, 3, 4):
            x = torch.randn(number, 16)
            expected = linear(x, model.up.weight) * (-1 if number in (2, 3) else 1)
            torch.testing.assert_close(model.up(x), expected)


def seconds_from(share: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, ...]]:
    def seconds_of(ways: dict[object, object], x: torch.Tensor, _groups: object) -> float:
        return len(x) * (share if turned in ways.values() and len(x) <= 6 else 1.0)

    monkeypatch.setattr(products, "_seconds_of", seconds_of)
    return seconds_by_way([(nn.Linear(4, 4).requires_grad_(False),)], max_seconds=60)


@pytest.mark.parametrize(
    ("share", "pays"), [(0.5, True), (0.89, True), (0.91, False), (1.0, False), (3.0, False)]
)
def test_only_what_is_clearly_faster_is_turned(
    share: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = seconds_from(share, monkeypatch)
    numbers = (1, 2, 3, 4, 6) if pays else ()
    assert best_ways(seconds, (TURNED, PACKED)) == ways_of(*numbers)
    assert best_ways(seconds, ()) == ways_of()


def test_an_odd_moment_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ways_to", lambda *_: {LINEAR: {}, TURNED: {}})
    rounds = iter([1.0] * 2 * len(NUM_TOKENS) + [9.0, 1.0] * len(NUM_TOKENS) + [1.0] * 999)
    monkeypatch.setattr(products, "_seconds_of", lambda *_: next(rounds))
    seconds = seconds_by_way([(nn.Linear(4, 4).requires_grad_(False),)], max_seconds=60)
    assert best_ways(seconds, (TURNED,)) == ways_of()


def test_one_round_is_measured_however_little_time_there_is() -> None:
    seconds = seconds_by_way([(nn.Linear(4, 4).requires_grad_(False),)], max_seconds=0)
    assert set(seconds) == {LINEAR, TURNED, *([PACKED] if packs_here() else [])}
    assert all(len(each) == len(NUM_TOKENS) and min(each) > 0 for each in seconds.values())


@pytest.mark.parametrize("fails", [RuntimeError("no code for it"), NotImplementedError("no op")])
def test_what_can_not_be_packed_is_no_way(
    fails: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> torch.Tensor:
        raise fails

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", broken, raising=False)
    seconds = seconds_by_way([(nn.Linear(4, 4).requires_grad_(False),)], max_seconds=0)
    assert set(seconds) == {LINEAR, TURNED}


@needs_packs
def test_what_comes_out_wrong_packed_is_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "pack", lambda weights: pack([1.1 * w for w in weights]))
    torch.manual_seed(0)
    seconds = seconds_by_way([(nn.Linear(4, 4).requires_grad_(False),)], max_seconds=0)
    assert set(seconds) == {LINEAR, TURNED}
