"""A grown model computes what its source does, at the size that was asked for."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from eval.grow import main
from eval.models import shapes
from eval.models.grown import grow, num_parameters
from eval.models.shapes import SHAPES, GrowError, GrownShape, named_shape
from tests.fakes import new_model, tiny_tokenizer

VOCAB = 97
WIDE = GrownShape(
    hidden_size=160,
    num_hidden_layers=4,
    num_attention_heads=10,
    num_key_value_heads=5,
    intermediate_size=224,
    head_dim=16,
)
MHA = replace(WIDE, num_attention_heads=8, num_key_value_heads=8)
QUADRUPLE = replace(WIDE, hidden_size=256, num_attention_heads=16, num_key_value_heads=4)
SAME_WIDTH = replace(WIDE, hidden_size=64, num_attention_heads=4, num_key_value_heads=4)
# Stated in heads of 32, so that `cut` has to double both counts.
COARSE = replace(WIDE, num_attention_heads=5, num_key_value_heads=5, head_dim=32)
PUBLISHED = {
    "135m": 106_203_456,
    "0.5b": 357_898_112,
    "1b": 973_146_112,
    "3b": 2_818_747_392,
    "7b": 6_476_271_616,
}


SIZES = {"hidden_size": 64, "intermediate_size": 80, "num_key_value_heads": 4, "head_dim": 16}


def make_source(attention: str | None = None, **changes) -> LlamaForCausalLM:
    """A random Llama whose norm weights aren't all one; leaves the global random stream alone."""
    model = new_model("llama", attention, **SIZES | changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2.0)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.2)
    return model


def prompt(rows: int = 2, width: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCAB, (rows, width), generator=generator)


@torch.no_grad()
def logits_of(model: LlamaForCausalLM) -> torch.Tensor:
    return model(prompt().to(model.device)).logits.float()


def greedy(model: LlamaForCausalLM) -> list[list[int]]:
    ids = prompt()
    config = {"max_new_tokens": 32, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    texts = model.generate(ids, **config)[:, ids.shape[1] :].tolist()
    assert all(len(set(row)) > 8 for row in texts), "worth comparing"
    return texts


def parameters_of(shape: GrownShape) -> int:
    sizes = {name: value for name, value in vars(shape).items() if value is not None}
    with torch.device("meta"):
        return num_parameters(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)))


def assert_same_function(source: LlamaForCausalLM, grown: LlamaForCausalLM) -> None:
    before, after = logits_of(source), logits_of(grown)[..., :VOCAB]
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    assert greedy(source) == greedy(grown)


SOURCES = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "large_eps": {"rms_norm_eps": 0.1},  # a wrong eps shows
    "eager": {"attention": "eager"},
    "rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
}
TARGETS = {
    "wide": WIDE,
    "mha": MHA,
    "quadruple": QUADRUPLE,
    "same_width": SAME_WIDTH,
    "coarse": COARSE,
}
FAST = {("gqa", "mha")}  # Its groups take copies of their key-value heads.


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(s, t, marks=() if (i + j) % 3 == 0 or (s, t) in FAST else pytest.mark.slow)
        for i, s in enumerate(SOURCES)
        for j, t in enumerate(TARGETS)
    ],
)
def test_same_logits_and_same_greedy_text(source, target):
    model = make_source(**SOURCES[source])
    grown = grow(model, TARGETS[target])
    assert_same_function(model, grown)
    assert num_parameters(grown) > num_parameters(model)
    assert grown.config._attn_implementation == model.config._attn_implementation


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_never_wins(tied):
    model = make_source(tie_word_embeddings=tied)
    grown = grow(model, replace(WIDE, vocab_size=4 * VOCAB))
    before, after = logits_of(model), logits_of(grown)
    assert after.shape[-1] == 4 * VOCAB
    assert len(after[0, -1, VOCAB:].unique()) > VOCAB // 2
    shift = after[..., :VOCAB] - before  # the same for all rows of a position
    assert (shift - shift.mean(-1, keepdim=True)).abs().max() < 1e-5 * before.abs().max()
    assert after[..., VOCAB:].softmax(-1).isfinite().all()
    assert after.softmax(-1)[..., VOCAB:].max() == 0.0
    assert greedy(model) == greedy(grown)


def test_the_lane_of_a_larger_vocabulary_takes_the_place_of_eps():
    model = make_source(rms_norm_eps=2e-9)  # about twice the lane's share
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1e-4  # little enough for eps to decide
    grown = grow(model, replace(WIDE, vocab_size=2 * VOCAB))
    assert_same_function(model, grown)


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_those_of_the_shape(tied):
    grown = grow(make_source(tie_word_embeddings=tied), WIDE)
    attention, mlp = grown.model.layers[3].self_attn, grown.model.layers[3].mlp
    assert grown.model.embed_tokens.weight.shape == (VOCAB, 160)
    assert attention.q_proj.weight.shape == (160, 160)
    assert attention.v_proj.weight.shape == (80, 160)
    assert mlp.down_proj.weight.shape == (160, 224)
    assert len(grown.model.layers) == grown.config.num_hidden_layers == 4
    assert (grown.config.num_attention_heads, grown.config.num_key_value_heads) == (10, 5)
    assert (grown.lm_head.weight is grown.model.embed_tokens.weight) is tied


