"""A small Mellum with a head for the token after next, and how both are trained.

Of the models whose heads transformers runs, it is the nearest to a Llama: without experts and
windows, only the norms of queries and keys are new.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import MtpModel

from eval.errors import EvalError

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CAN_TRAIN = hasattr(MtpModel, "forward_layer")  # It is there in 5.24, and not in 5.17.
_WEIGHT = 0.3  # What the loss of the head weighs.


def dense_with_head(num_layers: int) -> dict[str, Any]:
    """A Mellum without experts and windows, with one head."""
    return {
        "rope_parameters": {"full_attention": ROPE},
        "mlp_layer_types": ["dense"] * num_layers,
        "num_mtp_layers": 1,
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["dense"],
    }


@torch.no_grad()
def begin_with(model: Any, trained: Any) -> None:
    """Takes over the weights of a Llama; norms of queries and keys begin at their usual lengths."""
    if model.config.hidden_size != trained.config.hidden_size:
        raise EvalError(
            f"--start must be a model that this command has made (got one of "
            f"{trained.config.hidden_size} dimensions, not {model.config.hidden_size})"
        )
    model.load_state_dict(trained.state_dict(), strict=False)

    def scale(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        module.weight.fill_(args[0].square().mean().sqrt())

    norms = [each for name, each in model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    handles = [norm.register_forward_pre_hook(scale) for norm in norms]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (4, 256), generator=generator)
    model(ids.to(model.device))
    for handle in handles:
        handle.remove()


class WithHead(nn.Module):
    """A model and its head, which are trained together."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__()
        self.model = model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.heads = MtpModel(model, 1).to(model.device)

    def forward(self, input_ids: torch.Tensor, **_options: Any) -> Any:
        """An object with the loss of both, for the tokens (B, L) of some texts."""
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        places = torch.arange(1, input_ids.shape[1], device=input_ids.device)[None]
        known = input_ids[:, 1:]
        ahead = self.heads.forward_layer(0, hidden, places, None, input_ids=known)
        losses = [
            cross_entropy(self.model.lm_head(states).flatten(0, 1), ids.flatten())
            for states, ids in ((hidden, known), (ahead[:, :-1], input_ids[:, 2:]))
        ]
        return SimpleNamespace(loss=losses[0] + _WEIGHT * losses[1])

    def weights(self) -> dict[str, torch.Tensor]:
        """Those of the head under the names that a Mellum's checkpoint has for them."""
        names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
        found = {}
        for name, weight in self.heads.layers[0].state_dict().items():
            first, rest = name.split(".", 1)
            place = {**names, "post_norm": "norm"}.get(first, "layers.0")
            found[f"mtp.{place}.{rest}"] = weight
        return found
