"""Safetensors files: read whole wherever a range begins, and refused with the reason if damaged."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from selfspec import WeightsError
from selfspec.run.streamed import files
from selfspec.run.streamed.files import BLOCK, Shard, aligned_buffer
from selfspec.run.streamed.images import Image, Weight, copy_into


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
    save_file(tensors, tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


@pytest.fixture
def shard(path):
    shard = Shard(path)
    yield shard
    shard.close()


@pytest.fixture(params=["direct", "cached", "no preadv"])
def way(request, monkeypatch):
    """How bytes are read: past the page cache, through it, or where the system has neither."""
    if request.param != "direct":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    if request.param == "no preadv":
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.delattr(os, "posix_fadvise", raising=False)


@pytest.mark.parametrize("chunk", [BLOCK, files._CHUNK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_hold_what_the_file_holds(way, tensors, path, dtype, chunk, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK", chunk)
    monkeypatch.setattr("selfspec.run.streamed.images._PART", 256)
    shard = Shard(path)
    weights = [
        Weight(dtype, tuple(tensor.shape), [shard.tensors[name]])
        for name, tensor in tensors.items()
    ]
    image = Image(weights)
    buffer = aligned_buffer(image.num_bytes)
    image.fill(buffer, aligned_buffer(image.scratch_bytes))
    for view, tensor in zip(image.views(buffer), tensors.values(), strict=True):
        assert view.dtype == dtype
        assert torch.equal(view, tensor.to(dtype))
    shard.close()


def test_neighbours_are_read_in_one_go(tensors, shard):
    same = [name for name in tensors if tensors[name].dtype == torch.bfloat16]
    image = Image(
        [Weight(torch.bfloat16, shard.tensors[n].shape, [shard.tensors[n]]) for n in same]
    )
    assert len(image._runs) == 1
    assert image.scratch_bytes == 0


def test_pieces_are_put_one_behind_the_other(tensors, shard):
    weight = torch.empty(20, 150)
    parts = [shard.tensors["b"], shard.tensors["d"].part(0, 10)]
    copy_into(weight, parts, aligned_buffer(10 * BLOCK))
    assert torch.equal(weight.view(-1)[:2800], tensors["b"].view(-1))
    assert torch.equal(weight.view(-1)[2800:], tensors["d"][:200].float())


def test_a_file_system_without_direct_reads(path, tensors, monkeypatch):
    """It may open files for them and refuse the read itself."""
    shard, weight = Shard(path), torch.empty(40, 70)
    if shard._direct < 0:
        pytest.skip("there are no direct reads here")
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(22, "no")))
    copy_into(weight, [shard.tensors["b"]], aligned_buffer(10 * BLOCK))
    assert torch.equal(weight, tensors["b"])
    shard.close()


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


def test_a_file_that_was_written_to_since(shard, path):
    shard.check()
    os.utime(path, ns=(1, 1))
    with pytest.raises(WeightsError, match="changed"):
        shard.check()


def test_a_file_that_gets_shorter_while_it_is_read(way, path):
    shard = Shard(path)
    os.truncate(path, 100)
    with pytest.raises(WeightsError, match="it ends at byte"):
        shard.read(0, memoryview(aligned_buffer(3 * BLOCK).numpy()))
    shard.close()
