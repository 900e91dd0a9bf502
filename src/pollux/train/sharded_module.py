"""Applies the user's ``fully_shard`` calls to a module, and takes them off again, so that it can be sharded anew.

:mod:`pollux.train.sharded_model` calls it at every change of the replicas. torch has no call that undoes
``fully_shard``, so this module reads names that are private to FSDP2. They are in this file only, and
:func:`check_torch` says so in one error where a version of torch lacks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pollux.errors import InvalidValueError

ShardFunction = Callable[[nn.Module, DeviceMesh], object]

WAY = (
    "pass the plain model, and a function that shards it: run.prepare(model, optimizer, shard=lambda model, mesh: ...)"
)

_SETTERS = (
    "set_all_reduce_hook",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_gradient_divide_factor",
)


@dataclass(frozen=True, slots=True)
class Place:
    """One place in the module tree that a parameter is registered at. Tied weights have several."""

    module: nn.Module
    name: str


class ShardGroup:
    """The parameters of one ``fully_shard`` call, whose gradients are reduced in one flat buffer."""

    def __init__(self, module: Any, group: Any) -> None:
        self.module = module  # an FSDPModule
        self._group = group
        # Set at the first use, when the sharded parameters are there.
        self._parameters: list[nn.Parameter] = []
        self._padded: list[int] = []  # elements of each, with padding
        self._counts: list[int] = []
        self._size: int | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained ones, in the order of the reduced buffer."""
        self._lay_out()
        return self._parameters

    @property
    def size(self) -> int:
        """Elements of the reduced buffer, if all trained parameters had a gradient."""
        self._lay_out()
        assert self._size is not None
        return self._size

    def _lay_out(self) -> None:
        if self._size is None:
            trained = [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]
            self._parameters = [one.sharded_param for one in trained]
            self._counts = [one.sharded_param.to_local().numel() for one in trained]
            self._padded = [one.padded_sharded_param_size.numel() for one in trained]
            self._size = sum(self._padded)

    def split(self, flat: Tensor, *, with_padding: bool = False) -> list[Tensor] | None:
        """This rank's rows of each trained parameter's gradient in the reduced buffer, flat, without padding.

        Another rank's rows are laid out alike, but may be more or fewer: with the padding, which is 0, they are all
        there. None if the buffer is not of all trained parameters: one of them had no gradient.
        """
        if flat.numel() != self.size:
            return None
        parts = list(torch.split(flat, self._padded))
        if not with_padding:
            for place, (count, padded) in enumerate(zip(self._counts, self._padded, strict=True)):
                if count != padded:
                    parts[place] = parts[place][:count]
        return parts


def check_torch() -> None:
    """Raises InvalidValueError if this torch has no FSDP2, or one whose parts have other names."""
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp import FSDPModule, fully_shard

        missing = [name for name in _SETTERS if not hasattr(FSDPModule, name)]
        assert STATE_KEY and REGISTRY_KEY and _module_state_mapping is not None
        assert hasattr(fully_shard, "__wrapped__") and not missing, missing
    except (ImportError, AssertionError) as error:
        raise InvalidValueError(
            f"shard= needs FSDP2 as torch 2.13 has it; torch {torch.__version__} differs ({error!r}): install 2.13"
        ) from None


def places(module: nn.Module) -> dict[str, tuple[nn.Parameter, list[Place]]]:
    """Every parameter by its first name, with all places that it is registered at."""
    found: dict[str, tuple[nn.Parameter, list[Place]]] = {}
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for short, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = names.setdefault(id(parameter), f"{prefix}.{short}" if prefix else short)
            found.setdefault(name, (parameter, []))[1].append(Place(owner, short))
    return found


def put(where: list[Place], parameter: nn.Parameter) -> None:
    for place in where:
        place.module._parameters[place.name] = parameter


def blank(parameter: Tensor) -> nn.Parameter:
    """A parameter of the same whole shape and type, without data."""
    data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def shard(module: nn.Module, function: ShardFunction, mesh: DeviceMesh) -> list[ShardGroup]:
    """Call the user's function on a module whose parameters are blank. Raises InvalidValueError for what it may not do.

    The sharded parameters are without data, too: set them by :func:`fill`.
    """
    names = set(places(module))
    function(module, mesh)
    _check_sharded(module, names, mesh)
    return [ShardGroup(owner, group) for owner, group in _groups(module)]


