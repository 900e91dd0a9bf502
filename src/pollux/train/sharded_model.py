"""A model that ``run.prepare(..., shard=...)`` returns, and its shards: parameters and optimizer state, by rows.

A trainee holds both. Between two groups FSDP2 is taken off the user's module, and :class:`ModelShards` holds the rows
as plain tensors. In the new group the user's function shards the module anew, and each replica gets its new rows from
those that have them (:mod:`pollux.train.shards`) or from a checkpoint. The module, its attributes and hooks, and the
optimizer stay the user's own objects; parameters are new ones after each resize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pollux.errors import InvalidValueError
from pollux.train import sharded_module
from pollux.train.elastic_model import PreparedModel
from pollux.train.sharded_gradients import ShardedGradients
from pollux.train.sharded_module import ShardFunction
from pollux.train.shards import WHOLE, Cut, Entry, Move, Shards, move
from pollux.train.team import Team

PARAMETERS, OPTIMIZER = "model", "optimizer"  # kinds of sharded tensors, in their names
_OPTIMIZERS = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip  # torch's own whose step is elementwise, so that it needs no communication


class SmallState(TypedDict):
    """The part of a trainee's state that every replica has in full."""

    buffers: dict[str, Tensor]
    states: dict[str, dict[str, Any]]  # of the optimizer, by parameter's name
    options: list[dict[str, Any]]  # of each parameter group


class ShardedModel(PreparedModel):
    """The user's sharded module."""

    def forward(self, *inputs: object, **kwargs: object) -> object:
        if self.training and torch.is_grad_enabled() and self.on_forward is not None:
            self.on_forward(None)
        outputs = self.module(*inputs, **kwargs)
        if self.watch_outputs is not None:
            self.watch_outputs(outputs)
        return outputs


