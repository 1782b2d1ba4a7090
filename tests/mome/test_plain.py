"""The plain GPT against one built from torch's own modules, its size, its decode, its refusals.

Lives here: what mome/plain.py promises.
Not here: its training (tests/optim/), its loss (tests/mome/test_loss.py).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mome.gpt import GPT, ModelConfig
from mome.plain import PlainGPT

CONFIG = ModelConfig(kind="plain", layers=3, width=20, heads=4, max_tokens=16)
VOCAB = 31
WINDOWS = (2, 4)


def trained_like() -> PlainGPT:
    """A model in float64 with every parameter away from its initial value."""
    model = PlainGPT(CONFIG, VOCAB).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens_and_docs(batch: int = 2, count: int = 13) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (batch, count)), (torch.rand(batch, count) < 0.2).int().cumsum(1).int()


class TorchGPT(nn.Module):
    """GPT-2 from torch's transformer layers, filled with a PlainGPT's weights."""

    def __init__(self, model: PlainGPT):
        super().__init__()
        config = model.config

        def layer() -> nn.TransformerEncoderLayer:
            return nn.TransformerEncoderLayer(
                config.width, config.heads, 4 * config.width, dropout=0.0, batch_first=True, norm_first=True,
                activation=lambda x: F.gelu(x, approximate="tanh"),
            )  # fmt: skip

        self.embed, self.position = nn.Embedding(VOCAB, config.width), nn.Embedding(config.max_tokens, config.width)
        self.layers, self.norm = nn.ModuleList(layer() for _ in range(config.layers)), nn.LayerNorm(config.width)
        self.double()
        self.embed.weight.data, self.position.weight.data = model.embed.data, model.positions.data
        self.norm.load_state_dict(model.norm.state_dict())
        for mine, block in zip(self.layers, model.blocks):
            mine.self_attn.in_proj_weight.data, mine.self_attn.in_proj_bias.data = (
                block.qkv.weight.data,
                block.qkv.bias.data,
            )
            pairs = (
                (mine.self_attn.out_proj, block.attn_out), (mine.linear1, block.up), (mine.linear2, block.down),
                (mine.norm1, block.attn_norm), (mine.norm2, block.mlp_norm),
            )  # fmt: skip
            for one, other in pairs:
                one.load_state_dict(other.state_dict())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        count = tokens_BT.shape[1]
        x_BTD = self.embed(tokens_BT) + self.position.weight[:count]
        unseen_TT = torch.ones(count, count, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x_BTD = layer(x_BTD, src_mask=unseen_TT)
        return self.norm(x_BTD)


def test_equals_torchs_own_modules():
    model = trained_like()
    twin = TorchGPT(model)
    tokens_BT, docs_BT = tokens_and_docs()
    hidden_BTD = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    expected_BTD = twin(tokens_BT)
    torch.testing.assert_close(hidden_BTD, expected_BTD, rtol=0, atol=1e-10)
    grad = torch.randn_like(hidden_BTD)
    ours = torch.autograd.grad(hidden_BTD, [model.embed, model.blocks[0].qkv.weight], grad)
    theirs = torch.autograd.grad(expected_BTD, [twin.embed.weight, twin.layers[0].self_attn.in_proj_weight], grad)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert sum(one.numel() for one in model.parameters()) == sum(one.numel() for one in twin.parameters())


def test_parameter_count_is_gpt2s():
    config = ModelConfig(kind="plain", layers=12, width=768, heads=12, max_tokens=1024)
    with torch.device("meta"):
        model = PlainGPT(config, 50257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_initial_values():
    model = PlainGPT(ModelConfig(kind="plain", layers=8, width=128, heads=4, max_tokens=64), 500)
    block = model.blocks[3]
    for weight, std in ((model.embed, 0.02), (block.qkv.weight, 0.02), (block.up.weight, 0.02),
                        (block.attn_out.weight, 0.005), (block.down.weight, 0.005)):  # fmt: skip
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
    assert all(not one.bias.any() for one in (block.qkv, block.attn_out, block.up, block.down))
    assert model.head is model.embed and not model.softcap


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 13, [5, 1, 4, 3], [12, 1], [13]])
def test_pieces_equal_the_whole(sizes):
    model = trained_like()
    tokens_BT, docs_BT = tokens_and_docs()
    whole_BTD = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    state = model.new_state(2, WINDOWS)
    pieces = [
        model(tokens, docs, {}, windows=WINDOWS, state=state)
        for tokens, docs in zip(tokens_BT.split(sizes, 1), docs_BT.split(sizes, 1))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole_BTD, rtol=0, atol=1e-12)


@torch.no_grad()
def test_nothing_comes_from_the_future():
    model = trained_like()
    tokens_BT, docs_BT = tokens_and_docs()
    before = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    tokens_BT[:, 7] = (tokens_BT[:, 7] + 1) % VOCAB
    moved = (model(tokens_BT, docs_BT, {}, windows=WINDOWS) != before).any(-1)
    assert not moved[:, :7].any() and moved[:, 7:].all()


@torch.no_grad()
def test_compute_dtype():
    model = PlainGPT(CONFIG, VOCAB)
    tokens_BT, docs_BT = tokens_and_docs()
    exact = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    model.compute_dtype = torch.bfloat16
    narrow = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), exact, rtol=0, atol=0.1)


def test_refusals():
    model = PlainGPT(CONFIG, VOCAB)
    tokens_BT, docs_BT = tokens_and_docs()
    with pytest.raises(ValueError, match="no memories"):
        model(tokens_BT, docs_BT, {"routed": None}, windows=WINDOWS)
    with pytest.raises(ValueError, match="no memories"):
        model(tokens_BT, docs_BT, {}, windows=WINDOWS, swap_routes=True)
    with pytest.raises(ValueError, match="token id 31 is outside the vocabulary of 31"):
        model(torch.full((1, 2), 31), torch.zeros(1, 2), {}, windows=WINDOWS)
    with pytest.raises(ValueError, match="a sequence of 17 tokens; the model takes 16"):
        model(torch.zeros(1, 17, dtype=torch.long), torch.zeros(1, 17), {}, windows=WINDOWS)
    with pytest.raises(ValueError, match="kind plain"):
        PlainGPT(ModelConfig(), VOCAB)
    with pytest.raises(ValueError, match="kind mome"):
        GPT(CONFIG, VOCAB, {})