def fill(where: list[Place], local: Tensor) -> nn.Parameter:
    """Give a blank sharded parameter this rank's rows. The new parameter."""
    old = where[0].module._parameters[where[0].name]
    assert isinstance(old, DTensor)
    data = DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
    parameter = nn.Parameter(data, requires_grad=old.requires_grad)
    put(where, parameter)
    return parameter


def adopt(module: nn.Module) -> None:
    """Let FSDP2 know of the parameters that were put into the module; by itself it looks at the first forward pass."""
    for _, group in _groups(module):
        for one in group.fsdp_params:
            one.reset_sharded_param()


def sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """By name. While a module is unsharded for a pass, another parameter is registered in their place."""
    prefixes = {id(owner): f"{prefix}." if prefix else "" for prefix, owner in module.named_modules()}
    return {
        prefixes[id(one._module_info.module)] + one._module_info.param_name: one.sharded_param
        for _, group in _groups(module)
        for one in group.fsdp_params
    }


def unshard(module: nn.Module) -> None:
    """Take ``fully_shard`` off, leaving blank parameters."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for _, group in _groups(module):
        for one in group.fsdp_params:
            one._post_load_hook_handle.remove()
            one._setattr_on_modules(blank(one.sharded_param))
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for info in (group.mesh_info, group.post_forward_mesh_info):
            if info is not None:  # a graph that a script keeps, such as its last loss, would keep the group open
                info.shard_process_group = None
    function: Any = fully_shard
    sharded: list[Any] = [owner for owner in module.modules() if isinstance(owner, FSDPModule)]
    for owner in sharded:
        state = owner._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
    for owner in sharded:
        owner.__class__ = type(owner).__mro__[2]
        owner.__dict__[STATE_KEY].pop(function.__wrapped__)
        owner.__dict__[REGISTRY_KEY].pop(function.__name__)
        _module_state_mapping.pop(owner)


def is_compiled(module: nn.Module) -> bool:
    return any(
        "_orig_mod" in owner._modules or getattr(owner, "_compiled_call_impl", None) is not None
        for owner in module.modules()
    )


def _groups(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Each ``fully_shard`` call's module and its group of parameters, which is private to FSDP2."""
    from torch.distributed.fsdp import FSDPModule

    seen: set[int] = set()
    for owner in module.modules():
        if isinstance(owner, FSDPModule):
            state: Any = owner._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                several = getattr(state, "_fsdp_param_groups", None)
                groups = [state._fsdp_param_group] if several is None else several
                yield from ((owner, group) for group in groups if group is not None)


def _check_sharded(module: nn.Module, names: set[str], mesh: DeviceMesh) -> None:
    """Refuse what cannot be resized, before the first step."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    found = places(module)
    if set(found) != names:
        odd = ", ".join(sorted(set(found) ^ names)[:3])
        raise InvalidValueError(f"the function shard= changed the model's parameters ({odd}); it may only shard them")
    for name, (parameter, _) in found.items():
        if not isinstance(parameter, DTensor):
            raise InvalidValueError(
                f"{name!r} is not sharded: call fully_shard(model, mesh=mesh) on the whole model last, in the function "
                "shard=, without ignored_params"
            )
        elif parameter.device_mesh != mesh or parameter.placements != (Shard(0),):
            raise InvalidValueError(
                f"{name!r} is placed as {parameter.placements} on {parameter.device_mesh}; only Shard(0) on the mesh "
                "that the function shard= is given can be resized: pass mesh=mesh, and no shard_placement_fn or "
                "tensor parallelism"
            )
    for _, group in _groups(module):
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise InvalidValueError("CPUOffloadPolicy is not supported with shard=: leave offload_policy out")
        if group.post_forward_mesh_info is not None and group.post_forward_mesh_info.mesh != mesh:
            raise InvalidValueError(
                "reshard_after_forward is a number of replicas, which a resize may not divide: use True or False"
            )
