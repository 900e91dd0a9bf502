"""The model as every replica holds it: DDP that can move to another process group.

Stands in ``train``. Moving builds DDP's reducer anew around the same module: parameters, compiled code, forward
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

from pollux.train.state import Peers

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)
OnForward = Callable[[BaseException | None], bool]
Reduce = Callable[[dist.ProcessGroup, Any], torch.futures.Future[Tensor]]


class ElasticModel(DistributedDataParallel):
    """What ``run.prepare`` returns. ``.module`` is the user's own."""

    _is_rebuilt: bool

    def __init__(self, module: nn.Module, reduce: Reduce, process_group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(module, **self._arguments(process_group, options))
        self._remember(reduce, options)

    def release(self) -> None:
        """Let go of the group: it ends, for others to see, with the last reference to it."""
        for parameter in self.module.parameters():
            parameter.grad = None  # a view of the reducer's buckets
        # The reducer takes its hooks off the parameters when it goes; it must go before another one comes.
        self.reducer = None  # type: ignore[assignment]
        self.logger = None
        self.process_group = None  # type: ignore[assignment]
        self._comm_hooks = []  # each with its group

    def move(self, process_group: dist.ProcessGroup) -> None:
        """From now on replicate over another group. Gradients are dropped: they live in the old buckets."""
        self.release()
        module, reduce, options, is_training = self.module, self._reduce, self._options, self.training
        hooks = {name: self.__dict__[name] for name in _HOOKS if name in self.__dict__}
        super().__init__(module, **self._arguments(process_group, options))
        self.__dict__.update(hooks)
        self.training = is_training
        self._remember(reduce, options)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not self._is_whole():
            return self.module(*inputs, **kwargs)  # the group is broken: the step will be begun again
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _is_whole(self) -> bool:
        """Whether the group stands. DDP's own collective of a forward pass is made here, where it may fail.

        It comes after the first backward pass, and nobody can be called away from it: were a peer frozen, it would end
        with the group's time-out. So all meet before.
        """
        if self.on_forward is None:
            return True
        try:
            if self._has_reduced.is_set() and not self._is_rebuilt:
                self._is_rebuilt = True
                if self.on_rebuild is not None:
                    self.on_rebuild()
            self.reducer._rebuild_buckets()
        except RuntimeError as error:
            return self.on_forward(error)
        return self.on_forward(None)

    def _remember(self, reduce: Reduce, options: dict[str, Any]) -> None:
        self._reduce, self._options = reduce, options
        self.on_forward: OnForward | None = getattr(self, "on_forward", None)
        self.on_rebuild: Callable[[], None] | None = getattr(self, "on_rebuild", None)
        has_reduced = self._has_reduced = threading.Event()  # with this reducer, which must not hold us
        self._is_rebuilt = False

        def on_bucket(group, bucket):  # type: ignore[no-untyped-def]
            """Without annotations: DDP insists on its own, or none."""
            has_reduced.set()
            return reduce(group, bucket)

        self.register_comm_hook(self.process_group, on_bucket)

    @staticmethod
    def _arguments(process_group: dist.ProcessGroup, options: dict[str, Any]) -> dict[str, Any]:
        # Buffers are sent by the run, which can bear a lost peer; DDP would raise in the user's forward pass.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        # Shapes and initial values are compared and sent by the run too: survivors take no part in a construction.
        return {
            "process_group": process_group,
            "init_sync": False,
            "gradient_as_bucket_view": True,
            buffers: False,
            **options,
        }


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
