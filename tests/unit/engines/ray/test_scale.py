from __future__ import annotations

from collections.abc import Sequence

from pollux.engines.ray.scale import GROUP_LABEL, ScalableNode, ScaleRequest, requested, selectors, unwanted


def request(*keeping: str, refused: Sequence[str] = (), num_more: int = 0) -> ScaleRequest:
    return ScaleRequest(keeping=frozenset(keeping), refused=frozenset(refused), num_more=num_more, num_slots=8)


def members(names: str, released: str = "") -> list[ScalableNode]:
    return [ScalableNode(name=name, num_slots=4, is_released=name in released) for name in names]


class TestUnwanted:
    def test_who_is_not_kept_may_go(self):
        assert unwanted(request("a"), members("abc"), set()) == {"b", "c"}

    def test_who_is_in_use_stays_until_jobs_have_left(self):
        assert unwanted(request("a", refused="b"), members("abc"), {"b"}) == {"c"}

    def test_a_node_that_was_asked_for_is_welcome_before_the_scheduler_knows_it(self):
        assert unwanted(request("a", num_more=1), members("ab"), set()) == set()

    def test_no_more_are_welcome_than_were_asked_for(self):
        assert unwanted(request("a", num_more=1), members("abc"), set()) == {"c"}

    def test_who_was_refused_is_none_of_those_asked_for(self):
        assert unwanted(request("a", refused="b", num_more=1), members("ab"), set()) == {"b"}

    def test_one_that_was_let_go_is_taken_back_if_nobody_else_has_come(self):
        assert unwanted(request("a", num_more=1), members("ab", released="b"), set()) == set()
        assert unwanted(request("a", num_more=1), members("abc", released="b"), set()) == {"b"}


class TestRequested:
    def test_nothing_while_all_are_there(self):
        """Ray would otherwise keep whichever nodes it likes, such as the one that was let go."""
        assert requested(request("a"), members("ab", released="b"), "GPU") == []

    def test_those_that_are_there_and_those_that_are_missing(self):
        assert requested(request("a", num_more=2), members("a"), "GPU") == [{"GPU": 4}, {"GPU": 8}, {"GPU": 8}]

    def test_one_that_has_come_is_not_asked_for_again_and_is_still_counted(self):
        assert requested(request("a", num_more=1), members("ab"), "CPU") == [{"CPU": 4}, {"CPU": 4}]

    def test_one_that_was_refused_does_not_stand_for_one_that_is_missing(self):
        assert requested(request("a", refused="b", num_more=1), members("ab"), "CPU") == [
            {"CPU": 4},
            {"CPU": 4},
            {"CPU": 8},
        ]


def test_nodes_of_a_worker_group_are_asked_for_by_its_label() -> None:
    members = [ScalableNode(name="a", num_slots=2, is_released=False)]
    wants = ScaleRequest(keeping=frozenset({"a"}), refused=frozenset(), num_more=2, num_slots=8, group="big")
    assert requested(wants, members, "GPU") == [{"GPU": 2}, {"GPU": 8}, {"GPU": 8}]
    assert selectors(wants, members) == [{}, {GROUP_LABEL: "big"}, {GROUP_LABEL: "big"}]
    any_group = ScaleRequest(keeping=frozenset({"a"}), refused=frozenset(), num_more=2, num_slots=8)
    assert selectors(any_group, members) == []
    enough = ScaleRequest(keeping=frozenset({"a"}), refused=frozenset(), num_more=0, num_slots=8, group="big")
    assert selectors(enough, members) == requested(enough, members, "GPU") == []
