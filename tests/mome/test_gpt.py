"""The backbone against a slow twin, its plug points, its decode in pieces, what must not leak, its refusals.

Lives here: what mome/gpt.py promises, with small dummies for memories.
Not here: the real memories (tests/mome/memory/, tests/mome/test_decode.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kernels.pointwise import rotary_table
from mome.errors import UserError
from mome.gpt import GPT, SITES, ModelConfig, count_flops
from mome.loss import cross_entropy

CONFIG = ModelConfig(layers=4, width=24, heads=3, max_tokens=64, long_every=2)
VOCAB = 37
WINDOWS = (2, 7)
UNITS = {"input": (24,), "residual": (24,), "value": (3, 8), "ffn": (96,)}


class Dummy(nn.Module):
    """Adds layer- and context-dependent multiples of its payload [B, T, *units], and keeps the sites that it saw."""

    def __init__(self, site: str, layers: tuple[int, ...]):
        super().__init__()
        self.site, self.layers, self.seen = site, layers, []

    def read(self, layer: int, payload: Tensor, site) -> Tensor:
        self.seen.append((layer, site))
        gate = torch.sigmoid(site.h.sum(-1) + layer).view(*site.h.shape[:2], *[1] * (site.x.dim() - 2))
        return gate * payload + 0.1 * site.x


def payload(site: str, batch: int, count: int) -> Tensor:
    return torch.randn(batch, count, *UNITS[site], dtype=torch.float64)


def trained_like(sites: tuple[str, ...] = (), config: ModelConfig = CONFIG) -> GPT:
    """A model in float64 with every parameter away from its initial value, so that each one counts."""
    layers = {"input": (0,), "residual": (0, 2), "value": (1, 3), "ffn": (0, 3)}
    model = GPT(config, VOCAB, {site: Dummy(site, layers[site]) for site in sites}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def tokens_and_docs(batch: int = 2, count: int = 29) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (batch, count)), (torch.rand(batch, count) < 0.12).int().cumsum(1).int()


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def slow_twin(model: GPT, tokens: Tensor, docs: Tensor, windows: tuple[int, int], rows: dict[str, Tensor]) -> Tensor:
    """The equations of the backbone for one sequence [T], token by token and head by head."""
    config, table = model.config, rotary_table(model.config.max_tokens, model.config.head_dim).double()

    def read(site: str, layer: int, t: int, x: Tensor, h: Tensor) -> Tensor:
        memory = model.memories[site] if site in rows else None
        if memory is None or layer not in memory.layers:
            return x
        return x + torch.sigmoid(h.sum() + layer) * rows[site][t] + 0.1 * x

    def turn(x: Tensor, t: int) -> Tensor:
        x = rms(x).clone()
        for pair in range(config.head_dim // 4):
            (cos, sin), (a, b) = table[t, pair], x[2 * pair : 2 * pair + 2].clone()
            x[2 * pair], x[2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
        return x

    embed, xs = model.embed[tokens], []
    for t in range(len(tokens)):
        e = embed[t]
        if t:
            e = e + model.smear_lambda * torch.sigmoid(model.smear_gate @ embed[t][:12]) * embed[t - 1]
        xs.append(rms(read("input", 0, t, e, rms(e))))
    starts = list(xs)
    for layer, block in enumerate(model.blocks):
        window = windows[(layer + 1) % config.long_every == 0]
        q, k, v = [], [], []
        for t, x in enumerate(xs):
            x = block.lambdas[0] * x + block.lambdas[1] * starts[t]
            xs[t] = read("residual", layer, t, x, rms(x))
            h = rms(xs[t])
            q_h, k_h, v_h = (block.qkv @ h).view(3, config.heads, config.head_dim)
            q.append([turn(one, t) for one in q_h])
            k.append([turn(one, t) for one in k_h])
            v.append(read("value", layer, t, v_h, h))
        for t, x in enumerate(xs):
            seen = [s for s in range(max(0, t - window), t + 1) if docs[s] == docs[t]]
            heads = []
            for head in range(config.heads):
                scores = torch.stack([q[t][head] @ k[s][head] for s in seen]) * model.scale
                heads.append(sum(w * v[s][head] for w, s in zip(scores.softmax(0), seen)))
            x = x + block.attn_out @ torch.cat(heads)
            h = rms(x)
            u = read("ffn", layer, t, (block.up @ h).clamp(min=0) ** 2, h)
            xs[t] = x + block.down @ u
    return torch.stack([rms(x) for x in xs])


@pytest.mark.parametrize(
    "sites", [(), *((site,) for site in SITES), SITES], ids=lambda sites: "+".join(sites) or "none"
)
def test_equals_the_slow_twin(sites):
    """Without memories, with one at each plug point, and with all at once."""
    model, (tokens_BT, docs_BT) = trained_like(sites), tokens_and_docs(2, 17)
    rows = {site: payload(site, 2, 17) for site in sites}
    hidden_BTD = model(tokens_BT, docs_BT, rows, windows=WINDOWS)
    for b in range(2):
        expected_TD = slow_twin(model, tokens_BT[b], docs_BT[b], WINDOWS, {site: rows[site][b] for site in sites})
        torch.testing.assert_close(hidden_BTD[b], expected_TD, rtol=0, atol=1e-10)
    if sites:
        off_BTD = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
        assert (off_BTD != hidden_BTD).any(-1).all()


def test_gradients_equal_the_slow_twins():
    model, (tokens_BT, docs_BT) = trained_like(SITES), tokens_and_docs(1, 9)
    rows = {site: payload(site, 1, 9).requires_grad_() for site in SITES}
    leaves = {**dict(model.named_parameters()), **rows}
    del leaves["head"]
    grad = torch.randn(1, 9, 24, dtype=torch.float64)
    ours = torch.autograd.grad(model(tokens_BT, docs_BT, rows, windows=WINDOWS), list(leaves.values()), grad)
    twin = slow_twin(model, tokens_BT[0], docs_BT[0], WINDOWS, {site: one[0] for site, one in rows.items()})
    theirs = torch.autograd.grad(twin, list(leaves.values()), grad[0])
    for name, one, other in zip(leaves, ours, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert one.abs().sum() > 0, name


@torch.no_grad()
def test_memories_of_one_site_see_the_same_and_are_summed():
    model, (tokens_BT, docs_BT) = trained_like(("value",)), tokens_and_docs()
    model.memories["other"] = Dummy("value", (1,))
    rows = {"value": payload("value", 2, 29), "other": payload("value", 2, 29)}
    both = model(tokens_BT, docs_BT, rows, windows=WINDOWS)
    first, second = model.memories["value"].seen[0], model.memories["other"].seen[0]
    assert first[0] == second[0] == 1 and first[1] is second[1]
    assert [layer for layer, _ in model.memories["value"].seen] == [1, 3]
    assert torch.equal(both, model(tokens_BT, docs_BT, dict(reversed(rows.items())), windows=WINDOWS))
    model.memories["value"].layers = (1,)
    summed = model(tokens_BT, docs_BT, rows, windows=WINDOWS)
    # A dummy reads gate * payload + x / 10: two of them are one with both payloads, and another x / 10.
    del model.memories["other"]
    model.memories["value"].read = lambda layer, payload, site: (
        2 * Dummy.read(model.memories["value"], layer, payload, site)
    )
    mean = {"value": (rows["value"] + rows["other"]) / 2}
    torch.testing.assert_close(summed, model(tokens_BT, docs_BT, mean, windows=WINDOWS), rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("batch", [3, 1])
def test_swapped_routes_show_another_context(batch):
    """Of the micro-row before; of a single one the other half. What the dummy adds still lands on its own row."""
    model, (tokens_BT, docs_BT) = trained_like(("input",)), tokens_and_docs(batch)
    rows = {"input": payload("input", batch, 29)}
    straight_BTD = model(tokens_BT, docs_BT, rows, windows=WINDOWS)
    swapped_BTD = model(tokens_BT, docs_BT, rows, windows=WINDOWS, swap_routes=True)
    (_, straight), (_, swapped) = model.memories["input"].seen
    torch.testing.assert_close(straight.h, rms(straight.x), rtol=0, atol=1e-12)
    for one, other in ((straight.x, swapped.x), (straight.h, swapped.h)):
        expected = one[[2, 0, 1]] if batch == 3 else torch.cat([one[:, 15:], one[:, :15]], 1)
        assert torch.equal(other, expected)
    assert (straight_BTD != swapped_BTD).any(-1).all()
    without_BTD = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    assert torch.equal(without_BTD, model(tokens_BT, docs_BT, {}, windows=WINDOWS, swap_routes=True))


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 29, [5, 1, 7, 3, 13], [28, 1], [2, 27], [29], [4, 0, 25]], ids=str)
def test_pieces_equal_the_whole(sizes):
    """Chunked prefill and token by token: smear, documents, both windows, memories at every site."""
    model, (tokens_BT, docs_BT) = trained_like(SITES), tokens_and_docs()
    rows = {site: payload(site, 2, 29) for site in SITES}
    whole_BTD = model(tokens_BT, docs_BT, rows, windows=WINDOWS)
    state, start, pieces = model.new_state(2, WINDOWS), 0, []
    for size in sizes:
        part = slice(start, start + size)
        rows_part = {site: one[:, part] for site, one in rows.items()}
        pieces.append(model(tokens_BT[:, part], docs_BT[:, part], rows_part, windows=WINDOWS, state=state))
        start += size
        held = [one.shape[1] for one in state.keys_BSHK]
        assert held == [min(start, window) for window in WINDOWS * 2]
    assert state.position == 29
    torch.testing.assert_close(torch.cat(pieces, 1), whole_BTD, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_state_may_be_used_with_shorter_windows():
    model, (tokens_BT, docs_BT) = trained_like(), tokens_and_docs()
    whole_BTD = model(tokens_BT, docs_BT, {}, windows=(0, 3))
    state = model.new_state(2, WINDOWS)
    pieces = [
        model(tokens, docs, {}, windows=(0, 3), state=state)
        for tokens, docs in zip(tokens_BT.split(4, 1), docs_BT.split(4, 1))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), whole_BTD, rtol=0, atol=1e-10)


def moved_by(model: GPT, tokens_BT: Tensor, docs_BT: Tensor, position: int, windows=WINDOWS) -> list[int]:
    """Positions whose hidden state another token at `position` changes."""
    before = model(tokens_BT, docs_BT, {}, windows=windows)
    tokens_BT = tokens_BT.clone()
    tokens_BT[:, position] = (tokens_BT[:, position] + 1) % VOCAB
    return (model(tokens_BT, docs_BT, {}, windows=windows) != before).any(-1).any(0).nonzero().flatten().tolist()


@torch.no_grad()
def test_no_leaks():
    """Nothing from the future, nothing past the windows, nothing across documents but the smear of one token."""
    model = trained_like()
    tokens_BT = torch.randint(0, VOCAB, (1, 40))
    one_document = torch.zeros(1, 40, dtype=torch.int32)
    assert moved_by(model, tokens_BT, one_document, 20, windows=(40, 40)) == list(range(20, 40))
    reach = 2 * sum(WINDOWS) + 1
    assert moved_by(model, tokens_BT, one_document, 5) == list(range(5, 5 + reach + 1))
    two_documents = (torch.arange(40) >= 15).int().unsqueeze(0)
    assert moved_by(model, tokens_BT, two_documents, 12, windows=(40, 40)) == [12, 13, 14]
    assert moved_by(model, tokens_BT, two_documents, 14, windows=(40, 40)) == list(range(14, 40))
    model.smear_lambda.zero_()
    assert moved_by(model, tokens_BT, two_documents, 14, windows=(40, 40)) == [14]


@torch.no_grad()
def test_micro_rows_do_not_know_each_other():
    model, (tokens_BT, docs_BT) = trained_like(), tokens_and_docs(3)
    whole = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    alone = model(tokens_BT[1:2], docs_BT[1:2], {}, windows=WINDOWS)
    torch.testing.assert_close(whole[1:2], alone, rtol=0, atol=1e-12)


def test_long_layers():
    assert [CONFIG.is_long(layer) for layer in range(4)] == [False, True, False, True]
    assert [ModelConfig(long_every=3, layers=4).is_long(layer) for layer in range(4)] == [False, False, True, False]
    assert not any(ModelConfig(long_every=0).is_long(layer) for layer in range(4))


def test_parameters_and_initial_values():
    model = GPT(ModelConfig(layers=2, width=64, heads=4, max_tokens=16), 500, {})
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    a_block = (3 + 1 + 4 + 4) * 64 * 64 + 2
    assert sum(counts.values()) == 2 * 500 * 64 + 12 + 1 + 2 * a_block
    assert set(model.state_dict()) == set(counts)
    block = model.blocks[1]
    assert not any(one.any() for one in (model.head, block.attn_out, block.down, model.smear_gate, model.smear_lambda))
    assert block.lambdas.tolist() == [1, 0]
    for weight in (block.qkv, block.up):
        assert float(weight.detach().std()) == pytest.approx(0.5 / 8, rel=0.03)
    assert model.scale == pytest.approx(0.1 * math.sqrt(128 / 16))
    assert GPT(ModelConfig(attention_scale=0.3), 5, {}).scale == 0.3


@torch.no_grad()
def test_a_fresh_model_is_the_normed_embedding():
    model, (tokens_BT, docs_BT) = GPT(CONFIG, VOCAB, {}), tokens_and_docs()
    hidden_BTD = model(tokens_BT, docs_BT, {}, windows=WINDOWS)
    torch.testing.assert_close(hidden_BTD, rms(rms(model.embed[tokens_BT])))


@torch.no_grad()
def test_compute_dtype():
    model, (tokens_BT, docs_BT) = trained_like(("value",)).float(), tokens_and_docs()
    rows = payload("value", 2, 29)
    exact = model(tokens_BT, docs_BT, {"value": rows.float()}, windows=WINDOWS)
    model.compute_dtype = torch.bfloat16
    narrow = model(tokens_BT, docs_BT, {"value": rows.bfloat16()}, windows=WINDOWS)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - exact).abs().mean() < 0.05


def test_training_lowers_the_loss():
    model = GPT(CONFIG, VOCAB, {})
    tokens_BT, docs_BT = tokens_and_docs(2, 33)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        hidden_BTD = model(tokens_BT[:, :-1], docs_BT[:, :-1], {}, windows=WINDOWS)
        loss = cross_entropy(hidden_BTD, model.head, tokens_BT[:, 1:], softcap=model.softcap, scale=1 / 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=1e-5) and losses[-1] < 1.5
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_count_flops():
    """Against products and scores counted one by one."""
    row_tokens, windows = 11, (2, 40)
    products = sum(
        2 * one.numel() for block in GPT(CONFIG, VOCAB, {}).blocks for one in block.parameters() if one.dim() == 2
    )
    products += 2 * VOCAB * 24
    pairs = sum(min(t, windows[layer % 2]) + 1 for layer in range(4) for t in range(row_tokens))
    forward = products * row_tokens + pairs * 2 * 2 * 24
    assert count_flops(CONFIG, VOCAB, row_tokens, windows) == round(3 * forward / row_tokens)
    plain = ModelConfig(kind="plain", layers=4, width=24, heads=3)
    assert count_flops(plain, VOCAB, row_tokens, (0, 0)) == count_flops(CONFIG, VOCAB, row_tokens, (40, 40))


@pytest.mark.parametrize(
    "values, words",
    [
        ({"width": 30, "heads": 4}, "--model.width 30: give a multiple of the 4 heads"),
        ({"width": 24, "heads": 4}, "--model.width 24: give a multiple of 16"),
        ({"layers": 0}, "--model.layers 0"),
        ({"max_tokens": 0}, "--model.max-tokens 0"),
        ({"long_every": -1}, "--model.long-every -1"),
        ({"attention_scale": 0.0}, "--model.attention-scale 0.0"),
        ({"kind": "rnn"}, "--model.kind rnn: choose mome or plain"),
    ],
)
def test_a_wrong_shape_is_refused(values, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(**values)


def call(
    model: GPT, tokens_BT: Tensor, windows=WINDOWS, rows=None, state=None, docs_BT: Tensor | None = None
) -> Tensor:
    docs_BT = torch.zeros_like(tokens_BT) if docs_BT is None else docs_BT
    return model(tokens_BT, docs_BT, rows or {}, windows=windows, state=state)


@torch.no_grad()
def test_wrong_input_is_refused():
    model, zeros = trained_like(("value",)), torch.zeros(2, 5, dtype=torch.long)
    for wrong in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary of 37"):
            call(model, zeros + wrong)
    with pytest.raises(ValueError, match="a sequence of 65 tokens; the model takes 64"):
        call(model, torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match="docs have shape"):
        call(model, zeros, docs_BT=zeros[:, :4])
    with pytest.raises(ValueError, match="rows of a memory 'ngram' that the model does not have; it has value"):
        call(model, zeros, rows={"ngram": None})
    with pytest.raises(ValueError, match="window -1"):
        call(model, zeros, windows=(-1, 4))
    with pytest.raises(ValueError, match="wants site nowhere"):
        GPT(CONFIG, VOCAB, {"odd": Dummy("nowhere", (0,))})
    with pytest.raises(ValueError, match=r"wants layers \(4,\)"):
        GPT(CONFIG, VOCAB, {"odd": Dummy("value", (4,))})


@torch.no_grad()
def test_a_refused_piece_leaves_the_state_as_it_was():
    model, (tokens_BT, docs_BT) = trained_like(), tokens_and_docs()
    expected = model(tokens_BT, docs_BT, {}, windows=WINDOWS)[:, 20:]
    state = model.new_state(2, WINDOWS)
    model(tokens_BT[:, :20], docs_BT[:, :20], {}, windows=WINDOWS, state=state)
    with pytest.raises(ValueError, match=r"windows \(2, 8\) are longer than the state's \(2, 7\)"):
        call(model, tokens_BT[:, :1], windows=(2, 8), state=state)
    with pytest.raises(ValueError, match="1 sequences for a state of 2"):
        call(model, tokens_BT[:1, :1], state=state)
    with pytest.raises(ValueError, match="a sequence of 65 tokens"):
        call(model, torch.zeros(2, 45, dtype=torch.long), state=state)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        call(model, torch.full((2, 1), VOCAB), state=state)
    rest = model(tokens_BT[:, 20:], docs_BT[:, 20:], {}, windows=WINDOWS, state=state)
    torch.testing.assert_close(rest, expected, rtol=0, atol=1e-10)
