"""Which type of node auto-scaling adds, and what nodes cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pollux.errors import InvalidValueError
from pollux.scheduler.autoscale import AutoscaleConfig
from pollux.scheduler.node_types import NodeType, Prices, check_node_types, most_worth
from pollux.scheduler.sizing import NONE_COMES_S, Sizer
from pollux.types import Allocation, JobSpec, JobView, Node, Plan, Snapshot

FAST = NodeType(accelerator="fast", num_slots=4, price=10.0, group="big")
SLOW = NodeType(accelerator="slow", num_slots=4, price=3.0)


@pytest.mark.parametrize("text", ["A100=8@12.5", "NVIDIA A100-SXM4-80GB=8@12.5/big-ones", "cpu=64@0.3"])
def test_types_are_read_and_said_alike(text: str) -> None:
    assert str(NodeType.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["A100", "A100=8", "A100=@3", "=8@3", "A100=0@3", "A100=8@0", "A100=8@1.2.3", "A=8@-1"]
)
def test_what_is_no_type_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"needed|positive") as error:
        NodeType.parse(text)
    assert "\n" not in str(error.value)


def test_a_type_has_one_price() -> None:
    with pytest.raises(InvalidValueError, match="'slow' is given twice"):
        check_node_types([SLOW, FAST, NodeType(accelerator="slow", num_slots=8, price=5.0)])
    with pytest.raises(InvalidValueError, match="given twice"):
        AutoscaleConfig(min_nodes=1, max_nodes=2, types=(SLOW, SLOW))


def test_cost_is_by_type() -> None:
    prices = Prices.of_types([FAST, SLOW], other=1.0)
    assert prices.cost({"fast": 3600.0, "slow": 1800.0, "cpu": 7200.0}) == pytest.approx(10 + 1.5 + 2)
    assert Prices.of_types([SLOW]).cost({"cpu": 3600.0}) == 0.0
    assert Prices().cost({"cpu": 3600.0}) is None


@pytest.mark.parametrize(
    ("fast", "chosen"),
    [(2.0, SLOW), (3.2, SLOW), (3.5, FAST)],  # 10 / 3 times the price
)
def test_the_type_with_the_most_goodput_for_its_price_is_added(fast: float, chosen: NodeType) -> None:
    speed = {"fast": fast, "slow": 1.0}
    assert most_worth([FAST, SLOW], 5.0, lambda one: 5.0 + one.num_slots * speed[one.accelerator]) is chosen


def test_of_types_that_add_nothing_the_cheapest_slots_are_chosen() -> None:
    assert most_worth([FAST, SLOW], 5.0, lambda _: 5.0) is SLOW


class Pool:
    template = SLOW.node

    def __init__(self) -> None:
        self.asked: tuple[list[str], int, Node | None] = ([], 0, None)

    def scale_to(self, keeping: Sequence[str], num_more: int, like: Node | None = None) -> None:
        self.asked = (list(keeping), num_more, like)


def fill(snapshot: Snapshot) -> Plan:
    """As many replicas as there are slots, for the first jobs, a node each."""
    free = [(node.name, node.num_slots) for node in snapshot.nodes]
    jobs = [job.name for job in snapshot.jobs]
    return Plan(allocations={job: Allocation.of(share) for job, share in zip(jobs, free, strict=False)})


def views(number: int) -> list[JobView]:
    return [JobView(spec=JobSpec(name=f"job{index}"), age_s=0.0) for index in range(number)]


def test_a_sizer_asks_for_the_type_that_is_worth_most_and_keeps_to_it_while_it_comes() -> None:
    pool = Pool()
    cheap = NodeType(accelerator="fast", num_slots=4, price=2.0, group="big")
    config = AutoscaleConfig(min_nodes=1, max_nodes=4, low=0.3, high=0.6, types=(SLOW, cheap))
    sizer, nodes = Sizer(config, pool), [Node(name="a", num_slots=4, accelerator="slow")]
    sizer.update(0.0, nodes, views(6), (), fill)
    _, num_more, like = pool.asked
    assert num_more > 0 and like is not None
    assert (like.accelerator, dict(like.labels)) == ("fast", {"group": "big"})
    sizer.update(60.0, nodes, views(6), (), fill)
    assert pool.asked[2] == like
    sizer.update(60.0 + NONE_COMES_S + 1, nodes, views(6), (), fill)  # the cloud has none
    other = pool.asked[2]
    assert other is not None and other.accelerator == "slow"


def test_the_node_that_is_worth_least_for_its_price_goes_first() -> None:
    pool = Pool()
    config = AutoscaleConfig(min_nodes=1, max_nodes=4, low=0.3, high=0.6, settle_s=0.0, types=(SLOW, FAST))
    nodes = [Node(name="f", num_slots=4, accelerator="fast"), Node(name="s", num_slots=4, accelerator="slow")]
    sizer = Sizer(config, pool)
    for now in (0.0, 10.0):
        sizer.update(now, nodes, views(1), (), fill)
    assert pool.asked[0] == ["s"]  # ten for what costs three


def test_without_types_the_pool_is_asked_as_ever() -> None:
    pool = Pool()
    sizer = Sizer(AutoscaleConfig(min_nodes=1, max_nodes=4, low=0.3, high=0.6), pool)
    sizer.update(0.0, [Node(name="a", num_slots=4, accelerator="slow")], views(6), (), fill)
    assert pool.asked[1] > 0 and pool.asked[2] is None
