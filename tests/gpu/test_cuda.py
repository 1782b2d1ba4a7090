"""What runs on a CUDA device is what the CPU computes: ops, tables, the whole model, a step of the optimizers, NCCL.

Lives here: comparisons of the device with the CPU through public names, marked gpu, run by tests/gpu/check.sh.
Not here: whether the CPU is right (the rooms' own tests) and how fast the device is.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels.attention import AttentionPlan, attention_reference, windowed_attention
from kernels.cross_entropy import chunked_cross_entropy_sum, cross_entropy_reference
from mome.gpt import GPT, ModelConfig
from mome.loss import cross_entropy
from mome.memory import MEMORIES, ModelShape
from mome.run import Parts
from mome.table.parts import state_parts
from mome.table.rows import RowTable, TableSpec
from optim.groups import OptimConfig, build_optimizers
from optim.rows import RowRule
from tests.trained import rows_of

DEVICE = "cuda"
NO_CUDA = "needs a CUDA device: run tests/gpu/check.sh on a machine that has one"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]
VOCAB, BOS = 509, 0
WINDOWS = (16, 48)


def distance(value: Tensor, truth: Tensor) -> float:
    """Relative error in the 2-norm (absolute where the truth is zero), in float64 on the CPU."""
    truth = truth.detach().cpu().double()
    return ((value.detach().cpu().double() - truth).norm() / (truth.norm().item() or 1.0)).item()


def packed(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents of random packed rows [batch, tokens]."""
    tokens_BT = torch.randint(1, VOCAB, (batch, tokens + 1))
    tokens_BT[torch.rand(batch, tokens + 1) < 0.05] = BOS
    docs_BT = (tokens_BT[:, :-1] == BOS).cumsum(1).int()
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous(), docs_BT


def build(device: str, dtype: torch.dtype, names: tuple[str, ...] = tuple(MEMORIES)) -> Parts:
    """A small model whose every parameter is away from zero, with its memories and tables; the same on every device."""
    config = ModelConfig(layers=4, width=64, heads=4, max_tokens=256)
    shape = ModelShape(config.layers, config.width, config.heads, config.head_dim, VOCAB, BOS)
    memories = {name: MEMORIES[name](MEMORIES[name].Config(), shape, seed=1) for name in names}
    torch.manual_seed(1)
    model = GPT(config, VOCAB, memories)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rule = RowRule("adam", beta2=0.98, weight_decay=0.01)
    tables = {
        name: RowTable(memory.spec, rule, 1, torch.promote_types(dtype, torch.float32), device, name)
        for name, memory in memories.items()
    }
    return Parts(model.to(device, torch.promote_types(dtype, torch.float32)), memories, tables)


def step(parts: Parts, data: tuple[Tensor, Tensor, Tensor], device: str, dtype: torch.dtype):
    """Forward and backward: loss in nats a token, hidden states, and the working sets with their gradients."""
    tokens_BT, targets_BT, docs_BT = (one.to(device) for one in data)
    ids = parts.row_ids(tokens_BT)
    sets = {name: table.pull([ids[name]]) for name, table in parts.tables.items()}
    parts.model.compute_dtype = dtype
    payloads = parts.payloads({name: one.gather(0).to(dtype) for name, one in sets.items()}, tokens_BT)
    hidden_BTD = parts.model(tokens_BT, docs_BT, payloads, windows=WINDOWS)
    loss = cross_entropy(
        hidden_BTD, parts.model.head, targets_BT, softcap=parts.model.softcap, scale=1 / targets_BT.numel()
    )
    loss.backward()
    return loss.item(), hidden_BTD.detach(), sets


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "offset", "window"), [(777, 0, 128), (300, 0, 1000), (3, 290, 128), (1, 0, 0)])
def test_attention(dtype, queries, offset, window):
    """Values and gradients are no further from float64 than the oracle in the same dtype on the same device."""
    docs_BS = (torch.rand(2, offset + queries) < 0.01).cumsum(1)
    q, k, v, out_grad = (torch.randn(2, n, 3, 32) for n in (queries, offset + queries, offset + queries, queries))

    def run(attend, device, kind):
        leaves = [x.to(device, kind, copy=True).requires_grad_() for x in (q.to(dtype), k.to(dtype), v.to(dtype))]
        docs = docs_BS.to(device)
        y = attend(*leaves, docs[:, offset:], docs)
        y.backward(out_grad.to(dtype).to(device, kind))
        return [y, *(leaf.grad for leaf in leaves)]

    def windowed(q, k, v, docs_BT, docs_BS):
        return windowed_attention(q, k, v, AttentionPlan(docs_BT, docs_BS, window, offset, dtype=q.dtype), 0.2)

    def oracle(q, k, v, docs_BT, docs_BS):
        return attention_reference(q, k, v, docs_BT, docs_BS, window, 0.2, offset)

    truth = run(oracle, "cpu", torch.float64)
    slack = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
    for value, naive, exact in zip(run(windowed, DEVICE, dtype), run(oracle, DEVICE, dtype), truth):
        assert value.device.type == DEVICE
        assert distance(value, exact) <= distance(naive, exact) + slack


