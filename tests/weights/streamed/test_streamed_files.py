"""Safetensors files: their tensors are found and read, and damage is refused with the reason."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from selfspec import WeightsError
from selfspec.weights.streamed import files
from selfspec.weights.streamed.files import BLOCK, Shard, aligned_buffer
from selfspec.weights.streamed.layer_weights import LayerWeights, Weight, new_scratch, read_into


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(3)
    sizes = {"a": (3, 5), "b": (40, 70), "c": (), "d": (2000,), "e": (17, 3)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16 if name > "b" else None)
        for name, shape in sizes.items()
    }


@pytest.fixture
def path(tensors, tmp_path):
    save_file(tensors, tmp_path / "some.safetensors", metadata={"format": "pt"})
    return tmp_path / "some.safetensors"


@pytest.fixture
def shard(path):
    shard = Shard(path)
    yield shard
    shard.close()


@pytest.fixture(params=["direct", "cached", "refused", "no posix_fadvise"])
def way(request, monkeypatch):
    """How bytes are read. A file system may open files for direct reads and refuse the read."""
    if request.param == "refused":
        monkeypatch.setattr(files, "aligned_buffer", lambda size: torch.empty(size + 1).byte()[1:])
    elif request.param != "direct":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if request.param == "no posix_fadvise":
        monkeypatch.delattr(os, "posix_fadvise", raising=False)


@pytest.mark.parametrize("chunk", [BLOCK, files.CHUNK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_hold_what_the_file_holds(way, tensors, path, dtype, chunk, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", chunk)
    monkeypatch.setattr("selfspec.weights.streamed.layer_weights._PART", 256)
    shard = Shard(path)
    layer = LayerWeights(
        [
            Weight(dtype, tuple(tensor.shape), [shard.tensors[name]])
            for name, tensor in tensors.items()
        ]
    )
    buffer = aligned_buffer(layer.num_bytes)
    layer.fill(buffer, aligned_buffer(layer.scratch_bytes))
    for view, tensor in zip(layer.views(buffer), tensors.values(), strict=True):
        assert view.dtype == dtype
        assert torch.equal(view, tensor.to(dtype))
    shard.close()


def test_neighbours_are_read_at_once(shard):
    weights = [Weight(each.dtype, each.shape, [each]) for each in shard.tensors.values()]
    layer = LayerWeights(weights)
    assert len(layer._runs) == 1
    assert layer.scratch_bytes == 0


def test_tensors_are_joined(tensors, shard):
    weight = torch.empty(20, 150)
    read_into(weight, [shard.tensors["b"], shard.tensors["d"].part(1, 10)], new_scratch())
    assert torch.equal(weight.view(-1)[:2800], tensors["b"].view(-1))
    assert torch.equal(weight.view(-1)[2800:], tensors["d"][200:400].float())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-10],
        lambda data: data[:30],
        lambda _: b"torn" * 99,
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"BF16"', b'"F8_X"'),
        lambda data: data.replace(b"[3,5]", b"[3,6]"),
    ],
)
def test_damaged_files(damage, path):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError) as caught:
        Shard(path)
    assert str(path) in str(caught.value)


def test_a_file_that_gets_shorter_while_it_is_read(path):
    shard = Shard(path)
    os.truncate(path, 100)
    with pytest.raises(WeightsError, match="it ends at byte 100 now"):
        shard.read(0, aligned_buffer(3 * BLOCK))
    shard.close()
