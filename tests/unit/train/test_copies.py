"""A run takes over another job's state in memory: real processes, one source and a target of two replicas."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from pollux.api.copy import CopyAnswer, CopyOrder
from pollux.errors import InvalidValueError, PeerLostError
from pollux.server_address import ServerAddress
from pollux.train.copies import Copies
from pollux.train.state import FlatState
from pollux.train.state_transfer import Offer, Snapshot, fetch, take_snapshot
from tests.unit.train.processes import FOLDER, Rows, a_run, replicas

SECRET = "0" * 64
WIDTH = 2290  # with Adam's two averages 63 MB
WAIT_S = 90.0


def snapshot_of(num_bytes: int = 10_000) -> Snapshot:
    return take_snapshot(
        FlatState({"a": torch.arange(num_bytes // 4, dtype=torch.float32)}, b"rest"), "model", ("x", 1)
    )


@pytest.fixture
def offered():
    """Makes offers at this machine; those that were not fetched end with the test."""
    made: list[Offer] = []

    def offer(snapshot: Snapshot) -> Offer:
        made.append(Offer(snapshot, SECRET, "127.0.0.1"))
        return made[-1]

    yield offer
    for one in made:
        one.close()


class OwnOrders(Copies):
    """Copies whose orders come from the test. What it would tell the server stands in ``told``."""

    def __init__(self) -> None:
        super().__init__(ServerAddress("http://127.0.0.1:9"), "token", "job", "study")
        self.told: list[object] = []
        self._is_over = True  # no thread asks a server

    def order(self, role: str, address: str = "", params: dict[str, float] | None = None) -> None:
        order = CopyOrder(id="c", role=role, secret=SECRET, source=7, address=address, params=params or {})  # type: ignore[arg-type]
        self._take(CopyAnswer(order=order))

    def _tell(self, news: object) -> None:
        self.told.append(news)


def meet(name: str, value: str | None = None) -> str:
    """Leave a word for the other job, or wait for one."""
    path = Path(os.environ["MEETING"]) / name
    if value is not None:
        path.with_suffix(".tmp").write_text(value)
        path.with_suffix(".tmp").rename(path)
        return value
    ends_at = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < ends_at, f"no {name} came"
        time.sleep(0.005)
    return path.read_text()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of weights and averages."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        averages = [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")]
        for tensor in (parameter.detach(), *averages):
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def job(meeting: str, source_width: int, target_width: int) -> dict[str, object]:
    """Rank 0 is the source's only replica; ranks 1 and 2 are those of the target."""
    os.environ["MEETING"] = meeting
    is_source = os.environ["RANK"] == "0"
    rank = 0 if is_source else int(os.environ["RANK"]) - 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "1" if is_source else "2"}
    os.environ |= {FOLDER: f"{meeting}/{'source' if is_source else 'target'}"}
    with a_run() as run:
        copies, width = OwnOrders(), source_width if is_source else target_width
        trial = run._trial
        trial.copies, trial.params = copies, {"lr": 0.01 if is_source else 0.5}
        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=run.param("lr", 1.0))
        loader = run.dataloader(Rows(64), batch_size=8, shuffle=True)
        wrapped, optimizer = run.prepare(model, optimizer)
        seen: dict[str, object] = {"heard": []}
        run.on_new_params(lambda: seen["heard"].append(run.param("lr", 1.0)))  # type: ignore[attr-defined]
        watch(run, "_snapshot" if is_source else "take", model, optimizer, seen)
        for number, _ in enumerate(steps(run, wrapped, optimizer, loader)):
            if number == 3:
                copies.order("source") if is_source else None
            if is_source and copies.told:
                meet("address", copies.told[0].offer.address)  # type: ignore[attr-defined]
                meet("over")
                return seen
            if number == 6 and not is_source and rank == 0:
                copies.order("target", meet("address"), {"lr": 0.02})
            if "after" in seen:
                seen |= {"lr": optimizer.param_groups[0]["lr"], "told": [str(one) for one in copies.told]}
                seen["took_s"] = None if trial.copied is None else trial.copied.took_s
                meet("over", "") if rank == 0 else None
                return seen
        raise AssertionError(f"nothing came: {seen}")


def watch(run, name, model, optimizer, seen):
    """Note what the state is before and after the session takes or gives a copy, and how long that takes."""
    copying = run._session._copying
    inner = getattr(copying, name)

    def called(*args):
        seen["before"] = fingerprint(model, optimizer)
        begun = time.monotonic()
        found = inner(*args)
        seen["stalled_s"] = time.monotonic() - begun
        position = run._loader.elastic.epoch, run._loader.elastic.position
        seen["after"] = fingerprint(model, optimizer), run.num_steps, position
        return found

    setattr(copying, name, called)