class ModelShards:
    """This replica's shard of one model.

    ``function`` is the user's, which calls ``fully_shard``. ``copies``: how many replicas hold each shard, if their
    number allows it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        function: ShardFunction,
        gradients: ShardedGradients,
        copies: int = 1,
    ) -> None:
        self._module, self._optimizer, self._function = module, optimizer, function
        self._gradients, self._wanted_copies = gradients, copies
        plain = sharded_module.places(module)
        names = {id(parameter): name for name, (parameter, _) in plain.items()}
        self._names = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
        # The rows of a module that is not sharded now; None while the module itself has them.
        self.held: Shards | None = Shards(
            WHOLE,
            [_entry(PARAMETERS, name, parameter) for name, (parameter, _) in plain.items()],
            {_full_name(PARAMETERS, name): parameter.detach() for name, (parameter, _) in plain.items()},
        )
        self._cut = WHOLE
        self._states: dict[str, dict[str, Any]] = {}  # the optimizer's plain values, while no group is attached
        self._is_attached = False

    @property
    def cut(self) -> Cut | None:
        """What this replica has; None after a move that failed half-way."""
        return self._cut if self.held is None else self.held.cut if self.held.tensors else None

    # --- groups ---------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Take FSDP2 off the module. This replica's rows are held as plain tensors until the next group."""
        if not self._is_attached:
            return
        if self.held is None:
            self.held, self._states = self.current(), self._plain_states()
        self._is_attached = False
        self._optimizer.zero_grad()
        self._optimizer.state.clear()
        sharded_module.unshard(self._module)
        self._bind_module()
        self._gradients.reset()

    def attach(self, team: Team) -> None:
        """Shard the module over the team's new group. It has no data until :meth:`receive` or :meth:`load`."""
        self.release()
        if self.held is not None and self.held.cut == WHOLE:
            for parameter, where in sharded_module.places(self._module).values():
                if not parameter.is_meta:
                    sharded_module.put(where, sharded_module.blank(parameter))
        if sharded_module.is_compiled(self._module):
            torch._dynamo.reset()  # compiled code knows the old parameters, and dynamo gives up after a few of them
        group, copies = self._split(team)
        mesh = DeviceMesh.from_group(group, team.device.type)
        self._mesh, self._cut = mesh, Cut(group.rank(), group.size())
        groups = sharded_module.shard(self._module, self._function, mesh)
        self._is_attached = True
        self._bind_module()
        self._gradients.attach(groups, copies)

    def _split(self, team: Team) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """The group of the shards, and the one of the replicas with the same shard."""
        num_copies = copies_of(team.size, self._wanted_copies)
        if num_copies == 1:
            return team.process_group, None
        num_shards = team.size // num_copies
        rows = [list(range(first, first + num_shards)) for first in range(0, team.size, num_shards)]
        columns = [list(range(first, team.size, num_shards)) for first in range(num_shards)]
        return team.make_groups(rows), team.make_groups(columns)

    def cut_of(self, rank: int, size: int) -> Cut:
        """The shard that ``rank`` of ``size`` needs in the present group."""
        num_shards = size // copies_of(size, self._wanted_copies)
        return Cut(rank % num_shards, num_shards)

    def hand_off(self, team: Team, staying: list[int]) -> None:
        """Before some replicas leave: give their rows to those that stay, by rank in the old group."""
        cuts: list[Cut | None] = team.gather(self.cut)
        sources = find_sources(cuts)
        if sources is None:
            return
        targets = tuple(
            Cut(staying.index(rank), len(staying)) if rank in staying else None for rank in range(team.size)
        )
        assert self.held is not None
        held, target = self.held, targets[team.rank]
        received: dict[str, Tensor] = {}
        move(
            team, Move(len(sources), tuple(sources), targets), held.entries,
            take=lambda entry: held.tensors[entry.name],
            give=lambda entry, rows: received.__setitem__(entry.name, rows),
        )  # fmt: skip
        team.share(None)  # until all have theirs, a replica that is lost must not take rows with it
        if target is not None:
            self.held = Shards(target, held.entries, received)

    def receive(self, team: Team, sources: list[int]) -> None:
        """Get this replica's rows from the replicas that have them, and go on with the module.

        Rows that a replica has are kept until all replicas have theirs: a replica that is lost meanwhile, such as a new
        one, must not take any with it.
        """
        is_source = team.rank in sources
        if not is_source:
            self.held = Shards(WHOLE, [], {})
        held = self.held
        assert held is not None
        entries: list[Entry] = team.share(held.entries, sources[0])
        targets = tuple(self.cut_of(rank, team.size) for rank in range(team.size))
        arrived: dict[str, Tensor] = {}
        move(
            team, Move(len(sources), tuple(sources), targets), entries,
            take=lambda entry: held.tensors[entry.name],
            give=lambda entry, rows: self._put(entry, rows, arrived),
        )  # fmt: skip
        team.share(None)
        self._complete(entries, arrived)

    def load(self, entries: list[Entry], read: Callable[[Entry, Cut], Tensor], device: torch.device) -> None:
        """Get this replica's rows from a checkpoint."""
        self.held = Shards(WHOLE, [], {})
        arrived: dict[str, Tensor] = {}
        for entry in entries:
            self._put(entry, read(entry, self._cut).to(device), arrived)
        self._complete(entries, arrived)

    def _put(self, entry: Entry, rows: Tensor, arrived: dict[str, Tensor]) -> None:
        kind, _, name = _parts(entry)
        if kind == PARAMETERS:
            sharded_module.fill(sharded_module.places(self._module)[name][1], rows)
        else:
            arrived[entry.name] = rows

    def _complete(self, entries: list[Entry], arrived: Mapping[str, Tensor]) -> None:
        """All rows are there: bind the optimizer to the new parameters, and give it its state."""
        sharded_module.adopt(self._module)
        parameters = self._bind_module()
        missing = [name for name, one in parameters.items() if one.is_meta]
        if missing:
            raise InvalidValueError(f"the state has no {missing[0]!r}: it is of another model")
        self._optimizer.state.clear()
        for name, values in self._states.items():
            self._optimizer.state[parameters[name]] = dict(values)
        for entry in entries:
            kind, key, name = _parts(entry)
            if kind == OPTIMIZER:
                self._optimizer.state[parameters[name]][key] = DTensor.from_local(
                    arrived[entry.name], self._mesh, (Shard(0),), run_check=False,
                    shape=torch.Size(entry.shape), stride=_strides(entry.shape),
                )  # fmt: skip
        self._states = {}
        self.held = None
        self._gradients.bind()

    def _bind_module(self) -> dict[str, nn.Parameter]:
        """Give the optimizer the module's present parameters."""
        parameters = {name: one for name, (one, _) in sharded_module.places(self._module).items()}
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            group["params"] = [parameters[name] for name in names]
        return parameters

    # --- state ----------------------------------------------------------------------------------------------------

    def current(self) -> Shards:
        """The rows that the module and the optimizer have now: views, not copies."""
        entries, tensors = [], {}
        parameters = self._parameters()
        for name, parameter in parameters.items():
            entries.append(_entry(PARAMETERS, name, parameter))
            tensors[entries[-1].name] = parameter.to_local().detach()
        for name, parameter in parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor) and value.placements == (Shard(0),):
                    entries.append(_entry(OPTIMIZER, name, value, key))
                    tensors[entries[-1].name] = value.to_local().detach()
                elif isinstance(value, Tensor) and value.numel() > 1:
                    raise InvalidValueError(
                        f"{type(self._optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name!r}, "
                        "which is not sharded as the parameter is; use AdamW, Adam or SGD"
                    )
        return Shards(self._cut, entries, tensors)

    def _parameters(self) -> dict[str, Any]:
        """The sharded parameters by name, also while the module has the whole ones registered, as after a forward."""
        return sharded_module.sharded_parameters(self._module)

    def _plain_states(self) -> dict[str, dict[str, Any]]:
        if self.held is not None:
            return self._states
        return {
            name: {key: value for key, value in state.items() if not _is_sharded(value)}
            for name, parameter in self._parameters().items()
            if (state := self._optimizer.state.get(parameter)) is not None
        }

    def small_state(self) -> SmallState:
        return {
            "buffers": dict(self._module.named_buffers()),
            "states": self._plain_states(),
            "options": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self._optimizer.param_groups
            ],
        }

    @torch.no_grad()
    def load_small_state(self, state: SmallState) -> None:
        """Before the rows come by :meth:`receive` or :meth:`load`."""
        for name, buffer in self._module.named_buffers():
            buffer.copy_(state["buffers"][name])
        self._states = {name: dict(values) for name, values in state["states"].items()}
        for group, options in zip(self._optimizer.param_groups, state["options"], strict=True):
            group.update(options)


