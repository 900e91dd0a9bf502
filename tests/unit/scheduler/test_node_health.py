from __future__ import annotations

from pollux.scheduler.node_health import FIRST_PAUSE_S, LONGEST_PAUSE_S, LOST_S, MAX_NODES_TRIED, NodeHealth


def test_a_node_is_excluded_for_the_job_that_failed_there_and_no_other() -> None:
    health = NodeHealth()
    health.fail("a", "bad", "no module named torchx", 10.0, is_proven=True)
    assert health.excluded("a", 10.0) == {"bad": "no module named torchx"}
    assert health.excluded("b", 10.0) == {}
    condition = health.conditions(10.0)["bad"]
    assert (condition.state, condition.reason) == ("suspect", "excluded for a: no module named torchx")
    assert health.num_failures == {"bad": 1}


def test_a_node_is_quarantined_when_two_jobs_that_train_elsewhere_failed_there() -> None:
    health = NodeHealth()
    health.fail("a", "bad", "no script", 0.0, is_proven=True)
    health.fail("b", "bad", "no script", 1.0, is_proven=False)
    assert not health.quarantined(1.0)
    health.train("b", ["good"], 2.0)
    assert health.quarantined(2.0) == {"bad"}
    assert "quarantined: 2 jobs" in health.excluded("c", 2.0)["bad"]
    assert health.conditions(2.0)["bad"].state == "quarantined"


def test_broken_scripts_quarantine_no_node() -> None:
    health = NodeHealth()
    for job in "abcdef":
        health.fail(job, "good", "no module named tpyo", 0.0, is_proven=False)
        health.end(job)
    assert not health.quarantined(0.0) and not health.conditions(0.0)


def test_a_job_tries_a_few_nodes() -> None:
    health = NodeHealth()
    for number in range(MAX_NODES_TRIED):
        assert health.may_try_elsewhere("a")
        health.fail("a", f"node-{number}", "x", 0.0, is_proven=False)
    assert not health.may_try_elsewhere("a")


def test_a_node_is_tried_again_after_a_pause_that_doubles() -> None:
    health = NodeHealth()
    now, pauses = 0.0, []
    for _ in range(9):
        health.fail("a", "bad", "x", now, is_proven=True)
        until = health.conditions(now)["bad"].until
        pauses.append(until - now)
        assert health.excluded("a", until - 1.0) and not health.excluded("a", until)
        now = until
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_one_more_failure_after_a_quarantine_begins_the_next() -> None:
    health = NodeHealth()
    health.fail("a", "bad", "x", 0.0, is_proven=True)
    health.fail("b", "bad", "x", 0.0, is_proven=True)
    assert health.quarantined(FIRST_PAUSE_S - 1) and not health.quarantined(FIRST_PAUSE_S)
    health.fail("c", "bad", "x", FIRST_PAUSE_S, is_proven=True)
    assert health.quarantined(3 * FIRST_PAUSE_S - 1) and not health.quarantined(3 * FIRST_PAUSE_S)


def test_a_job_that_trains_on_the_node_ends_its_quarantine() -> None:
    health = NodeHealth()
    health.fail("a", "bad", "x", 0.0, is_proven=True)
    health.fail("b", "bad", "x", 0.0, is_proven=True)
    health.train("c", ["bad"], FIRST_PAUSE_S)
    assert not health.conditions(FIRST_PAUSE_S)
    health.fail("d", "bad", "x", FIRST_PAUSE_S, is_proven=True)
    assert not health.quarantined(FIRST_PAUSE_S)


def test_lost_nodes_are_shown_for_a_while_released_ones_are_not() -> None:
    health = NodeHealth()
    health.see(["a", "b", "c"], (), 0.0)
    health.see(["a"], ["c"], 5.0)
    assert set(health.conditions(6.0)) == {"b"}
    assert health.conditions(6.0)["b"].state == "lost"
    health.see(["a"], (), 5.0 + LOST_S)
    assert not health.conditions(5.0 + LOST_S)
    health.see(["a", "b"], (), 700.0)
    health.see(["a"], (), 701.0)
    health.see(["a", "b"], (), 702.0)
    assert not health.conditions(702.0)


def test_a_user_whose_jobs_fail_on_purpose_takes_no_node_from_others():
    """An attack: jobs that end on a chosen node before they are ready, and train elsewhere."""
    health = NodeHealth()
    for job in ("one", "two", "three"):
        health.fail(job, "victim", "exit code 1", 0.0, is_proven=True, owner="mallory")
    assert not health.excluded("honest", 1.0, "ada") and not health.quarantined(1.0, ["ada", "mallory"])
    assert "quarantined" in health.excluded("four", 1.0, "mallory")["victim"]
    assert health.conditions(1.0)["victim"].reason.startswith("for mallory's jobs: 2 jobs")
    assert health.quarantined(1.0, ["mallory"]) == {"victim"}  # no other owner has jobs
    health.fail("honest", "victim", "no GPU", 2.0, is_proven=True, owner="ada")
    assert health.quarantined(3.0, ["ada", "bob", "mallory"]) == {"victim"}
