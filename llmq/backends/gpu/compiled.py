"""The decode step through `torch.compile`: opt-in, for compiling takes longer than many a session.

What lies between the attention of one layer and that of the next is one program; layers that are stored
alike share it. There is one for a single row and one for more. Attention and the head stay kernels of torch. Programs
round where eager mode rounds: the order of sums may differ, nothing else, and `rows` makes sure that no row depends
on the others. A program is called with what it was made for, so no guards are checked, and it asserts
sizes and strides itself.

Shape letters: B rows of a step, D hidden, A = H * h.
"""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import mark_dynamic

from llmq.backends.gpu.attention import StepPlace
from llmq.backends.gpu.compiler import prepare
from llmq.backends.gpu.model import Decoder, Layer, RowFunction, Turn
from llmq.errors import BackendError

#: Closes a layer and opens the next: gives the stream, queries, keys and values.
Between = Callable[[Layer, Layer, Tensor, Tensor, Turn], tuple[Tensor, ...]]


class CompiledDecoder:
    """Decode steps of a model.

    Args:
        decoder: The model.

    Attributes:
        num_compiles: Programs made so far; all are made at the start.

    Raises:
        BackendError: Nothing can be compiled here.
    """

    @torch.inference_mode()
    def __init__(self, decoder: Decoder) -> None:
        self.device, self.dtype = decoder.device, decoder.dtype
        if decoder.config.experts is not None:
            raise BackendError(
                f"compile: the experts of a {decoder.config.architecture} are chosen as each step runs; leave --compile out."
            )
        prepare(self.device)
        self._decoder, self.num_compiles = decoder, 0
        self._programs: dict[tuple[object, ...], Between] = {}
        pairs = list(itertools.pairwise(decoder.layers))
        self._keys = [(_kind(closed), _kind(opened)) for closed, opened in pairs]
        for key, pair in zip(self._keys, pairs, strict=True):
            for is_one in (True, False):
                if (*key, is_one) not in self._programs:
                    self._programs[*key, is_one] = self._compile(*pair, num_rows=1 if is_one else 2)

    def row_functions(self) -> list[RowFunction]:
        """As `Decoder.row_functions`, with one entry for each program."""
        width = self._decoder.config.num_heads * self._decoder.config.head_dim
        firsts = {key: index for index, key in reversed(list(enumerate(self._keys)))}

        def try_program(index: int, attended_BA: Tensor) -> Tensor:
            positions_B = torch.zeros(len(attended_BA), dtype=torch.int64, device=self.device)
            x_BD, turns = self._decoder.embed(positions_B, positions_B)
            parts = self._between(index, x_BD, attended_BA, turns[index + 1])
            return torch.cat([part.flatten(1) for part in parts], dim=-1)

        tried = [(width, lambda x, _, index=index: try_program(index, x)) for index in firsts.values()]
        return [*self._decoder.row_functions(), *tried]

    def forward(self, tokens_B: Tensor, positions_B: Tensor, place: StepPlace) -> Tensor:
        """As `Decoder.forward`, of a step."""
        layers = self._decoder.layers
        x_BD, turns = self._decoder.embed(tokens_B, positions_B)
        heads = self._decoder.open_layer(layers[0], x_BD, turns[0])
        for index, turn in enumerate(turns[1:]):
            x_BD, *heads = self._between(index, x_BD, place.attend(index, *heads), turn)
        return self._decoder.close_layer(layers[-1], x_BD, place.attend(len(layers) - 1, *heads))

    def _between(self, index: int, x_BD: Tensor, attended_BA: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        closed, opened = self._decoder.layers[index : index + 2]
        program = self._programs[*self._keys[index], len(x_BD) == 1]
        return program(closed, opened, x_BD, attended_BA, turn)

    def _compile(self, closed: Layer, opened: Layer, num_rows: int) -> Between:
        """The first call tells what will vary: the number of rows, where there are several."""
        config, self.num_compiles = self._decoder.config, self.num_compiles + 1

        def between(closed: Layer, opened: Layer, x_BD: Tensor, attended_BA: Tensor, turn: Turn) -> tuple[Tensor, ...]:
            x_BD = self._decoder.close_layer(closed, x_BD, attended_BA)
            return x_BD, *self._decoder.open_layer(opened, x_BD, turn)

        options: dict[str, Any] = {
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            "emulate_precision_casts": True,
        }
        if self.device.type == "cpu":
            options["cpp.threads"] = 1  # a row is too short to be shared
        program: Any = torch.compile(  # pyright: ignore[reportCallIssue]
            between, fullgraph=True, isolate_recompiles=True, options=options
        )
        positions_B = torch.arange(num_rows, device=self.device)
        x_BD, turns = self._decoder.embed(positions_B, positions_B)
        attended_BA = x_BD.new_zeros(num_rows, config.num_heads * config.head_dim)
        if num_rows > 1:
            for tensor in (x_BD, attended_BA, *turns[0]):
                mark_dynamic(tensor, 0)
        with warnings.catch_warnings():  # torch warns of what it traces through
            warnings.simplefilter("ignore")
            program(closed, opened, x_BD, attended_BA, turns[0])
        return program


def _kind(layer: Layer) -> tuple[object, ...]:
    """Equal for layers that one program computes."""
    norms = (layer.input_norm, layer.attended_norm, layer.mlp_norm, layer.out_norm, layer.q_norm, layer.k_norm)
    return (*(linear.program for linear in layer.linears), *(norm is not None for norm in norms))
