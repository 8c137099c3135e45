"""A cell of an edge network: users, their channels, and two base stations that hold the models.

The small base station has the draft model, the large one the model that verifies. The setting is
that of "Efficient LLM Inference over Heterogeneous Edge Networks with Speculative Decoding". Its
coefficients are not known here, so all numbers below are assumed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eval.edge.latency import Coefficients, Latency, Stage, attention_horizon
from eval.edge.work import LENGTHS, Setting, Task

__all__ = ["Network", "User", "bandwidth_shares", "new_users", "upload_seconds"]


@dataclass(frozen=True)
class Network:
    """What is assumed of the cell, of both machines, and of what users ask."""

    num_users: int = 24
    bandwidth_mhz: float = 20.0
    power_dbm: float = 23.0  # Of a user's device.
    noise_dbm_per_hz: float = -174.0
    shadowing_db: float = 8.0  # Standard deviation of what stands in the way of a user.
    distance_m: tuple[float, float] = (20.0, 200.0)  # A small cell.
    bits_per_token: int = 16 * 2048  # Users send the embeddings of their prompts.
    input_tokens: tuple[int, int] = (32, 512)
    output_tokens: tuple[int, int] = (32, 128)
    acceptance: float = 0.8
    max_tokens: int = 16_384  # Rows times the tokens of the longest row, in one batch.
    fixed_ms: float = 1.0  # Of each forward, on both machines.
    draft_row_ms: float = 0.5  # Of each row, whatever its width: reading its keys and values.
    verify_row_ms: float = 3.0
    draft_weights: float = 1.1e9  # TinyLlama's size, 22 layers of 2048.
    draft_flops: float = 80e12  # A second, as they are reached.
    verify_weights: float = 13e9  # Llama 2 13B's size, 40 layers of 5120.
    verify_flops: float = 300e12

    def setting(self) -> Setting:
        """What batches are planned for; each user may be in one batch with all others."""
        draft_query = 2 * self.draft_weights / self.draft_flops
        draft = Stage(
            Coefficients(self.fixed_ms / 1e3, self.draft_row_ms / 1e3, draft_query),
            horizon=attention_horizon(self.draft_weights, 22, 2048),
        )
        verify_query = 2 * self.verify_weights / self.verify_flops
        verify = Stage(
            Coefficients(self.fixed_ms / 1e3, self.verify_row_ms / 1e3, verify_query),
            horizon=attention_horizon(self.verify_weights, 40, 5120),
        )
        latency = Latency(verify, draft)
        return Setting(latency, self.acceptance, self.num_users, self.max_tokens, LENGTHS[1:])


class User(NamedTuple):
    """Who asks: a prompt, and how well the small base station hears the device."""

    task: Task
    bits: float  # Of the prompt.
    snr: float  # Power over noise in the whole band.


def new_users(network: Network, seed: int) -> list[User]:
    """Users at random places of a ring around the base station, some of them behind walls."""
    chance = random.Random(seed)
    return [_new_user(network, chance) for _ in range(network.num_users)]


def _new_user(network: Network, chance: random.Random) -> User:
    task = Task(chance.randint(*network.input_tokens), chance.randint(*network.output_tokens))
    near, far = network.distance_m
    distance_km = math.sqrt(chance.uniform(near**2, far**2)) / 1000
    path_loss_db = 128.1 + 37.6 * math.log10(distance_km) + chance.gauss(0, network.shadowing_db)
    noise_dbm = network.noise_dbm_per_hz + 10 * math.log10(network.bandwidth_mhz * 1e6)
    snr = 10 ** ((network.power_dbm - path_loss_db - noise_dbm) / 10)
    return User(task, task.input_length * float(network.bits_per_token), snr)


def bandwidth_shares(users: Sequence[User], bandwidth_hz: float) -> tuple[float, list[float]]:
    """The least time in which all prompts can be sent at once, and each user's share of the band.

    With W the bandwidth, D_n the bits and SNR_n the channel of each user:

        t* = sum of D_n / (W log2(1 + SNR_n)),    b_n = D_n / (t* W log2(1 + SNR_n))

    All prompts arrive at t*. The shares add up to 1.
    """
    alone = [user.bits / (bandwidth_hz * math.log2(1 + user.snr)) for user in users]
    seconds = sum(alone)
    return seconds, [each / seconds for each in alone]


def upload_seconds(users: Sequence[User], shares: Sequence[float], bandwidth_hz: float) -> float:
    """When the last prompt has arrived, if each user has such a share of the band."""
    return max(
        user.bits / (share * bandwidth_hz * math.log2(1 + user.snr))
        for user, share in zip(users, shares, strict=True)
    )
