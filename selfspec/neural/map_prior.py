"""What a map of hidden states knows before a text begins: one regression for all texts.

From the state before a token and the token's embedding it guesses the state after it, as the map
does. It is solved in closed form from texts that the model has read while a cache was built. The
map of a text then learns what these guesses leave over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import embedding

from selfspec.compat.modules import embeddings_of
from selfspec.weights import gives_rows

_RIDGE = 1e-3  # Of the mean variance of what is read.
_LEAST_PAIRS = 4  # For each number that is read. From fewer, the guesses are hardly worth having.
_MOST_READ = 8192  # Numbers. The sums over 8,192 take 800 MB, and solving them half a minute.
_MOST_NUMBERS = 1_600_000  # Of the two matrices, which every step reads.
_NUM_ROWS = 64  # Tokens whose embeddings tell one model from another.
_NUM_BITS = 256  # Of a fingerprint.
_MOST_OTHER_BITS = 8  # Those of two models differ in 128 bits or so, and rounding changes 1 or 2.

_log = logging.getLogger("selfspec")


def fingerprint(embeddings: torch.Tensor) -> NDArray[np.uint32]:
    """(8,): nearly the same bits in any precision, 8 bits too, and after a little tuning.

    Each bit is the sign of a sum over a part of the first embeddings.
    """
    ids = torch.arange(min(_NUM_ROWS, len(embeddings)), device=embeddings.device)
    numbers = embedding(ids, embeddings).detach().cpu().float().flatten()
    sums = [float(part[::2].sum() - part[1::2].sum()) for part in numbers.tensor_split(_NUM_BITS)]
    return np.packbits(np.array(sums) > 0).view(np.uint32)


def _is_of(arrays: Mapping[str, Any], embeddings: torch.Tensor, dims: int) -> bool:
    """Were these made with a model that has these embeddings, and states of `dims` numbers?"""
    width, found = (*arrays["mean"].shape, arrays["up"].shape[1]), arrays["model"]
    if width != (dims + embeddings.shape[1], dims):
        return False
    others = np.unpackbits((found ^ fingerprint(embeddings)).view(np.uint8))
    return int(others.sum()) <= _MOST_OTHER_BITS


class MapPrior(NamedTuple):
    """Guesses states (D,) from X = [state before; embedding], D + E numbers."""

    mean: torch.Tensor  # (D + E,): of X
    scale: torch.Tensor  # (D + E,): what makes each half of X about as long as 1
    down: torch.Tensor  # (D + E, R)
    up: torch.Tensor  # (R, D)

    @classmethod
    def of(cls, arrays: Mapping[str, Any] | None, embeddings: Any, dims: int) -> MapPrior | None:
        """That of a cache, for a model with states of `dims` numbers; None if there is none."""
        if arrays is None:
            return None
        if not _is_of(arrays, embeddings, dims):
            _log.info("the cache knows hidden states of another model, which are left out")
            return None
        return cls(*(torch.from_numpy(arrays[name]).float() for name in cls._fields))

    def scales(self, dims: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The mean and the scale of states, and those of embeddings."""
        mean, scale = self.mean, self.scale
        return (mean[:dims], scale[:dims]), (mean[dims:], scale[dims:])

    def guess(self, before: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """(N, D): the states after, from states and embeddings that were scaled."""
        read = torch.cat([before, embedded], dim=-1)
        return read @ self.down @ self.up + self.mean[: before.shape[1]]


class PriorSums:
    """The sums over pairs that a prior is solved from: (D + E + 1)² and (D + E + 1) D numbers.

    Each pair costs as many multiplications. More sums can be added to them at any time.
    """

    def __init__(self, embeddings: torch.Tensor, dims: int) -> None:
        """For a model with these input embeddings (V, E), whose states have D = `dims` numbers."""
        self.num = 0
        self._embeddings = embeddings
        # X' X and X' Y, with a column of ones at the end of X.
        read = dims + embeddings.shape[1] + 1
        self._products = torch.zeros(read, read, dtype=torch.double, device="cpu")
        self._answers = torch.zeros(read, dims, dtype=torch.double, device="cpu")

    @classmethod
    def of(cls, model: Any) -> PriorSums | None:
        """Those of a model; None without plain embeddings or head, or if they are too large."""
        inputs, head = embeddings_of(model), model.get_output_embeddings()
        if not isinstance(inputs, nn.Embedding) or not isinstance(head, nn.Linear):
            return None
        num_read = head.in_features + inputs.embedding_dim
        is_fit = num_read <= _MOST_READ and gives_rows(inputs.weight)
        return cls(inputs.weight, head.in_features) if is_fit else None

    def add(self, before: torch.Tensor, ids: torch.Tensor, after: torch.Tensor) -> None:
        """Takes in the states (N, D) before and after tokens (N,)."""
        embedded = embedding(ids.to(self._embeddings.device), self._embeddings).to(before.device)
        read = torch.cat([before, embedded, torch.ones_like(before[:, :1])], dim=-1).float()
        self._products += (read.T @ read).cpu()
        self._answers += (read.T @ after.float()).cpu()
        self.num += len(after)

    def arrays(self) -> dict[str, NDArray[Any]] | None:
        """The prior for a cache; None from too few pairs, or from what is not finite."""
        if self.num < _LEAST_PAIRS * (len(self._products) - 1):
            return None
        try:
            found = self._solved()
        except RuntimeError:  # There is no factor.
            return None
        halves = {name: each.half().contiguous().numpy() for name, each in found.items()}
        if not all(np.isfinite(each).all() for each in halves.values()):
            return None
        return {**halves, "model": fingerprint(self._embeddings)}

    def _solved(self) -> dict[str, torch.Tensor]:
        """The numbers of a `MapPrior`, in double precision."""
        dims, size, num = self._answers.shape[1], len(self._answers) - 1, self.num
        mean = self._products[-1, :-1] / num
        products = self._products[:-1, :-1] - num * mean.outer(mean)
        answers = self._answers[:-1] - mean.outer(self._answers[-1])
        variances = products.diag() / num
        scale = torch.cat([_scale(variances[:dims]), _scale(variances[dims:])])
        products = products * scale.outer(scale)
        ridge = _RIDGE * products.diag().mean() * torch.eye(size, dtype=torch.double, device="cpu")
        weights = torch.linalg.solve(products + ridge, answers * scale[:, None])
        # Of what the guesses vary in, the R directions in which they vary most; ascending order.
        rank = max(1, min(dims, _MOST_NUMBERS // (size + dims)))
        ways = torch.linalg.eigh(weights.T @ products @ weights).eigenvectors[:, -rank:]
        return {"mean": mean, "scale": scale, "down": weights @ ways, "up": ways.T}


def _scale(variances: torch.Tensor) -> torch.Tensor:
    """What brings numbers to one variance, and all together to a length of 1; 0 for constants."""
    varies = variances > 1e-6 * variances.mean()
    lengths = (variances.clamp(min=0) * varies.sum()).sqrt()
    return torch.where(varies, 1 / lengths, torch.zeros_like(lengths))
