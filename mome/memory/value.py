"""ValueMemory: a dense value embedding, the baseline that routed memory is measured against.

Lives here: one row a token, a lane for each memory layer and head, added to the attention values through MoME's gate.
Not here: routing (routed.py). With as many slots as heads routed memory has the same table.

Equations (value embeddings as in MoME's released code, jojo23333/Mixutre-Of-Memory-Embedding): for head i of layer l
    v'_{t,i} = v_{t,i} + gamma_{t,i} E[x_t, l, i],    gamma_t = 2 sigmoid(W_l h_t[:C]), one a head, 1 at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mome.memory.base import (
    Memory,
    ModelShape,
    Placement,
    PlugPoint,
    check,
    check_gate_channels,
    open_gates,
    place_layers,
    zero_gates,
)
from mome.table.spec import TableSpec


@dataclass(frozen=True)
class ValueConfig:
    """Options of the dense value embedding."""

    layers: Placement = "alternate"
    """Layers with a memory: alternate (every second, ending at the last), all, last, or layer numbers."""
    gate_channels: int = 32
    """Channels of the hidden state that the gates look at."""
    init: float | None = None
    """Half-width of the rows' uniform initial values; None: sqrt(3 / width)."""

    def __post_init__(self):
        check(self.init is None or self.init >= 0, "value.init", self.init, "a half-width is 0 or more")


class ValueMemory(Memory):
    """Dense value embedding; row = token id, lane = layer index * heads + head, dim = head_dim."""

    Config = ValueConfig
    site = "value"
    reads = 1
    history = 0

    def __init__(self, config: ValueConfig, model: ModelShape, seed: int):
        """seed is not used: the rows are the table's, and the gates start at zero."""
        super().__init__()
        check_gate_channels("value.gate_channels", config.gate_channels, model.width)
        self.layers = place_layers(config.layers, model.layers, "value.layers")
        self.heads = model.heads
        init = (3 / model.width) ** 0.5 if config.init is None else config.init
        self.spec = TableSpec(model.vocab_size, len(self.layers) * model.heads, model.head_dim, init)
        self.gate = zero_gates(len(self.layers), model.heads, config.gate_channels)

    def row_ids(self, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        return tokens_BT.long().unsqueeze(-1)

    def prepare(self, rows_BTRLD: Tensor, tokens_BT: Tensor, history_BH: Tensor | None) -> tuple[Tensor, ...]:
        """Rows [B, T, H, K] of each memory layer."""
        # unbind, because its backward writes each layer's gradient once; slices would each pad theirs with zeros.
        return rows_BTRLD.squeeze(2).unflatten(2, (len(self.layers), self.heads)).unbind(2)

    def read(self, layer: int, payload: tuple[Tensor, ...], site: PlugPoint) -> Tensor:
        index = self.layers.index(layer)
        gates_BTH = open_gates(site.h, self.gate[index])
        return (gates_BTH.unsqueeze(-1) * payload[index]).to(site.x.dtype)
