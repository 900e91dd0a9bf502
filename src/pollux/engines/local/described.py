"""What this machine's nodes offer besides slots: labels, CPUs and memory. The server's factory and its engine call it.

Virtual nodes and nodes of one GPU type share one machine: each counts as having a part of its CPUs and memory, in
proportion to its slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import psutil

from pollux.api.constraint import Label
from pollux.engines.processes.devices import num_cpus
from pollux.errors import InvalidValueError
from pollux.types import Node


def check_labels(nodes: Sequence[Node], labels: Sequence[Label]) -> None:
    """Raises InvalidValueError if a label is for a node that is not there."""
    names = [node.name for node in nodes]
    for label in labels:
        if label.node and label.node not in names:
            raise InvalidValueError(
                f"label {label.node}:{label.key}={label.value}; there is no node {label.node}: {', '.join(names)}"
            )


def described(nodes: Sequence[Node], labels: Sequence[Label]) -> list[Node]:
    """The nodes, with what else they offer. Labels of a node that is not there now are kept for when it comes."""
    num_slots = sum(node.num_slots for node in nodes)
    memory, cpus = psutil.virtual_memory().total, num_cpus()
    found = []
    for node in nodes:
        everywhere = {label.key: label.value for label in labels if not label.node}
        own = {label.key: label.value for label in labels if label.node == node.name}
        found.append(
            dataclasses.replace(
                node,
                labels=tuple((everywhere | own).items()),
                cpus=cpus * node.num_slots / num_slots,
                memory_bytes=memory * node.num_slots // num_slots,
            )
        )
    return found
