"""Studies of a real network on a real cluster: found, pruned, killed in the middle, and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="studies need the extra tune")

from pollux.tune import Study
from tests.e2e.cluster import LiveCluster
from tests.e2e.study_kills import run_piece
from tests.long import long

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SPACE = {"lr": "log:1e-4..1.0", "momentum": "0.5..0.99", "width": "choice:8,16"}
PATIENCE_S = 240.0


@pytest.fixture
def cluster(tmp_path):
    made = LiveCluster(tmp_path).start()
    yield made
    made.stop()


def begin(cluster, trials, *, epochs=4, ms=0.0, **options):
    command = ["python", str(EXAMPLES / "digits_study.py"), "--epochs", str(epochs), "--emulate-device", str(ms)]
    given = {"space": SPACE, "metric": "val_loss", "trials": trials, "name": "digits", **options}
    return Study(command, client=cluster.client, **given).start()


def check(found, trials):
    assert found.state == "finished", found
    counted = [one for one in found.trials if one.state in ("complete", "pruned")]
    assert len(counted) == trials, [(one.number, one.state, one.reason) for one in found.trials]
    assert len({one.job for one in found.trials}) == len(found.trials)
    assert found.best_value == min(one.value for one in counted if one.value is not None)


@long
def test_a_study_of_a_real_network_goes_on_after_the_server_is_killed(cluster):
    study = begin(cluster, 6)
    cluster.until(lambda: sum(one.value is not None for one in study.describe().trials) >= 2, "two values")
    before = {one.number: one.params for one in study.describe().trials}
    cluster.kill_server()
    cluster.start()
    study = Study.attach("digits", cluster.client)
    found = study.wait(PATIENCE_S)
    check(found, 6)
    assert {number: found.trials[number].params for number in before} == before
    assert found.best_value < 2.28  # it learns: guessing gives 2.30; which trials are pruned depends on their speed
    curves = study.curves().curves
    assert all(0 < point.progress <= 1 for points in curves.values() for point in points)
    jobs = cluster.client.jobs()
    assert sorted(job.name for job in jobs) == sorted(one.job for one in found.trials)


def test_a_population_copies_states_in_memory_while_it_trains(cluster):
    space = {"lr": "log:1e-5..1.0", "momentum": "0.5..0.99"}
    options = {"pruner": "pbt", "sampler": "random", "min_progress": 0.1, "space": space, "max_replicas": 1}
    found = begin(cluster, 4, epochs=10, ms=0.3, **options).wait(PATIENCE_S)  # without a wait they end too soon
    check(found, 4)
    copied = [one for one in found.trials if one.copied]
    assert copied, (found.warnings, [(one.number, one.value) for one in found.trials])
    for one in copied:
        notes = cluster.client.job(one.job).describe().training_notes
        assert any("took over the state of trial" in note.text for note in notes), notes


LATE = """
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset
from pollux import train

torch.manual_seed(0)
x = torch.randn(512, 4)
y = x @ torch.ones(4, 1)
run = train.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=run.param("lr", 0.01))
loader = run.dataloader(TensorDataset(x, y), batch_size=16, shuffle=True)
model, optimizer = run.prepare(model, optimizer)
for epoch in run.epochs(20):
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean() + (0.0 if epoch < 10 else run.param("decay", 0.0)) * (
            sum(one.square().sum() for one in model.parameters()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if epoch >= 10 and not Path(sys.argv[1]).exists():  # the others are yet to come
            time.sleep(0.5)
    time.sleep(0.2)
    with torch.no_grad():
        run.log(loss=(model(x) - y).square().mean().item())
"""


@long
def test_trials_that_differ_late_share_their_early_part(cluster, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    space = {"lr": "log:1e-3..1e-2", "decay": "0.1..1.0 from 0.5"}
    options = {"space": space, "metric": "loss", "trials": 3, "name": "late", "pruner": "none", "max_replicas": 1}
    command = ["python", str(tmp_path / "late.py"), str(tmp_path / "go")]
    study = Study(command, client=cluster.client, **options).start()
    cluster.until(lambda: sum(bool(one.copied) for one in study.describe().trials) == 2, "two branches")
    (tmp_path / "go").touch()
    found = study.wait(PATIENCE_S)
    check(found, 3)
    assert not found.warnings
    branches = [one for one in found.trials if one.branch_of is not None]
    assert len(branches) == 2, found.warnings
    for one in branches:
        trunk = found.trials[one.branch_of]
        assert one.copied == (trunk.number,), found.warnings
        assert one.params["lr"] == trunk.params["lr"] and one.params["decay"] != trunk.params["decay"]
        curves = Study.attach("late", cluster.client).curves().curves
        mine, theirs = ({point.progress: point.value for point in curves[str(n)]} for n in (one.number, trunk.number))
        common = sorted(mine.keys() & theirs.keys())
        assert all(mine[at] == theirs[at] for at in common if at <= 0.5)
        assert any(mine[at] != theirs[at] for at in common if at > 0.5)


@long
def test_studies_whose_server_trials_and_fork_server_are_killed(tmp_path):
    """A piece of ``make study-kills``, which has fifty."""
    piece = run_piece(tmp_path, num_kills=8, seed=100)
    assert piece.counts.total() == 8