def steps(run, wrapped, optimizer, loader):
    for _ in run.epochs(10_000):
        for _, x, y in loader:
            (wrapped(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def test_all_replicas_go_on_from_the_other_jobs_state_to_the_bit(tmp_path):
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    source, *targets = replicas(3, job, str(tmp_path), WIDTH, WIDTH)
    assert source["before"] != targets[0]["before"]
    for one in targets:
        assert one["after"] == source["after"]  # weights, averages, steps, place in the data
        assert one["heard"] == [0.02] and one["lr"] == pytest.approx(0.02)
    took_s = targets[0]["took_s"]
    print(f"63 MB: fetched and loaded in {took_s:.3f} s; stalled {targets[0]['stalled_s']:.3f} s", end=" ")
    print(f"(source {source['stalled_s']:.3f} s)")
    assert targets[0]["stalled_s"] < took_s  # 0.2 and 0.8 s beside ten busy processes; the bits are the test


def test_a_state_of_another_model_is_refused_and_changes_nothing(tmp_path):
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    _, *targets = replicas(3, job, str(tmp_path), 8, 9)
    for one in targets:
        assert one["after"][0] == one["before"] and one["heard"] == [] and one["lr"] == 0.5
    assert "another model or optimizer" in targets[0]["told"][0]


def attended(copies: OwnOrders, progress: float) -> None:
    """A step of a run whose state is as many numbers as it has done thousandths of its work."""
    copies.attend(None, True, progress, lambda: snapshot_of(4 * round(1000 * progress)))


def test_the_state_at_a_share_of_the_work_is_kept_and_offered_later():
    copies = OwnOrders()
    copies._own_host = lambda: "127.0.0.1"  # type: ignore[method-assign]
    copies._take(CopyAnswer(order=CopyOrder(id="k", role="keep", source=7, at=0.5)))
    for progress in (0.3, 0.499, 0.501, 0.502, 0.9):
        attended(copies, progress)
    copies._take(CopyAnswer(order=CopyOrder(id="c", role="source", secret=SECRET, source=7, at=0.5)))
    attended(copies, 0.91)
    (news,) = copies.told
    found = fetch(news.offer.address, SECRET, 1 << 20)  # type: ignore[attr-defined]
    assert len(found.flat.tensors["a"]) == 501  # at the first step past it, whatever was trained since
    copies.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_state_that_was_not_kept_in_time_is_not_offered(is_told):
    """The run went on from a checkpoint behind that share, or did not hear of it."""
    copies = OwnOrders()
    if is_told:
        copies._take(CopyAnswer(order=CopyOrder(id="k", role="keep", source=7, at=0.5)))
    for progress in (0.6, 0.7):
        attended(copies, progress)
    copies._take(CopyAnswer(order=CopyOrder(id="c", role="source", secret=SECRET, source=7, at=0.5)))
    attended(copies, 0.8)
    (news,) = copies.told
    assert "no state at 50%" in news.problem.message  # type: ignore[attr-defined]


# --- the transfer ---------------------------------------------------------------------------------------------------


def test_a_state_is_fetched_by_the_one_that_knows_the_secret(offered):
    snapshot = snapshot_of()
    offer = offered(snapshot)
    with pytest.raises(PeerLostError, match="did not arrive"):
        fetch(offer.address, "1" * 64, 1 << 20)
    found = fetch(offer.address, SECRET, 1 << 20)
    assert torch.equal(found.flat.tensors["a"], snapshot.flat.tensors["a"])
    assert (found.flat.blob, found.signature, found.identity) == (b"rest", "model", ("x", 1))
    with pytest.raises(PeerLostError):  # once
        fetch(offer.address, SECRET, 1 << 20)


def test_a_state_that_is_too_large_is_refused(offered):
    offer = offered(snapshot_of(1 << 20))
    with pytest.raises(InvalidValueError, match="at most 1000 are allowed"):
        fetch(offer.address, SECRET, 1000)


@pytest.mark.parametrize("num_bytes", [40, 200, 5_000, 5_000_000])
def test_a_source_that_dies_in_the_middle_leaves_nothing(offered, num_bytes):
    """A relay that cuts the connection after so many bytes, as the kernel does when a process is killed."""
    offer = offered(snapshot_of(20 << 20))
    with cut_after(num_bytes, offer.address) as address, pytest.raises(PeerLostError, match="did not arrive"):
        fetch(address, SECRET, 1 << 30)


def test_a_changed_byte_is_noticed(offered):
    offer = offered(snapshot_of(1 << 20))
    with cut_after(1 << 30, offer.address, flips=500_000) as address, pytest.raises(PeerLostError, match="wrong tag"):
        fetch(address, SECRET, 1 << 30)


@contextmanager
def cut_after(num_bytes: int, address: str, flips: int = -1) -> Iterator[str]:
    """A way to ``address`` that ends after so many bytes from there; the one at ``flips`` arrives changed."""
    host, _, port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def relay() -> None:
            near, _ = server.accept()
            far = socket.create_connection((host, int(port)))
            threading.Thread(target=pump, args=(near, far), daemon=True).start()
            at = 0
            with near, far:
                while at < num_bytes and (data := bytearray(far.recv(min(1 << 16, num_bytes - at)))):
                    if at <= flips < at + len(data):
                        data[flips - at] ^= 1
                    at += len(data)
                    near.sendall(data)
                near.shutdown(socket.SHUT_RDWR)  # the other thread waits for it

        threading.Thread(target=lambda: suppressed(relay), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def pump(near: socket.socket, far: socket.socket) -> None:
    with suppress(OSError):
        while data := near.recv(1 << 16):
            far.sendall(data)


def suppressed(function: Callable[[], None]) -> None:
    with suppress(OSError):
        function()