def test_every_other_weight_is_a_number_to_multiply_by():
    grown = grow(make_source(), WIDE)
    silent = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
    for name, weight in grown.named_parameters():
        if not name.endswith(silent):
            assert weight.all(), name
            assert weight.unique().numel() > 0.9 * weight.numel(), name


def test_new_weights_come_from_the_seed_alone():
    model = make_source()
    one, same, other = (dict(grow(model, WIDE, seed=seed).named_parameters()) for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_neither_the_global_random_stream_nor_the_source_changes():
    model = make_source()
    model.generation_config.repetition_penalty = 1.3
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    config, state = model.config.to_dict(), torch.random.get_rng_state()
    grown = grow(model, replace(WIDE, vocab_size=2 * VOCAB))
    assert grown.generation_config.repetition_penalty == 1.3
    assert grown.generation_config is not model.generation_config
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert all(torch.equal(model.state_dict()[name], old) for name, old in weights.items())


def test_half_precision_is_as_near_as_its_own_rounding():
    source = make_source()
    exact = logits_of(source)
    half = make_source().to(torch.bfloat16)
    grown = grow(half, WIDE)
    assert grown.dtype == grown.config.dtype == torch.bfloat16
    rounding = (logits_of(half) - exact).pow(2).mean().sqrt()
    assert (logits_of(grown) - exact).pow(2).mean().sqrt() < 2 * rounding


def test_norm_weights_are_exact_in_half_precision_at_four_times_the_width():
    source = make_source().to(torch.bfloat16)
    grown = grow(source, QUADRUPLE)
    assert torch.equal(grown.model.norm.weight[:64] * 2, source.model.norm.weight)


# The sizes of SmolLM2-135M-Instruct, whose nine query heads share three key-value heads.
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_hold_smollm2_with_the_parameters_of_their_models(name):
    source = LlamaConfig(**SMOLLM2)
    shape = named_shape(name).fitted(source)
    assert shape.holds_heads(source)
    assert shape.num_hidden_layers >= 30
    assert parameters_of(shape) == pytest.approx(PUBLISHED[name], rel=0.04)


def test_a_model_with_smollm2s_heads_computes_the_same_in_a_named_shape(monkeypatch):
    narrow = {"hidden_size": 72, "head_dim": 8, "intermediate_size": 80, "num_hidden_layers": 3}
    source = make_source(**SMOLLM2 | narrow)
    small = replace(SHAPES["0.5b"], hidden_size=112, num_hidden_layers=2, head_dim=8)
    monkeypatch.setitem(SHAPES, "small", small)
    grown = grow(source, "small")
    assert grown.config.num_hidden_layers == 3
    assert_same_function(source, grown)


def test_a_source_deeper_than_a_named_shape_keeps_its_layers(monkeypatch):
    monkeypatch.setitem(SHAPES, "thin", replace(WIDE, num_hidden_layers=1, intermediate_size=1000))
    source = make_source()
    grown = grow(source, "thin")
    assert (grown.config.num_hidden_layers, grown.config.intermediate_size) == (2, 448)
    assert_same_function(source, grown)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_named_shapes_have_the_parameters_of_their_models(name, head_dim):
    assert parameters_of(named_shape(name).cut(head_dim)) == pytest.approx(PUBLISHED[name], rel=0.1)


def test_the_table_in_the_docs_states_the_true_counts():
    lines = (shapes.__doc__ or "").splitlines()
    for name, shape in SHAPES.items():
        count = parameters_of(shape)
        row = next(line for line in lines if line.split()[:1] == [name])
        assert f"{count:,} ({count / PUBLISHED[name] - 1:+.1%}".replace("%", " %") in row


# The source, the shape, and what is said.
BAD_SHAPES = {
    "layers": ({}, replace(WIDE, num_hidden_layers=1), r"layers must be >= the source's 2 \(got 1"),
    "hidden": (
        {},
        replace(WIDE, hidden_size=60),
        r"size must be >= the source's 64 \(got 60",
    ),
    "inner": ({}, replace(WIDE, intermediate_size=79), "intermediate_size must be >= the source's"),
    "kv": ({}, replace(WIDE, num_key_value_heads=2), r"heads must be >= the source's 4 \(got 2\)"),
    "vocab": (
        {},
        replace(WIDE, vocab_size=96),
        r"size must be >= the source's 97 \(got 96",
    ),
    "copies": (
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        replace(WIDE, hidden_size=192, num_attention_heads=6, num_key_value_heads=3),
        r"must be >= 4, 2 for each of the source's 2 at 2 .*got 3",
    ),
    "lane": ({}, replace(SAME_WIDTH, vocab_size=200), "must be > the source's 64 for a larger"),
    "eps": (
        {"rms_norm_eps": 1e-10},
        replace(WIDE, vocab_size=200),
        r"must be > .* \(got 1e-10",
    ),
}


@pytest.mark.parametrize(("source", "shape", "message"), BAD_SHAPES.values(), ids=BAD_SHAPES)
def test_a_shape_without_room_for_the_source_is_refused(source, shape, message):
    with pytest.raises(GrowError, match=message):
        grow(make_source(**source), shape)


def test_a_shape_checks_itself():
    with pytest.raises(GrowError, match=r"num_hidden_layers must be >= 1 \(got 0\)"):
        replace(WIDE, num_hidden_layers=0)
    with pytest.raises(GrowError, match=r"multiple of num_key_value_heads \(got 10 and 4\)"):
        replace(WIDE, num_key_value_heads=4)
    with pytest.raises(GrowError, match=r"multiple of num_attention_heads \(got 150 and 8\)"):
        replace(MHA, hidden_size=150)
    with pytest.raises(GrowError, match=r"the source's head_dim \(got 80 and 48\)"):
        WIDE.cut(48)


def test_other_models_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))
    with pytest.raises(GrowError, match=r"LlamaForCausalLM \(got GPT2LMHeadModel\)"):
        grow(model, WIDE)


