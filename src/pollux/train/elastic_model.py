"""The model that ``run.prepare`` returns: plain with one replica, replicated by DDP with several.

Called by the user's loop. One replica needs no DDP, and does without: nothing stands between the loop and the user's
module. Moving to another process group makes a new DDP around the same module: parameters, compiled code, forward
hooks and the object itself stay. Newcomers and survivors so start from the same bucket layout, which they must, as
buckets are what is added up. (DDP's own ``_update_process_group`` keeps a survivor's layout, which follows the order of
its past gradients; a newcomer cannot have it.)
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pollux.errors import InvalidValueError
from pollux.train.state import Peers

OnForward = Callable[[BaseException | None], bool]
Reduce = Callable[[dist.ProcessGroup, Any], torch.futures.Future[Tensor]]
_OWN_OPTIONS = {"module", "process_group", "init_sync", "gradient_as_bucket_view"}


class ElasticModel(nn.Module):
    """What ``run.prepare`` returns. ``.module`` is the user's own."""

    def __init__(
        self,
        module: nn.Module,
        reduce: Reduce,
        process_group: dist.ProcessGroup,
        *,
        on_lone_forward: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.on_forward: OnForward | None = None
        self.on_rebuild: Callable[[], None] | None = None
        self.watch_outputs: Callable[[Any], None] | None = None  # set for the passes whose outputs are looked at
        self._reduce, self._options, self._on_lone_forward = reduce, _checked(options), on_lone_forward
        self._ddp: list[DistributedDataParallel] = []  # in a list, so that it is no submodule: none or one
        self._has_reduced = threading.Event()
        self._is_rebuilt = False
        self.move(process_group)

    def release(self) -> None:
        """Let go of the group: it ends, for others to see, with the last reference to it."""
        if not self._ddp:
            return
        for parameter in self.module.parameters():
            parameter.grad = None  # a view of the reducer's buckets
        # The reducer takes its hooks off the parameters when it goes; it must go before another one comes.
        ddp = self._ddp.pop()
        ddp.reducer = None  # type: ignore[assignment]
        ddp.logger = None
        ddp.process_group = None  # type: ignore[assignment]
        ddp._comm_hooks = []  # each with its group

    def move(self, process_group: dist.ProcessGroup) -> None:
        """From now on replicate over another group. Gradients of several replicas are dropped: DDP's buckets held them.

        Nothing is sent: shapes and initial values are compared by the run, as survivors take no part in this.
        """
        self.release()
        if process_group.size() == 1:
            return
        # Buffers are sent by the run, which can bear a lost peer; DDP would raise in the user's forward pass.
        arguments = {"process_group": process_group, "init_sync": False, "gradient_as_bucket_view": True}
        ddp = DistributedDataParallel(self.module, **{**arguments, _buffers_option(): False, **self._options})
        reduce, has_reduced = self._reduce, threading.Event()  # of this reducer, which must not hold us

        def on_bucket(group, bucket):  # type: ignore[no-untyped-def]
            """Without annotations: DDP insists on its own, or none."""
            has_reduced.set()
            return reduce(group, bucket)

        ddp.register_comm_hook(process_group, on_bucket)
        self._has_reduced, self._is_rebuilt = has_reduced, False
        self._ddp.append(ddp)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._ddp:
            if torch.is_grad_enabled():
                self._on_lone_forward()
            outputs = self.module(*inputs, **kwargs)
            if self.watch_outputs is not None:
                self.watch_outputs(outputs)
            return outputs
        ddp = self._ddp[0]
        if self.training and torch.is_grad_enabled() and not self._is_whole(ddp):
            return self.module(*inputs, **kwargs)  # the group is broken: the step will be begun again
        ddp.training = self.training
        outputs = ddp(*inputs, **kwargs)
        if self.watch_outputs is not None:
            self.watch_outputs(outputs)
        return outputs

    def _is_whole(self, ddp: DistributedDataParallel) -> bool:
        """Whether the group stands. DDP's own collective of a forward pass is made here, where it may fail.

        It comes after the first backward pass, and cannot be interrupted: were a peer frozen, it would end with the
        group's time-out. So all replicas meet before it.
        """
        if self.on_forward is None:
            return True
        try:
            if self._has_reduced.is_set() and not self._is_rebuilt:
                self._is_rebuilt = True
                if self.on_rebuild is not None:
                    self.on_rebuild()
            ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            return self.on_forward(error)
        return self.on_forward(None)


def _buffers_option() -> str:
    """DDP's name for "broadcast buffers", which differs between versions of torch."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """DDP's options, checked before there is a DDP to refuse them."""
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self"} - _OWN_OPTIONS
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidValueError(
            f"DistributedDataParallel has no option {', '.join(map(repr, unknown))} that could be given here; "
            f"it takes {', '.join(sorted(known))}"
        )
    return options


def broadcast_buffers(module: nn.Module, peers: Peers, source: int = 0) -> None:
    """Rank ``source``'s buffers for everybody, in one message per type."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        by_type.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in by_type.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        peers.broadcast(flat.view(torch.uint8), source)  # gloo knows few types: no bool, no int16, no complex
        if peers.rank != source:
            for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                buffer.detach().copy_(part.view_as(buffer))
