"""The model that ``run.prepare`` returns: the plain module with one replica, DDP with several.

To the user's code it looks like the user's module: its attributes and methods, the plain names of parameters, a plain
``state_dict``. A copy of it is a copy of the module.

The user's loop calls it. Moving to another process group makes a new DDP around the same module: parameters, compiled
code, forward hooks and the object itself stay. All replicas then have the same bucket layout, which they need because
they add up buckets. (DDP's own ``_update_process_group`` keeps the layout of a surviving replica, which follows the
order of its past gradients; a new replica cannot know it.)
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pollux.errors import InvalidValueError
from pollux.train.state import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    Reduce = Callable[[dist.ProcessGroup, GradBucket], torch.futures.Future[Tensor]]

OnForward = Callable[[BaseException | None], bool]
DDPOptions = dict[str, Any]  # of DistributedDataParallel, checked by name
_OWN_OPTIONS = {"module", "process_group", "init_sync", "gradient_as_bucket_view"}


class PreparedModel(nn.Module):
    """What ``run.prepare`` returns, replicated or sharded. ``.module`` is the user's module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = module.training
        self.on_forward: OnForward | None = None
        self.on_rebuild: Callable[[], None] | None = None
        self.watch_outputs: Callable[[object], None] | None = None  # set for the passes whose outputs are measured
        self.module = module  # last: from here on, attributes that the module has are set there

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute that the user's module has, and this object has not, is set there."""
        module = self.__dict__.get("_modules", {}).get("module")
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if module is not None and not is_own and name != "module" and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _as_it_is, (self.module,)

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload,no-any-return]

    def __bool__(self) -> bool:
        return True


class ElasticModel(PreparedModel):
    """A replicated model."""

    def __init__(
        self,
        module: nn.Module,
        reduce: Reduce,
        process_group: dist.ProcessGroup,
        *,
        on_lone_forward: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        # Before the user's module is set: see PreparedModel.__setattr__.
        self._reduce, self._options, self._on_lone_forward = reduce, _checked(options), on_lone_forward
        self._ddp: list[DistributedDataParallel] = []  # in a list, so that it is no submodule: none or one
        self._has_reduced = threading.Event()
        self._is_rebuilt = False
        super().__init__(module)
        self.move(process_group)

    # --- groups ---------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drop all references to the process group, so that its connections close and peers notice."""
        if not self._ddp:
            return
        for parameter in self.module.parameters():
            parameter.grad = None  # a view of the reducer's buckets
        # The reducer removes its hooks from the parameters when it is freed, which must be before the next one.
        ddp = self._ddp.pop()
        ddp.reducer = None  # type: ignore[assignment]
        ddp.logger = None
        ddp.process_group = None  # type: ignore[assignment]
        ddp._comm_hooks = []  # each with its group

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Replicate over another group from now on. Drops gradients that DDP's buckets held.

        Sends nothing: the session compares shapes and hands over values.
        """
        self.release()
        if process_group.size() == 1:
            return
        # The session sends buffers, as it survives a lost peer; DDP would raise in the user's forward pass.
        arguments = {"process_group": process_group, "init_sync": False, "gradient_as_bucket_view": True}
        ddp = DistributedDataParallel(self.module, **{**arguments, _buffers_option(): False, **self._options})
        reduce, has_reduced = self._reduce, threading.Event()  # local names: the reducer must not refer to self

        def on_bucket(group, bucket):  # type: ignore[no-untyped-def]
            """Without annotations, as DDP accepts only its own or none."""
            has_reduced.set()
            return reduce(group, bucket)

        ddp.register_comm_hook(process_group, on_bucket)
        self._has_reduced, self._is_rebuilt = has_reduced, False
        self._ddp.append(ddp)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        if not self._ddp:
            if torch.is_grad_enabled():
                self._on_lone_forward()
            outputs = self.module(*inputs, **kwargs)
            if self.watch_outputs is not None:
                self.watch_outputs(outputs)
            return outputs
        ddp = self._ddp[0]
        if self.training and torch.is_grad_enabled() and not self._is_whole(ddp):
            return self.module(*inputs, **kwargs)  # the group is broken: the session repeats the step
        ddp.training = self.training
        outputs = ddp(*inputs, **kwargs)
        if self.watch_outputs is not None:
            self.watch_outputs(outputs)
        return outputs

    def _is_whole(self, ddp: DistributedDataParallel) -> bool:
        """Whether the group works. Runs DDP's own collective of a forward pass here, where its failure is caught.

        That collective comes once, after the first backward pass, and cannot be interrupted: with a frozen peer it
        would end with the group's time-out only. So ``on_rebuild`` makes all replicas meet first.
        """
        if self.on_forward is None:
            return True
        try:
            if self._has_reduced.is_set() and not self._is_rebuilt:
                self._is_rebuilt = True
                if self.on_rebuild is not None:
                    self.on_rebuild()
            ddp.reducer._rebuild_buckets()
        except (RuntimeError, IndexError) as error:  # an aborted NCCL group leaves sizes of buckets that make no sense
            return self.on_forward(error)
        return self.on_forward(None)


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _buffers_option() -> str:
    """The name of DDP's option for broadcasting buffers, which differs between versions of torch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def _checked(options: DDPOptions) -> DDPOptions:
    """Check DDP's options even if there is one replica, and so no DDP to refuse them."""
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"} - _OWN_OPTIONS
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidValueError(
            f"DistributedDataParallel has no option {', '.join(map(repr, unknown))} to set here; "
            f"allowed are {', '.join(sorted(known))}"
        )
    return options


KeptBuffers = list[tuple[list[Tensor], Tensor]]  # of one type each, with their values, flat


def broadcast_buffers(module: nn.Module, peers: Peers, source: int = 0) -> KeptBuffers:
    """Give rank ``source``'s buffers to all ranks, in one message per type. Returns what they are now."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        by_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    kept: KeptBuffers = []
    for buffers in by_type.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        peers.broadcast(flat.view(torch.uint8), source)  # gloo supports few types: no bool, int16 or complex
        kept.append((buffers, flat))
        if peers.rank != source:
            set_buffers(kept[-1:])
    return kept


def set_buffers(kept: KeptBuffers) -> None:
    for buffers, flat in kept:
        for buffer, part in zip(buffers, torch.split(flat, [one.numel() for one in buffers]), strict=True):
            buffer.detach().copy_(part.view_as(buffer))