def test_a_shape_may_name_its_vocabulary():
    assert named_shape("135m").vocab_size is None
    assert named_shape("135m:50000") == replace(SHAPES["135m"], vocab_size=50_000)
    assert {name: named_shape(f"{name}:full").vocab_size for name in SHAPES} == {
        "135m": 49_152, "0.5b": 151_936, "1b": 128_256, "3b": 128_256, "7b": 32_000
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved source with a tokenizer."""
    path = tmp_path / "source"
    make_source(tie_word_embeddings=True).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", WIDE)
    return "tiny"


def run_cli(folder: Path, shape: str, out: Path, *more: str) -> int:
    return main(["--model", str(folder), "--shape", shape, "--out", str(out), *more])


def test_cli_round_trip(folder, small_shape, tmp_path, capsys):
    out = tmp_path / "grown"
    assert run_cli(folder, f"{small_shape}:128", out, "--dtype", "bfloat16", "--seed", "4") == 0
    half = LlamaForCausalLM.from_pretrained(out, dtype="auto")
    assert (half.dtype, *half.lm_head.weight.shape) == (torch.bfloat16, 128, 160)
    shutil.rmtree(out)
    capsys.readouterr()
    assert run_cli(folder, small_shape, out) == 0
    source, grown = (LlamaForCausalLM.from_pretrained(path).eval() for path in (folder, out))
    assert_same_function(source, grown)
    report = capsys.readouterr().out.splitlines()
    assert report[0] == f"parameters: {num_parameters(grown):,} and {VOCAB * 160:,} in embeddings"
    difference, largest = report[1].removeprefix("largest logit difference: ").split(" of ")
    assert float(difference) < 1e-5 * float(largest)
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder, out)]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


BAD_OPTIONS = {
    "shape": (("--shape", "tinny"), "unknown shape 'tinny'; did you mean 'tiny'?"),
    "dtype": (("--dtype", "bfloat"), "unknown dtype 'bfloat'; did you mean 'bfloat16'?"),
    "device": (("--device", "abacus"), "device must be one that torch finds here (got 'abacus')"),
    "path": (("--model", "nowhere"), "model must be a folder with a config.json (got 'nowhere')"),
    "kind": (("--model", "{gpt2}"), "model must be a llama (got a gpt2 in "),
    "vocab": (("--shape", "tiny:7"), "vocab_size must be >= the source's 97 (got 7)"),
    "words": (("--shape", "tiny:big"), "a number of tokens, or full (got 'tiny:big')"),
    "full": (("--shape", "tiny:full"), "a number of tokens, or full (got 'tiny:full')"),
    "out": (("--out", "{source}"), "out must be a new or an empty folder"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_cli_answers_bad_options_in_one_line(
    options, message, folder, small_shape, tmp_path, capsys
):
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    before = sorted(folder.iterdir())
    capsys.readouterr()
    places = {"gpt2": tmp_path / "gpt2", "source": folder}
    words = [word.format(**places) for word in options]
    assert run_cli(folder, small_shape, tmp_path / "grown", *words) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    assert written.err.startswith("error: ")
    assert message in written.err
    assert not (tmp_path / "grown").exists()
    assert sorted(folder.iterdir()) == before
