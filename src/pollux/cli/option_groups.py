"""Options that several commands share, as one parameter: ``@expanded`` replaces it by the options of its group.

``pollux simulate`` and ``pollux compare`` use it, so that neither lists the options of a simulation again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self, get_type_hints


class OptionGroup:
    """Base class of groups. As it is here, for dataclasses whose fields are annotated with their option."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """What typer would read from a command that listed the options itself."""
        hints = get_type_hints(cls, include_extras=True)
        return [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[name])
            for name, field in getattr(cls, "__dataclass_fields__", {}).items()
        ]

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        """The group, of the value of every parameter."""
        return cls(**values)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of every group in place of the parameter that names it."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[OptionGroup]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, OptionGroup)
    }
    names = {name: [parameter.name for parameter in group.parameters()] for name, group in groups.items()}
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for own in signature.parameters.values()
        for parameter in (groups[own.name].parameters() if own.name in groups else [own])
    ]

    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.of_values({option: given.pop(option) for option in names[name]})
        command(**given)

    functools.update_wrapper(call, command)
    del call.__dict__["__wrapped__"]  # typer would read the options of the original
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call
