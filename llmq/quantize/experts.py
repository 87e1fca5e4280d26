"""The experts of a layer one after the other, each on the tokens that it will see.

An expert's gate and up read the tokens that the router gives it, its down what they make of these. A token counts
alike whatever weight the router gives the expert for it: the sums then stand for as many tokens as were counted.

Second moments of fewer tokens than a linear has input features are singular: codes could fit these tokens, and
nothing else. An expert that fewer tokens chose is therefore shown as many as there are features: behind its own those
of the others for which the router finds it likeliest, which it would get first if texts differed a little. One that no
token chose sees only such. (On a small Mixtral that was trained for it, 8 experts of 128 and 256 features and 256 to
4,096 tokens, neither weighted sums nor other choices of tokens changed the divergence by more than the seed does.)

Nothing is kept of an expert but its codes, so that in memory there are the second moments of one. (With the sizes of
Qwen3-30B-A3B, 2,048 and 768 features, `gptq` takes 14.5 MiB more for each expert of a layer, its weights and codes;
second moments in float32 would be 18 MiB beside.)

Shape letters: T tokens of all sequences, E experts.
"""

import numpy as np

from llmq.backends.base import Block, Calibrator, Stream
from llmq.model.config import ModelConfig
from llmq.model.names import MLP_STAGE, as_mlp, expert_names


class Mixture:
    """The experts of a layer, and which tokens each of them sees.

    Args:
        calibrator: Runs them.
        stream: At ``MLP_STAGE``: its tokens are counted.
        block: Tensors of the layer; only the router is read.
        config: The model, which has experts.

    Attributes:
        experts: Names of gate, up and down of each.
        counts: Tokens that chose each.
    """

    def __init__(self, calibrator: Calibrator, stream: Stream, block: Block, config: ModelConfig) -> None:
        names = expert_names(config)
        assert names is not None
        assert config.experts is not None
        self.experts, self._calibrator = names.experts, calibrator
        self._prob_TE = calibrator.probabilities(stream, block)
        self._chosen_TE = chosen_experts(self._prob_TE, config.experts.num_chosen)
        self.counts: list[int] = self._chosen_TE.sum(axis=0).tolist()
        self._num_features = (config.hidden_size, config.intermediate_size)

    def linears(self, expert: int, stage: int) -> tuple[str, ...]:
        """The linears of an expert that read at a stage.

        Args:
            expert: Its index.
            stage: ``MLP_STAGE`` or the next.

        Returns:
            Gate and up, or down.
        """
        gate, up, down = self.experts[expert]
        return (gate, up) if stage == MLP_STAGE else (down,)

    def is_short(self, expert: int, stage: int) -> bool:
        """Whether fewer tokens chose an expert than its linears have input features.

        Args:
            expert: Its index.
            stage: At which they read.

        Returns:
            True where they are shown others as well.
        """
        return self.counts[expert] < self._num_features[stage - MLP_STAGE]

    def reads(self, stream: Stream, block: Block, expert: int, stage: int) -> Stream:
        """What one expert reads at a stage.

        Args:
            stream: All tokens, at ``MLP_STAGE``: those of the stream that was counted, or of a like one.
            block: Tensors of the layer, as they are to be run.
            expert: Its index.
            stage: As in `linears`.

        Returns:
            The tokens they see, at that stage.
        """
        prob_T, chosen_T = self._prob_TE[:, expert], self._chosen_TE[:, expert]
        tokens = shown_tokens(prob_T, chosen_T, self._num_features[stage - MLP_STAGE])
        picked = self._calibrator.pick(stream, tokens)
        if stage == MLP_STAGE:
            return picked
        return self._calibrator.advance(picked, as_mlp(self.experts[expert], block), stage)


def chosen_experts(prob_TE: np.ndarray, num_chosen: int) -> np.ndarray:
    """The likeliest experts of each token, of equal ones the first.

    Args:
        prob_TE: How likely they are.
        num_chosen: For a token.

    Returns:
        bool `[T, E]`.
    """
    chosen_TX = np.argsort(-prob_TE, axis=1, kind="stable")[:, :num_chosen]
    chosen_TE = np.zeros(prob_TE.shape, np.bool_)
    np.put_along_axis(chosen_TE, chosen_TX, True, axis=1)
    return chosen_TE


def shown_tokens(prob_T: np.ndarray, chosen_T: np.ndarray, least: int) -> np.ndarray:
    """The tokens that an expert sees in calibration.

    Args:
        prob_T: How likely the router finds it for each token.
        chosen_T: bool, which tokens chose it.
        least: See so many at least: then the likeliest of the others, of equal ones the first.

    Returns:
        Rising indices; all tokens where there are not more.
    """
    order_T = np.argsort(np.where(chosen_T, -np.inf, -prob_T), kind="stable")
    return np.sort(order_T[: max(int(chosen_T.sum()), least)])


def module_of(names: tuple[str, str, str]) -> str:
    """What an expert is called.

    Args:
        names: Of its gate, up and down.

    Returns:
        The part of them that is the same.
    """
    return names[0].rpartition(".")[0]
