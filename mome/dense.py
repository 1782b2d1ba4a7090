"""The optimizers of the dense parameters, their state and their work shared out over the processes (ZeRO-1).

Lives here: who updates what (share_out), the ways of gradients to their owners and of weights back, state by name.
Not here: rules and values (optim/), the collectives themselves (mome/world.py), rows of tables (mome/table/).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn import Parameter

from mome.errors import UserError
from mome.table.placement import least_loaded
from mome.world import Pending, World
from optim.groups import SCATTER_ORDER, WORK_ORDER, Group, OptimConfig, assign, build_optimizer, groups, in_order

# Elements that a rank must get of an Adam's parameter for it to be sliced; below, every rank updates all of it.
LEAST_SLICE = 2048
# A reduce-scatter gives every rank a part as long as the longest. Beyond twice the elements themselves an all-reduce
# sends less, and every rank updates them all.
MOST_PADDED = 2

NamedParameters = Iterable[tuple[str, Parameter]]


@dataclass(frozen=True)
class Share:
    """Who updates a parameter of numel elements, and where it lies in a buffer that travels.

    whole: `owner` does, all of it; sliced: rank r elements r * length to (r + 1) * length (the last ranks fewer, or
    none); replicated: every rank, all of it. begin: of its length elements, in the owner's part of the label's buffer
    (whole), in every rank's part of it (sliced), or in the one buffer of all that is replicated.
    """

    way: Literal["whole", "sliced", "replicated"]
    numel: int
    length: int
    begin: int
    owner: int = 0

    def owned(self, rank: int) -> range:
        """The elements that a rank updates."""
        if self.way == "sliced":
            return range(min(rank * self.length, self.numel), min((rank + 1) * self.length, self.numel))
        return range(self.numel if self.way == "replicated" or rank == self.owner else 0)


def share_out(named_parameters: NamedParameters, config: OptimConfig, size: int) -> dict[str, dict[str, Share]]:
    """Label -> name -> Share among `size` ranks; a function of shapes alone, so that ranks need not talk about it.

    NorMuon's parameters stay whole, the largest first to the rank with the fewest elements so far; a label with too few
    for so many ranks, which would send more than MOST_PADDED times its elements, is replicated. Those of an Adam are
    flattened and sliced evenly where every rank gets LEAST_SLICE elements, and replicated otherwise, as is everything
    in one process. Parameters may be on meta. Raises ValueError as optim.groups.assign does.
    """
    members = assign(named_parameters, config)
    rule = {group.label: group.rule for group in groups(config)}
    split = {label for label in members if rule[label] == "normuon" and size > 1}
    while True:
        matrices = [pair for label in members if label in split for pair in members[label]]
        sizes = [parameter.numel() for _, parameter in matrices]
        owners = dict(zip((name for name, _ in matrices), least_loaded(sizes, size).tolist()))
        # Who is not split after all is no owner's load, so the others are shared out anew.
        scarce = {label for label in split if _padded(members[label], owners, size)}
        if not scarce:
            break
        split -= scarce
    flat, shares = 0, {}
    for label, pairs in members.items():
        fill, one = [0] * size, {}
        for name, parameter in pairs:
            numel = parameter.numel()
            if label in split:
                owner = owners[name]
                one[name] = Share("whole", numel, numel, fill[owner], owner)
                fill[owner] += numel
            elif size > 1 and rule[label] != "normuon" and numel >= LEAST_SLICE * size:
                length = -(-numel // size)
                one[name] = Share("sliced", numel, length, fill[0])
                fill[0] += length
            else:
                one[name] = Share("replicated", numel, numel, flat)
                flat += numel
        shares[label] = one
    return shares


def _padded(pairs: Sequence[tuple[str, Parameter]], owners: Mapping[str, int], size: int) -> bool:
    """Whether equal parts for all ranks would be more than MOST_PADDED times what a label has."""
    held = [0] * size
    for name, parameter in pairs:
        held[owners[name]] += parameter.numel()
    return size * max(held) > MOST_PADDED * sum(held)


def part_of(shares: Mapping[str, Share]) -> int:
    """Elements of each rank's part of a label's buffer: as many as the rank with most needs; 0: nothing travels."""
    return max((one.begin + one.length for one in shares.values() if one.way != "replicated"), default=0)


def step_bytes(named_parameters: NamedParameters, config: OptimConfig, size: int) -> dict[str, int]:
    """What World.sent counts on each of `size` ranks in a step, by name. Parameters may be on meta.

    With P = a label's part_of: (size - 1) P numbers as gradients, and again as weights; of the R replicated elements
    and one flag for each of the K parameters, 2 (size - 1) / size of R + K numbers.
    """
    if size == 1:
        return {}
    pairs = list(named_parameters)
    shares = share_out(pairs, config, size)
    itemsize = pairs[0][1].element_size()
    found = {"replicated gradients": 2 * (_replicated(shares) + len(pairs)) * itemsize * (size - 1) // size}
    parts = sum(part_of(one) for one in shares.values())
    if parts:
        found |= dict.fromkeys(("dense gradients", "dense weights"), parts * itemsize * (size - 1))
    return found


def _replicated(shares: Mapping[str, Mapping[str, Share]]) -> int:
    return sum(one.numel for label in shares.values() for one in label.values() if one.way == "replicated")


class _Piece(NamedTuple):
    """What this rank updates of a parameter: weight shares memory with it, grad is where its summed gradient arrives
    (None in one process, where it is the parameter's own). number: of the parameter, in the model's order."""

    name: str
    number: int
    share: Share
    weight: Parameter
    grad: Tensor | None
    state: dict[str, Tensor]


class DenseOptimizers:
    """The optimizers of this rank's share, and what a step asks of them, in this order, on every rank:

        scatter(); norm2 = square(); set_schedule(dense.optimizers, ...); update(); gathered()

    Gradients are summed over the ranks, so each rank's loss is divided by the tokens of the whole step. A gradient that
    is None counts as zero; a parameter that has none on any rank is left alone, as its optimizer does in one process.
    With one process nothing is copied, and the arithmetic is that of optim.groups.build_optimizers to the bit.

    A label's buffer takes its gradients to their owners and then its weights back: as many elements as the parameters
    again, and padding, since a matrix is never cut and every rank's part of a label is as long as the longest.

    optimizers: one a label that this rank updates something of, in WORK_ORDER. Raises ValueError as assign does, for a
    parameter that is not contiguous, and with several processes for parameters of several dtypes.
    """

    def __init__(self, named_parameters: NamedParameters, config: OptimConfig, world: World) -> None:
        self._named = list(named_parameters)
        self._config, self._world = config, world
        _check(self._named, world)
        shares = share_out(self._named, config, world.size)
        # What is replicated, then a flag for each parameter: on how many ranks it has a gradient.
        length = _replicated(shares) + len(self._named)
        self._flat = None if world.alone else self._named[0][1].new_zeros(length)
        self._replicated: list[tuple[Parameter, Tensor]] = []
        self._buffers: dict[str, _Buffer] = {}
        self._pieces: list[_Piece] = []
        self._by_label: dict[str, torch.optim.Optimizer] = {}
        self._arriving: list[Pending] = []
        self._leaving: list[tuple[_Buffer, Pending]] = []
        self._mesh = None
        members = assign(self._named, config)
        rows = {group.label: group for group in groups(config)}
        for label in in_order(WORK_ORDER, config):
            if label in members:
                self._take(rows[label], members[label], shares[label])
        self._assert_once(shares)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """For optim.groups.set_schedule."""
        return list(self._by_label.values())

    def scatter(self) -> None:
        """Send the gradients to their owners, in SCATTER_ORDER, then the replicated ones; returns with them under way.

        With several processes the parameters' own gradients are free from here on.
        """
        assert not self._arriving and not self._leaving, "scatter() comes after gathered(), once a step"
        if self._world.alone:
            return
        for label in in_order(SCATTER_ORDER, self._config):
            if buffer := self._buffers.get(label):
                buffer.take_gradients()
                self._arriving.append(self._world.reduce_scatter("dense gradients", buffer.whole, buffer.own))
        for parameter, view in self._replicated:
            _fill(view, parameter.grad)
        flags = [float(parameter.grad is not None) for _, parameter in self._named]
        self._flat[len(self._flat) - len(flags) :] = torch.tensor(flags, dtype=self._flat.dtype)
        self._arriving.append(self._world.all_reduce("replicated gradients", self._flat))
        for _, parameter in self._named:
            parameter.grad = None

    def square(self) -> Tensor:
        """This rank's share of the squared norm of the whole gradient, float64 []: over all ranks they sum to it.

        Norms of single tensors are taken in their own dtype. Waits for what scatter began.
        """
        self._arrive()
        grads = [
            piece.weight.grad for piece in self._pieces
            if piece.weight.grad is not None and (self._world.first or piece.share.way != "replicated")
        ]  # fmt: skip
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=self._world.device)
        return torch.stack(torch._foreach_norm(grads)).double().square().sum()

    def update(self) -> None:
        """Update what this rank owns, in WORK_ORDER, and send each label's weights out at once; frees the gradients."""
        self._arrive()
        if not self._world.alone:
            # Of the whole step, as in one process: an optimizer does not touch what has no gradient.
            flags = self._flat[len(self._flat) - len(self._named) :].tolist()
            for piece in self._pieces:
                if not flags[piece.number]:
                    piece.weight.grad = None
        for label in in_order(WORK_ORDER, self._config):
            if optimizer := self._by_label.get(label):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if buffer := self._buffers.get(label):
                buffer.take_weights()
                pending = self._world.all_gather("dense weights", buffer.whole, buffer.mine)
                self._leaving.append((buffer, pending))

    def gathered(self) -> None:
        """Wait for the weights of the other ranks: from here on every rank has the same parameters."""
        for buffer, pending in self._leaving:
            pending.wait()
            buffer.give_weights()
        self._leaving.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank holds, as PARAMETER/momentum, PARAMETER/exp_avg, ...; the tensors share memory with the state.

        Global shapes do not depend on the number of processes: an Adam's moments are flat [numel], DTensors with
        Shard(0) where they are sliced and equal on all ranks where not; step is []; NorMuon's are on their owner alone.
        """
        found = {}
        for piece in self._pieces:
            for key, tensor in piece.state.items():
                flat = tensor.view(-1) if key in ("exp_avg", "exp_avg_sq") else tensor
                sliced = piece.share.way == "sliced" and key != "step"
                found[f"{piece.name}/{key}"] = self._sharded(flat, piece.share.numel) if sliced else flat
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a state with the keys and shapes of `state_dict` on this rank, such as that itself, filled in place.

        Raises UserError naming a state that is missing or of another shape; then nothing is changed.
        """
        own = self.state_dict()
        for key, tensor in own.items():
            if key not in state or state[key].shape != tensor.shape:
                given = f"of shape {tuple(state[key].shape)}" if key in state else "missing"
                raise UserError(
                    f"optimizer state {key} is {given}, not of shape {tuple(tensor.shape)}: load a checkpoint of this "
                    "model, with the same --optim.kind"
                )
        for key, tensor in own.items():
            mine, given = _local(tensor), _local(state[key])
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)

    def hash_of_replicas(self) -> dict[str, int]:
        """CRC-32 of the bits of every parameter; equal on all ranks once gathered() has returned."""
        return {
            name: zlib.crc32(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy())
            for name, parameter in self._named
        }

    def _take(self, group: Group, pairs: Sequence[tuple[str, Parameter]], shares: Mapping[str, Share]) -> None:
        """Make the buffer of a label, and the optimizer of what this rank updates of it."""
        if part := part_of(shares):
            self._buffers[group.label] = _Buffer(pairs, shares, part, self._world)
        numbers = {name: number for number, (name, _) in enumerate(self._named)}
        held = {}
        for name, parameter in pairs:
            if shares[name].owned(self._world.rank):
                held[name] = self._piece(group.label, parameter, shares[name])
        if held:
            optimizer = build_optimizer(group, [weight for weight, _ in held.values()], self._config)
            self._by_label[group.label] = optimizer
            for name, (weight, grad) in held.items():
                state = optimizer.state[weight]
                self._pieces.append(_Piece(name, numbers[name], shares[name], weight, grad, state))

    def _piece(self, label: str, parameter: Parameter, share: Share) -> tuple[Parameter, Tensor | None]:
        """What the optimizer updates of a parameter, and where the summed gradient of that arrives."""
        if share.way == "replicated":
            if self._flat is None:
                return parameter, None
            view = self._flat[share.begin : share.begin + share.numel].view(parameter.shape)
            self._replicated.append((parameter, view))
            return parameter, view
        mine = share.owned(self._world.rank)
        grad = self._buffers[label].own[share.begin : share.begin + len(mine)]
        if share.way == "whole":
            return parameter, grad.view(parameter.shape)
        return Parameter(parameter.detach().view(-1)[mine.start : mine.stop], parameter.requires_grad), grad

    def _arrive(self) -> None:
        """Wait for the summed gradients and hand them to the optimizers."""
        if not self._arriving:
            return
        for pending in self._arriving:
            pending.wait()
        self._arriving.clear()
        for piece in self._pieces:
            piece.weight.grad = piece.grad

    def _sharded(self, local: Tensor, numel: int) -> Tensor:
        # Imported where it is needed: a second's wait that one process need not have.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(distributed.group.WORLD, self._world.device.type)
        shape = torch.Size([numel])
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))

    def _assert_once(self, shares: Mapping[str, Mapping[str, Share]]) -> None:
        """All that this rank owns, and nothing else, is in exactly one optimizer; the ranks together own each element
        once, or, where it is replicated, once each."""
        param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        held = [id(weight) for group in param_groups for weight in group["params"]]
        assert len(held) == len(set(held)) and set(held) == {id(piece.weight) for piece in self._pieces}
        sizes = {piece.name: piece.weight.numel() for piece in self._pieces}
        rank, size = self._world.rank, self._world.size
        for name, share in ((name, share) for label in shares.values() for name, share in label.items()):
            times = size if share.way == "replicated" else 1
            assert sum(len(share.owned(one)) for one in range(size)) == share.numel * times, f"{name}: not owned once"
            assert sizes.get(name, 0) == len(share.owned(rank)), f"{name}: an optimizer lacks what this rank owns"