@pytest.mark.parametrize("softcap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy(dtype, softcap):
    hidden_ND, weight_VD = torch.randn(601, 96).to(dtype), torch.randn(VOCAB, 96).to(dtype)
    targets_N = torch.randint(VOCAB, (601,)).masked_fill(torch.rand(601) < 0.1, -100)

    def run(summed, device, kind):
        leaves = [x.to(device, kind, copy=True).requires_grad_() for x in (hidden_ND, weight_VD)]
        total = summed(*leaves, targets_N.to(device))
        total.backward()
        return [total, *(leaf.grad for leaf in leaves)]

    def oracle(hidden, weight, targets):
        return cross_entropy_reference(hidden, weight, targets, softcap).sum() / 64

    def chunked(hidden, weight, targets):
        return chunked_cross_entropy_sum(hidden, weight, targets, softcap, 1 / 64, rows=128, classes=200)

    truth = run(oracle, "cpu", torch.float64)
    slack = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
    for value, naive, exact in zip(run(chunked, DEVICE, dtype), run(oracle, DEVICE, dtype), truth):
        assert distance(value, exact) <= distance(naive, exact) + slack


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd", "momentum", "factored"])
def test_table(kind):
    """Five cycles with overlapping rows, gaps, a schedule and decay: rows, state and clock are the CPU's."""
    spec = TableSpec(rows=200, lanes=3, dim=16, init=0.5)
    rule = RowRule(kind, beta2=0.9, weight_decay=0.1)
    tables = [RowTable(spec, rule, 7, torch.float64, device, "t") for device in ("cpu", DEVICE)]
    everything = torch.arange(spec.rows)
    assert torch.equal(tables[1].read_rows(everything.to(DEVICE)).cpu(), tables[0].read_rows(everything))
    for event in range(5):
        ids = [torch.randint(20 * event, 100 + 20 * event, (4, 9)) for _ in range(2)]
        grads = [torch.randn(4, 9, 3, 16, dtype=torch.float64) for _ in ids]
        for table in tables:
            ws = table.pull([one.to(table.device) for one in ids])
            for place, grad in enumerate(grads):
                ws.gather(place).backward(grad.to(table.device))
            assert table.push(ws, 0.1 / (event + 1)) == len(ws.ids)
        assert tables[1].stores["rows"].memory.device.type == DEVICE
        (one,), (other,) = (list(state_parts(table)) for table in tables)
        assert_close(other, one, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="200"):
        tables[1].pull([torch.tensor([3, 200], device=DEVICE)])


def test_model_in_float64_equals_the_cpu():
    """All memories on: loss, hidden states, gradients of every parameter and row, and the rows after a push."""
    data = packed(3, 130)
    sides = []
    for device in ("cpu", DEVICE):
        parts = build(device, torch.float64)
        loss, hidden_BTD, sets = step(parts, data, device, torch.float64)
        found = {"loss": torch.tensor(loss, dtype=torch.float64), "hidden": hidden_BTD}
        found |= {f"grad of {name}": parameter.grad for name, parameter in parts.model.named_parameters()}
        found |= {f"rows of {name}": ws.rows.grad.clone() for name, ws in sets.items()}
        for name, table in parts.tables.items():
            table.push(sets[name], 0.05)
            found[f"table {name}"] = table.read_rows(torch.arange(table.spec.rows, device=device))
        sides.append({name: value.detach().cpu() for name, value in found.items()})
    assert float(sides[0]["rows of routed"].abs().sum()) > 0
    assert_close(sides[1], sides[0], rtol=1e-9, atol=1e-11)


def test_model_in_bfloat16_is_near_float32():
    """Without memory, whose routes may flip: hidden states and matrices' gradients to the rounding of bfloat16."""
    data = packed(4, 200)
    reference, parts = build("cpu", torch.float32, ()), build(DEVICE, torch.float32, ())
    loss, hidden_BTD, _ = step(reference, data, "cpu", torch.float32)
    rounded, hidden_rounded_BTD, _ = step(parts, data, DEVICE, torch.bfloat16)
    assert hidden_rounded_BTD.dtype == torch.bfloat16
    assert abs(rounded - loss) < 0.01
    assert distance(hidden_rounded_BTD, hidden_BTD) < 0.02
    for (name, one), other in zip(reference.model.named_parameters(), parts.model.parameters()):
        assert other.grad.dtype == torch.float32
        # A gradient of one or two numbers is a sum that may cancel.
        assert one.ndim < 2 or distance(other.grad, one.grad) < 0.05, name


def test_model_with_memories_in_bfloat16_has_the_loss_of_float32():
    data = packed(4, 200)
    loss, _, _ = step(build("cpu", torch.float32), data, "cpu", torch.float32)
    rounded, _, sets = step(build(DEVICE, torch.float32), data, DEVICE, torch.bfloat16)
    assert abs(rounded - loss) < 0.02
    assert all(ws.rows.grad.dtype == torch.float32 and bool(ws.rows.grad.isfinite().all()) for ws in sets.values())


@torch.no_grad()
def test_pieces_equal_the_whole():
    """A prompt in a piece and then token by token gives the hidden states of one forward pass, on the device."""
    parts = build(DEVICE, torch.float64)
    tokens_BT, _, docs_BT = (one.to(DEVICE) for one in packed(2, 70))

    def forward(first: int, last: int, state=None) -> Tensor:
        piece_BT = tokens_BT[:, first:last]
        history_BH = torch.cat([tokens_BT.new_full((2, 2), -1), tokens_BT[:, :first]], 1)
        rows = rows_of(parts, piece_BT, history_BH)
        payloads = parts.payloads(rows, piece_BT, history_BH)
        return parts.model(piece_BT, docs_BT[:, first:last], payloads, windows=WINDOWS, state=state)

    state = parts.model.new_state(2, WINDOWS)
    pieces = [forward(0, 50, state), *(forward(n, n + 1, state) for n in range(50, 70))]
    assert_close(torch.cat(pieces, 1), forward(0, 70), rtol=1e-9, atol=1e-9)


def test_a_dense_step_is_near_the_cpu():
    """The optimizers compute in bfloat16 on the device where the CPU has float32: updates agree to its rounding."""
    data = packed(3, 130)
    updates = []
    for device in ("cpu", DEVICE):
        parts = build(device, torch.float32)
        before = copy.deepcopy(parts.model.state_dict())
        optimizers = build_optimizers(parts.model.named_parameters(), OptimConfig())
        for _ in range(2):
            parts.model.zero_grad()
            step(parts, data, device, torch.float32)
            for optimizer in optimizers:
                optimizer.step()
        updates.append({name: now.detach() - before[name] for name, now in parts.model.named_parameters()})
    for name, update in updates[0].items():
        assert distance(updates[1][name], update) < 0.1, name


def test_nccl(tmp_path):
    """A process group of one: what an 8-GPU run stands on answers."""
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        x = torch.arange(1000.0, device=DEVICE)
        y = x.clone()
        torch.distributed.all_reduce(y)
        assert torch.equal(x, y)
    finally:
        torch.distributed.destroy_process_group()