def copies_of(num_replicas: int, wanted: int) -> int:
    """How many replicas hold each shard: the largest number up to ``wanted`` that divides the replicas."""
    return max(number for number in range(1, min(wanted, num_replicas) + 1) if num_replicas % number == 0)


def find_sources(cuts: list[Cut | None]) -> list[int] | None:
    """A rank for each shard, of those that hold one; None if a shard is lost. Cuts of one kind must be complete."""
    for count in sorted({cut.count for cut in cuts if cut is not None}):
        holders = [cuts.index(cut) if (cut := Cut(index, count)) in cuts else None for index in range(count)]
        if all(holder is not None for holder in holders):
            return [holder for holder in holders if holder is not None]
    return None


def check_shardable(model: nn.Module, optimizer: torch.optim.Optimizer, function: object, copies: int) -> None:
    """Raises InvalidValueError for what cannot be sharded, before the first step."""
    sharded_module.check_torch()
    if not callable(function):
        raise InvalidValueError(
            f"shard is a {type(function).__name__}; a function of the model and a mesh is needed, which calls "
            "fully_shard(part, mesh=mesh) on parts of the model, and on the model last"
        )
    if not isinstance(copies, int) or copies < 1:
        raise InvalidValueError(f"shard_copies is {copies!r}; a whole number of at least 1 is needed")
    allowed = tuple(getattr(torch.optim, name) for name in _OPTIMIZERS)
    if not isinstance(optimizer, allowed):
        raise InvalidValueError(
            f"{type(optimizer).__name__} cannot train a sharded model here: its step is not known to be elementwise. "
            f"Allowed are torch's {', '.join(_OPTIMIZERS)}"
        )
    blank = next((name for name, one in model.named_parameters() if one.is_meta), None)
    if blank is not None:
        raise InvalidValueError(
            f"{blank!r} is on the meta device, so it has no initial value: build the model on the CPU. Each replica "
            "moves only its own shard to its device"
        )
    flat = next((name for name, one in model.named_parameters() if one.dim() == 0), None)
    if flat is not None:
        raise InvalidValueError(f"{flat!r} is a single number, which cannot be sharded: give it the shape (1,)")
    if optimizer.state:
        raise InvalidValueError("the optimizer has made steps already: call run.prepare before the first one")


def _is_sharded(value: object) -> bool:
    return isinstance(value, DTensor)


def _full_name(kind: str, name: str, key: str = "") -> str:
    return f"{kind}/{key}/{name}"


def _entry(kind: str, name: str, tensor: Tensor, key: str = "") -> Entry:
    return Entry(_full_name(kind, name, key), tuple(tensor.shape), tensor.dtype)


def _parts(entry: Entry) -> tuple[str, str, str]:
    kind, key, name = entry.name.split("/", 2)
    return kind, key, name


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))