class _Buffer:
    """What travels of a label: whole [size * part], rank r's part from r * part on; own [part], summed gradients."""

    def __init__(
        self, pairs: Sequence[tuple[str, Parameter]], shares: Mapping[str, Share], part: int, world: World
    ) -> None:
        like = pairs[0][1]
        self.whole, self.own = like.new_zeros(world.size * part), like.new_zeros(part)
        self.mine = self.whole[world.rank * part : (world.rank + 1) * part]
        grid_WP = self.whole.view(world.size, part)
        # (parameter, its elements, the view of `whole` that they fill). What lies between is padding, and stays zero.
        self._places: list[tuple[Parameter, range, Tensor]] = []
        self._sent: list[tuple[Tensor, Tensor]] = []
        for name, parameter in pairs:
            share, flat = shares[name], parameter.detach().view(-1)
            if share.way == "replicated":
                continue
            if share.way == "whole":
                ends = share.begin, share.begin + share.numel
                self._places.append((parameter, range(share.numel), grid_WP[share.owner, ends[0] : ends[1]]))
            else:
                full, rest = divmod(share.numel, share.length)
                columns_WL = grid_WP[:, share.begin : share.begin + share.length]
                self._places.append((parameter, range(full * share.length), columns_WL[:full]))
                if rest:
                    self._places.append((parameter, range(full * share.length, share.numel), columns_WL[full, :rest]))
            if mine := share.owned(world.rank):
                place = self.mine[share.begin : share.begin + len(mine)]
                self._sent.append((place, flat[mine.start : mine.stop]))
        self._got = [
            (parameter.detach().view(-1)[cells.start : cells.stop].view_as(view), view)
            for parameter, cells, view in self._places
        ]

    def take_gradients(self) -> None:
        for parameter, cells, view in self._places:
            grad = parameter.grad
            _fill(view, None if grad is None else grad.reshape(-1)[cells.start : cells.stop])

    def take_weights(self) -> None:
        for place, weights in self._sent:
            place.copy_(weights)

    def give_weights(self) -> None:
        # This rank's own come back as they went.
        for weights, view in self._got:
            weights.copy_(view)


def _check(named: Sequence[tuple[str, Parameter]], world: World) -> None:
    for name, parameter in named:
        if not parameter.is_contiguous():
            raise ValueError(f"parameter {name} is not contiguous; make it with .contiguous()")
        if not world.alone and parameter.dtype != named[0][1].dtype:
            raise ValueError(
                f"parameter {name} is {parameter.dtype} and {named[0][0]} {named[0][1].dtype}: with several processes "
                "give all the same"
            )


def _fill(view: Tensor, grad: Tensor | None) -> None:
    """A gradient of any shape into its place, zeros where there is none."""
    if grad is None:
        view.zero_()
    else:
        view.copy_(grad.reshape(view.shape))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
