"""The live cluster: jobs are submitted, held back, started, measured and ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pollux.api.request import JobRequest
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.profile import Configuration, Timing
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.ports import Event, StopJob
from pollux.server.live import cluster as cluster_module
from pollux.server.live import job_table as job_table_module
from tests.unit.server.live.world import PATIENCE_S, report


def test_a_job_is_kept_started_and_ended(world):
    name = world.submit(name="first")
    view = world.until_state(name, "running")
    assert (view.num_replicas, view.allocation, view.reason) == (1, (("a", 1),), "generation 1 trains")
    world.engine.end(name, exit_code=0)
    view = world.until_state(name, "succeeded")
    assert view.exit_code == 0 and view.finished_at >= view.started_at >= view.submitted_at
    world.until(lambda: world.cluster.queries.is_ended(name), "its end is kept")
    assert world.store.job(name).state is JobState.SUCCEEDED
    assert [t.target for t in world.cluster.queries.job(name).transitions] == ["starting", "running", "succeeded"]


def test_names_are_made_unique_and_arrays_are_spread(world):
    assert [world.submit(name="a") for _ in range(3)] == ["a", "a-2", "a-3"]
    views = world.cluster.submit(JobRequest(command=("true",), name="many", array="0-2"))
    assert [view.name for view in views] == ["many-0", "many-1", "many-2"]
    assert world.cluster._jobs.launch_of("many-1").env["POLLUX_ARRAY_INDEX"] == "1"


def test_reports_make_an_elastic_job_grow_and_are_kept(world):
    name = world.submit(kind="elastic")
    world.until_state(name, "running")
    timings = ((Configuration(1, 1, 32), Timing(0.1, 0.1, 10)),)
    answer = world.cluster.report(report(name, timings=timings))
    assert answer.report_every_s == 1.0
    view = world.until(lambda: (v := world.cluster.queries.summary_of(name)).num_replicas == 4 and v, "growth")
    assert (view.noise_scale, view.progress, view.total_batch) == (100.0, 0.5, 32)
    # What was learnt is told with the next answer, under the cluster's own name of the type.
    assert list(world.cluster.report(report(name)).params) == ["cpu"]
    world.until(lambda: len(world.cluster.queries.reports(name, None, 10)) == 2, "both reports kept")
    detail = world.cluster.queries.job(name)
    assert detail.models["cpu"].num_configurations == 1
    assert detail.decision.option_replicas and detail.decisions[-1].after == 4
    assert [resize.after for resize in detail.resizes] == [(("a", 1),), (("a", 4),)]


def test_what_a_run_tells_of_its_decisions_is_in_the_history_and_the_log_once(world, caplog):
    caplog.set_level("INFO")
    name = world.submit(kind="elastic", max_replicas=1)
    world.until_state(name, "running")
    note = "step 1200: batch 64 -> 32, because |G|^2 rose 3.1 times after it grew"
    world.cluster.report(report(name, noise_scale_error=15.0, notes=(note,)))
    told = world.until(lambda: world.cluster.queries.job(name).training_notes, "the note kept")
    assert [entry.text for entry in told] == [note] and told[0].at >= world.cluster.queries.summary_of(name).started_at
    world.cluster.report(report(name, notes=("step 1300: batch 32 -> 64",)))
    world.until(lambda: len(world.cluster.queries.job(name).training_notes) == 2, "both notes kept")
    world.cluster.stop(keeps_jobs=True)
    cluster = world.make()
    cluster.start()  # which sees the reports again
    world.until(lambda: cluster.queries.rounds(None, 5), "a round")
    assert [entry.text for entry in cluster.queries.job(name).training_notes] == [note, "step 1300: batch 32 -> 64"]
    assert caplog.text.count(f"job {name}: training: {note}") == 1


def test_a_report_of_a_job_that_is_over_changes_nothing(world):
    name = world.submit()
    world.until_state(name, "running")
    world.engine.end(name)
    world.until_state(name, "succeeded")
    world.until(lambda: world.cluster.queries.is_ended(name))
    world.cluster.report(report(name, progress=0.1))
    assert world.cluster.queries.summary_of(name).progress is None


def test_dependencies_hold_a_job_back(world):
    first = world.submit(name="first")
    second = world.submit(name="second", after=(first,))
    third = world.submit(name="third", after=(second,))
    world.until_state(first, "running")
    assert world.cluster.queries.summary_of(second).reason == "waiting for first"
    world.engine.end(first)
    world.until_state(second, "running")
    assert world.cluster.queries.summary_of(third).state == "pending"
    world.cluster.cancel(second, "not any more")
    view = world.until_state(third, "cancelled")
    assert view.reason == "it was to run after second, which was cancelled"


def test_an_unknown_dependency_and_a_circle_are_refused_whole(world):
    with pytest.raises(InvalidValueError, match="nobody"):
        world.submit(name="a", after=("nobody",))
    with pytest.raises(InvalidValueError, match="wait for each other"):
        world.submit(name="a", after=("a",))
    assert world.cluster.queries.jobs(None, 10, 0, False) == ([], 0)


def test_a_job_of_which_nothing_is_needed_is_not_asked_to_save(world):
    names = [world.submit(name=name) for name in ("kept", "dropped")]
    for name, saves in zip(names, (True, False), strict=True):
        world.until_state(name, "running")
        world.cluster.cancel(name, "enough", saves)
        world.until_state(name, "cancelled")
    stops = {one.job: one.saves for one in world.engine.commands if isinstance(one, StopJob)}
    assert stops == {"kept": True, "dropped": False}


def test_a_held_job_can_be_cancelled(world):
    first = world.submit()
    held = world.submit(after=(first,))
    world.cluster.cancel(held, "changed my mind")
    world.until_state(held, "cancelled")
    assert world.cluster.queries.summary_of(held).reason == "changed my mind"
    assert world.cluster.cancel(held, "again").reason == "changed my mind"


def test_a_time_limit_ends_a_job_as_failed(world):
    name = world.submit(time_limit_s=0.2)
    view = world.until_state(name, "failed")
    assert view.reason == "stopped: its time limit of 0.2 s is over"


def test_unknown_jobs_nodes_and_states_are_named_with_their_neighbours(world):
    world.submit(name="resnet")
    with pytest.raises(UnknownNameError, match="resnet"):
        world.cluster.queries.summary_of("resnt")
    with pytest.raises(UnknownNameError, match="resnet"):
        world.cluster.cancel("resnt", "")
    with pytest.raises(UnknownNameError, match="resnet"):
        world.cluster.queries.job_directory("resnt")
    with pytest.raises(UnknownNameError, match="Known: a"):
        world.cluster.drain("b", True)
    with pytest.raises(UnknownNameError, match="running"):
        world.cluster.queries.jobs(["runing"], 10, 0, False)


def test_a_missing_script_is_refused(world, tmp_path):
    with pytest.raises(InvalidValueError, match=r"train\.py cannot be read"):
        world.submit("python", "train.py", cwd=str(tmp_path))


def test_the_kind_is_seen_from_the_script(world, tmp_path):
    (tmp_path / "train.py").write_text("from pollux import train\n")
    name = world.submit("python", "train.py", cwd=str(tmp_path))
    assert world.cluster.queries.summary_of(name).kind == "elastic"


def test_the_kind_is_seen_from_a_file_that_the_script_imports(world, tmp_path):
    (tmp_path / "train.py").write_text("import loop\n")
    (tmp_path / "loop.py").write_text("from pollux import train\n")
    name = world.submit("python", "train.py", cwd=str(tmp_path))
    assert world.cluster.queries.summary_of(name).kind == "elastic"


def test_each_job_has_a_token_of_its_own(world):
    one, other = world.submit(), world.submit()
    tokens = [world.cluster._jobs.launch_of(name).env["POLLUX_TOKEN"] for name in (one, other)]
    assert [world.cluster.job_of_token(token) for token in tokens] == [one, other]
    assert world.cluster.job_of_token("x" * 64) is None
    world.cluster.cancel(one, "enough")
    world.until_state(one, "cancelled")
    world.until(lambda: world.cluster.job_of_token(tokens[0]) is None, "the end of its token")
    assert world.cluster.job_of_token(tokens[1]) == other


def test_values_of_a_jobs_environment_do_not_come_back(world):
    name = world.submit(env={"WANDB_API_KEY": "hunter2", "SEED": "1"})
    shown = world.cluster.queries.job(name).request
    assert shown["env"] == {"WANDB_API_KEY": "(hidden)", "SEED": "(hidden)"}
    assert "hunter2" not in repr(world.cluster.queries.job(name))
    assert world.cluster._jobs.launch_of(name).env["WANDB_API_KEY"] == "hunter2"


def test_draining_lets_jobs_end_that_must_not_be_moved(world):
    name = world.submit(kind="fixed")
    world.until_state(name, "running")
    assert world.cluster.drain("a", True).is_draining
    late = world.submit(kind="fixed")
    rounds = len(world.cluster.queries.rounds(None, 100))
    world.until(
        lambda: len(world.cluster.queries.rounds(None, 100)) > rounds or world.cluster.queries.summary_of(late).reason
    )
    assert world.cluster.queries.summary_of(name).state == "running"
    assert world.cluster.queries.summary_of(late).state == "pending"
    assert not world.cluster.drain("a", False).is_draining
    world.until_state(late, "running")


def test_a_node_that_vanishes_while_it_is_drained_stays_drained(world, monkeypatch):
    queries, nodes = world.cluster.queries, world.cluster.queries.nodes()
    answers = [nodes, []]  # what is there before, and after
    monkeypatch.setattr(queries, "nodes", lambda: answers.pop(0))
    drained = world.cluster.drain("a", True)
    assert drained.name == "a" and drained.is_draining
    assert world.cluster._drained.all() == {"a"}


def test_a_storm_of_reports_is_taken_in_and_none_is_lost(world):
    names = [world.submit(kind="elastic", max_replicas=1) for _ in range(4)]
    for name in names:
        world.until_state(name, "running")

    def storm(name: str) -> None:
        for step in range(500):
            world.cluster.report(report(name, num_steps=step))

    threads = [threading.Thread(target=storm, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for name in names:
        world.until(lambda name=name: len(world.cluster.queries.reports(name, None, 1000)) == 500, "all kept")
        assert world.cluster.queries.summary_of(name).num_steps == 499
    assert world.cluster.is_ready


def test_a_second_array_gets_a_name_of_its_own(world):
    names = [
        [view.name for view in world.cluster.submit(JobRequest(command=("true",), name="sweep", array="0-1"))]
        for _ in range(2)
    ]
    assert names == [["sweep-0", "sweep-1"], ["sweep-2-0", "sweep-2-1"]]
    assert world.submit(name="sweep") == "sweep"


def test_a_large_array_of_a_name_that_many_have_holds_up_no_other_submission(world):
    """An attack by a member: to see that a name is taken, 10,000 requests were made, and nobody else could submit."""
    first = JobRequest(command=("true",), name="sweep", array="9999", is_held=True)
    for _ in range(150):
        world.cluster.submit(first)
    began = time.monotonic()
    assert world.cluster._jobs._named(replace(first, array="0-9999")).name == "sweep-151"
    assert time.monotonic() - began < 10.0  # it took a minute


def test_an_array_that_is_being_made_holds_up_no_other_submission(world, monkeypatch):
    is_made, goes_on, expand = threading.Event(), threading.Event(), JobRequest.expand

    def slow(request: JobRequest) -> list[JobRequest]:
        if threading.current_thread() is maker:
            is_made.set()
            goes_on.wait(PATIENCE_S)
        return expand(request)

    found: list[str] = []
    big = JobRequest(command=("true",), name="big", array="0-2")
    maker = threading.Thread(
        target=lambda: found.extend(job.name for job in world.cluster._jobs.admit(big, time.time()))
    )
    monkeypatch.setattr(JobRequest, "expand", slow)
    maker.start()
    assert is_made.wait(PATIENCE_S)
    others: list[str] = []
    other = threading.Thread(target=lambda: others.extend([world.submit(name="big-1"), world.submit(name="quick")]))
    other.start()
    other.join(5.0)
    goes_on.set()
    other.join(PATIENCE_S)
    assert found == []  # they were quicker
    assert others == ["big-1-2", "quick"]  # a name of the array is taken already
    maker.join(PATIENCE_S)
    assert found == ["big-0", "big-1", "big-2"]


def test_a_user_has_a_bounded_number_of_jobs(world, monkeypatch):
    monkeypatch.setattr(job_table_module, "MAX_UNENDED", 3)
    ada, bob = (JobRequest(command=("true",), name="many", owner=owner, is_held=True) for owner in ("ada", "bob"))
    world.cluster.submit(replace(ada, array="0-1"))
    with pytest.raises(InvalidValueError, match="user ada would have 4 jobs that are not over; at most 3 are allowed"):
        world.cluster.submit(replace(ada, array="0-1"))
    last = world.cluster.submit(ada)[0].name
    world.cluster.submit(replace(bob, array="0-2"))
    world.cluster.submit(replace(ada, owner="", array="0-9"))  # the operator's
    world.cluster.cancel(last, "enough")
    world.until(lambda: last not in world.cluster._jobs, "it is over")
    world.cluster.submit(ada)


def test_the_first_job_of_a_large_array_is_looked_at_without_the_others(world, monkeypatch):
    expanded: list[str] = []
    expand = JobRequest.expand

    def counted(request: JobRequest) -> list[JobRequest]:
        expanded.append(request.array)
        return expand(request)

    monkeypatch.setattr(JobRequest, "expand", counted)
    world.cluster.submit(JobRequest(command=("true",), name="big", array="3-5", is_held=True))
    assert expanded == ["3", "3-5"]


def test_a_job_over_its_time_limit_is_not_looked_at_all_the_time(world, monkeypatch):
    world.engine.obeys_stops = False
    name = world.submit(time_limit_s=0.1)
    world.until_state(name, "stopping")
    num_polls = 0
    poll = world.engine.poll

    def counted() -> Sequence[Event]:
        nonlocal num_polls
        num_polls += 1
        return poll()

    monkeypatch.setattr(world.engine, "poll", counted)
    began = time.monotonic()
    time.sleep(1.0)
    assert num_polls <= 2 * (time.monotonic() - began) / 0.2 + 2  # the interval is 0.2 s


def test_a_script_that_is_a_pipe_holds_up_nobody(world, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(InvalidValueError, match="it is no file"):
        world.submit("python", "pipe.py", cwd=str(tmp_path))


def test_weights_of_jobs_outside_of_a_study_and_new_ones(world):
    world.submit(name="other", weight=2.0)
    name = world.submit(name="s-0", study="s", metric="loss", params={"lr": 0.1})
    world.until(lambda: len(world.cluster.weights_outside("t")) == 2)
    assert world.cluster.weights_outside("s") == [2.0]
    assert world.cluster.queries.summary_of(name).study == "s"
    world.cluster.reweigh({name: 0.25})
    world.until(lambda: world.cluster.queries.summary_of(name).weight == 0.25)
    environment = world.cluster._jobs.launch_of(name).env
    assert (environment["POLLUX_PARAMS"], environment["POLLUX_METRIC"]) == ('{"lr": 0.1}', "loss")


def test_a_caller_does_not_wait_while_the_thread_rests_after_a_long_decision(world, monkeypatch):
    monkeypatch.setattr(cluster_module, "MAX_DUTY", 1e-6)  # as if each had taken long: now it rests for minutes
    world.cluster._turn_s = 0.1
    world.cluster.wake()
    name = world.submit(kind="fixed", replicas=9)  # more than there are: no tick starts it, so its end needs none
    world.cluster.cancel(name, "enough")
    world.until_state(name, "cancelled")


def test_another_users_jobs_do_not_fill_an_array(world):
    for index in range(2):
        world.cluster.submit(JobRequest(command=("sleep", "9"), name=f"x{index}", array_of="sweep", owner="ada"))
    world.until(lambda: {"x0", "x1"} <= set(world.cluster._state.records), "ada's jobs taken in")
    world.cluster.submit(JobRequest(command=("sleep", "9"), name="sweep", array="0-1%2", owner="bob"))
    world.until(lambda: {"sweep-0", "sweep-1"} <= set(world.cluster._state.records), "both taken in")
