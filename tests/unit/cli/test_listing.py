from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from pollux.api.cluster import NodeReading, NodeSummary, SlotReading
from pollux.cli.board import _node
from pollux.cli.listing import gpu_cells, node_table

SLOT = SlotReading(
    slot=0, gpu="GPU-a", utilisation=0.8, memory_bytes=12 * 10**9, memory_total_bytes=10**11, power_w=150.0,
    temperature_c=61.0,
)  # fmt: skip
READING = NodeReading(
    at=1.0, cpu=0.31, memory_bytes=8 * 10**9, memory_total_bytes=64 * 10**9, disk_bytes=1, disk_total_bytes=2,
    received_bytes_per_s=0.0, sent_bytes_per_s=0.0,
)  # fmt: skip
NODE = NodeSummary(
    name="n", num_slots=2, accelerator="H200", is_draining=False, is_leaving=False, used=0, jobs=(), reading=READING
)


def printed(*nodes: NodeSummary) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=200).print(node_table(nodes))
    return text.getvalue().splitlines()


def test_cpu_nodes_have_no_columns_of_gpus():
    head, row = printed(NODE)
    assert head.split() == ["node", "slots", "used", "accelerator", "state", "CPU", "memory", "jobs"]
    assert "31%" in row and "8GB of 64GB" in row


def test_shares_of_a_card_count_its_memory_once_and_its_power_together():
    shares = tuple(replace(SLOT, slot=number) for number in range(2))
    assert gpu_cells(replace(READING, slots=shares)) == ("80%", "12GB", "300 W", "61")
    other = replace(SLOT, gpu="GPU-b", utilisation=0.2, temperature_c=70.0)
    assert gpu_cells(replace(READING, slots=(*shares, other))) == ("50%", "24GB", "450 W", "70")


def test_what_is_not_known_is_a_dash_and_the_other_nodes_are_shown():
    silent = replace(SLOT, utilisation=None, memory_bytes=None, power_w=None, temperature_c=None)
    with_gpu = replace(NODE, name="g", reading=replace(READING, slots=(SLOT,)))
    head, *rows = printed(
        with_gpu, replace(NODE, reading=None), replace(NODE, reading=replace(READING, slots=(silent,)))
    )
    assert "GPU memory" in head and "150 W" in rows[0]
    assert rows[1].split()[5:] == ["-"] * 6 and rows[2].split()[5:9] == ["-"] * 4


def test_the_board_tells_utilisation_and_power_beside_a_nodes_slots():
    assert _node(replace(NODE, reading=replace(READING, slots=(SLOT,))), {}).plain.endswith("80% 150 W")
    assert not _node(NODE, {}).plain.endswith("W")
