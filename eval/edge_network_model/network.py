"""The cell of "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative Decoding".

A small base station with the draft model, a large one with the model that verifies, and users who
send their prompts by radio. What the paper gives is taken as it is. Its path loss, the coefficients
of its latency and some symbols of its table II can't be read in our copy: `ASSUMED` names what we
have put in their place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eval.edge_network_model.equations import Model, Stations, Task, bandwidth_shares
from eval.errors import EvalError

_68M, _1B = Model("68M", 2, 768, 3072), Model("1.1B", 22, 2048, 5632)
_7B, _13B = Model("7B", 32, 4096, 11_008), Model("13B", 40, 5120, 13_824)
PAIRS = {f"{draft.name}, {verify.name}": (draft, verify) for draft, verify in (
    (_68M, _7B), (_1B, _7B), (_1B, _13B)
)}  # fmt: skip
# The fields of `Network` that the paper has, but our copy of it does not show.
ASSUMED = (
    *("num_users", "input_tokens", "output_tokens", "acceptance", "path_db", "path_exponent"),
    *("draft_tflops", "verify_tflops", "draft_gb_per_s", "verify_gb_per_s", "launch_ms"),
    *("fixed_length", "static_rows"),
)


@dataclass(frozen=True)
class Network:
    """The cell, both machines, and what users ask."""

    num_users: int = 40
    pair: str = "1.1B, 7B"
    bandwidth_mhz: float = 20.0
    power_w: float = 0.2
    noise_dbm: float = -106.0
    cell_m: float = 400.0
    path_db: float = -30.0  # Of the gain at a metre.
    path_exponent: float = 3.0
    input_tokens: tuple[int, int] = (100, 512)
    output_tokens: tuple[int, int] = (100, 512)
    acceptance: float = 0.8
    max_length: int = 10
    memory_gb: float = 16.0  # Of the small base station.
    draft_tflops: float = 60.0  # About half of an RTX 3080's peak.
    verify_tflops: float = 80.0  # About half of an RTX 4500's.
    draft_gb_per_s: float = 760.0
    verify_gb_per_s: float = 432.0
    launch_ms: float = 1.0  # Of each forward, besides reading its weights.
    reads_weights: bool = True  # Each forward reads all weights once; False: that costs nothing.
    fixed_length: int = 5  # Of the scheme that fixes it.
    static_rows: int = 4  # Of a static batch.

    @property
    def models(self) -> tuple[Model, Model]:
        """The draft model and the one that verifies."""
        return PAIRS[self.pair]

    @property
    def bits_per_token(self) -> int:
        """Equation 15: a token's embeddings for both models, in float16."""
        return 16 * sum(model.hidden_size for model in self.models)

    @property
    def stations(self) -> Stations:
        """What the paper's equations need of both base stations."""
        draft, verify = self.models
        return Stations(
            self.models,
            (self._fixed(draft, self.draft_gb_per_s), self._fixed(verify, self.verify_gb_per_s)),
            (self.draft_tflops * 1e12, self.verify_tflops * 1e12),
            self.acceptance,
            self.output_tokens[1],
            self.memory_gb * 1e9,
        )

    def _fixed(self, model: Model, gb_per_s: float) -> float:
        """The seconds of a forward whatever it computes."""
        reading = 2 * model.num_weights / (gb_per_s * 1e9) if self.reads_weights else 0.0
        return self.launch_ms / 1e3 + reading

    def check(self) -> None:
        """Refuses a cell whose longest prompt fits nowhere."""
        if not self.stations.fits(1, self.input_tokens[1]):
            raise EvalError(
                f"memory_gb must hold the draft model and one prompt (got {self.memory_gb:g})"
            )


class User(NamedTuple):
    """Who asks: a prompt, and how well the small base station hears the device."""

    task: Task
    bits: float  # Of the prompt.
    snr: float  # Power over noise.


def new_users(network: Network, seed: int) -> list[User]:
    """Users anywhere in the cell, with Rayleigh fading."""
    chance = random.Random(seed)
    return [_new_user(network, chance) for _ in range(network.num_users)]


def _new_user(network: Network, chance: random.Random) -> User:
    task = Task(chance.randint(*network.input_tokens), chance.randint(*network.output_tokens))
    distance = max(network.cell_m * math.sqrt(chance.random()), 1.0)
    path = 10 ** (network.path_db / 10) * distance**-network.path_exponent
    noise_w = 10 ** (network.noise_dbm / 10) / 1000
    snr = network.power_w * path * chance.expovariate(1.0) / noise_w
    return User(task, task.input_length * float(network.bits_per_token), snr)


def shares_of_band(users: Sequence[User], bandwidth_hz: float) -> tuple[float, list[float]]:
    """The least time in which all prompts can be sent, and each user's share of the band."""
    return bandwidth_shares(
        [user.bits / (bandwidth_hz * math.log2(1 + user.snr)) for user in users]
    )


def upload_seconds(users: Sequence[User], shares: Sequence[float], bandwidth_hz: float) -> float:
    """When the last prompt has arrived, if each user has such a share of the band."""
    return max(
        user.bits / (share * bandwidth_hz * math.log2(1 + user.snr))
        for user, share in zip(users, shares, strict=True)
    )
