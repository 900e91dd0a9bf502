"""A training script that hangs: real server, supervisor and replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import LiveCluster
from tests.long import long

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from pollux import train

def hang_in_here():
    time.sleep(600)

run = train.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = run.prepare(model, optimizer)
data = TensorDataset(torch.ones(1600, 2), torch.ones(1600, 1))
loader = run.dataloader(data, batch_size=4, max_batch_size=4)
flag = Path(sys.argv[1])
count = 0
for epoch in run.epochs(1):
    for features, targets in loader:
        torch.nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        count += 1
        if count == 200 and not flag.exists():
            flag.touch()
            hang_in_here()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    made = LiveCluster(tmp_path, hang_timeout_s=4.0, grace_s=1.0).start()
    yield made
    made.stop()


@long
def test_a_script_that_hangs_writes_its_stack_and_starts_again(cluster: LiveCluster) -> None:
    script = cluster.folder / "hangs.py"
    script.write_text(SCRIPT)
    job = cluster.submit(script, cluster.folder / "flag", name="hangs", kind="elastic", max_replicas=1, max_restarts=9)
    assert job.wait(90) == "succeeded", cluster.story("hangs")
    # On a busy machine a start may take longer than the time-out, too, and is another hang then; and a stop that takes
    # a moment tells its reason again.
    told = [change.reason for change in job.describe().transitions if change.source == "running"]
    assert sum(reason.startswith("hung: no step for") for reason in told) == 1, cluster.story("hangs")
    logs = [path.read_text() for path in (cluster.data / "jobs" / "hangs" / "logs").glob("*/*.err")]
    assert sum("in hang_in_here" in text for text in logs) == 1, cluster.story("hangs")
