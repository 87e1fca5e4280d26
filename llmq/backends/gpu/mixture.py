"""A mixture of experts in torch: a token's MLPs are chosen as it comes.

Only experts that some token chose are computed. In a run of tokens each sees the tokens that chose it; in a step
each sees all rows, so that the number of rows is one for which no row depends on the others (see `rows`).

Shape letters: M tokens of this call, D hidden, E experts, X chosen ones.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.backends.gpu.linear import Linear
from llmq.model.config import Experts


class Expert:
    """A gated MLP: that of a layer, or one of several.

    Args:
        gate_up: Gate and up, side by side.
        down: Back to the stream.
        activation: Between them.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Callable[[Tensor], Tensor]) -> None:
        self.linears = (gate_up, down)
        self._activation = activation

    def __call__(self, x_MD: Tensor, chunk: int = 0) -> Tensor:
        """Compute it.

        Args:
            x_MD: In the compute type.
            chunk: See `Linear`.

        Returns:
            `[M, D]`.
        """
        gate_up, down = self.linears
        gate, up = gate_up(x_MD, chunk).chunk(2, dim=-1)
        return down(self._activation(gate).mul_(up), chunk)


class Mixture:
    """The experts of a layer, and what chooses them.

    Args:
        router_ED: In the type it is stored in.
        experts: One at least.
        config: How they are chosen.
    """

    def __init__(self, router_ED: Tensor, experts: Sequence[Expert], config: Experts) -> None:
        self._router_ED, self.experts, self._config = router_ED, experts, config

    @property
    def linears(self) -> list[Linear]:
        """What multiplies, but for the router."""
        return [linear for expert in self.experts for linear in expert.linears]

    @property
    def unlike(self) -> list[Expert]:
        """One of each kind of expert."""
        kinds = {
            tuple((linear.kernels, linear.num_bytes) for linear in expert.linears): expert for expert in self.experts
        }
        return list(kinds.values())

    def __call__(self, x_MD: Tensor, chunk: int = 0) -> Tensor:
        """Compute the chosen experts.

        Args:
            x_MD: In the compute type.
            chunk: See `Linear`.

        Returns:
            `[M, D]`; the sum is one of float32, rounded once.
        """
        weight_ME = route(x_MD, self._router_ED, self._config)
        y_MD = torch.zeros_like(x_MD, dtype=torch.float32)
        for index in (weight_ME > 0).any(dim=0).nonzero().flatten().tolist():
            weight_M1, expert = weight_ME[:, index, None], self.experts[index]
            if chunk:
                rows = weight_M1[:, 0].nonzero().flatten()
                y_MD.index_add_(0, rows, weight_M1[rows] * expert(x_MD[rows], chunk).float())
            else:
                y_MD += torch.where(weight_M1 > 0, weight_M1 * expert(x_MD).float(), 0.0)
        return y_MD.to(x_MD.dtype)


def route(x_MD: Tensor, router_ED: Tensor, config: Experts) -> Tensor:
    """How much each expert counts for each token.

    Args:
        x_MD: In the compute type.
        router_ED: In any type.
        config: How many are chosen.

    Returns:
        float32 `[M, E]`, 0 for experts that are not chosen.
    """
    probs_ME = probabilities(x_MD, router_ED)
    # Not topk: of equal ones it takes any.
    chosen_MX = probs_ME.sort(dim=-1, descending=True, stable=True).indices[:, : config.num_chosen]
    weight_ME = torch.zeros_like(probs_ME).scatter_(1, chosen_MX, probs_ME.gather(1, chosen_MX))
    return weight_ME / weight_ME.sum(dim=-1, keepdim=True) if config.normalized else weight_ME


def probabilities(x_MD: Tensor, router_ED: Tensor) -> Tensor:
    """How likely each expert is for each token.

    Args:
        x_MD: In the compute type.
        router_ED: In any type.

    Returns:
        float32 `[M, E]`.
    """
    return F.linear(x_MD.float(), router_ED.float()).softmax(dim=-1)
