"""Sharded models (FSDP2): resized in place, killed, saved and resumed, with the values of unsharded training."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pollux.errors import PeerLostError
from pollux.train import shards, team
from pollux.train.adaptation import Adaptation
from pollux.train.leaving import Leave
from pollux.train.session import Session
from pollux.train.sharded_gradients import ShardedGradients
from tests.long import long
from tests.unit.train.planned import PlannedMembership
from tests.unit.train.processes import Rows, a_run, loss_of, refusal, small_model
from tests.unit.train.processes import replicas as replicas_of

BATCH, STEPS = 12, 12
TOLERANCE = 1e-6  # of single-precision sums in another order, over 12 steps of AdamW

Plan = list[tuple[int | None, list[int]]]

replicas = partial(replicas_of, timeout_s=240.0)  # new replicas start and compile while others wait


class Model(nn.Module):
    """Rows that no number of replicas divides, a tied weight, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 7)])
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.layers[1].weight
        self.head = nn.Linear(5, 1)
        self.layers[2].bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.tied(x).tanh() * self.scale.to(x.dtype))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    assert isinstance(model, Model)
    fully_shard(model.layers[0], mesh=mesh, **options)
    fully_shard(model.layers[2], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def shard_mixed(model: nn.Module, mesh: DeviceMesh) -> None:
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def made(seed: int = 0, kind: str = "AdamW") -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": 0.02} if kind == "AdamW" else {"lr": 0.02, "momentum": 0.9}
    return model, getattr(torch.optim, kind)(trained, **options)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and the optimizer's moments, whole."""
    values = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name}.{key}"] = whole(value).clone()
    return values


def unsharded(kind: str = "AdamW", num_steps: int = STEPS) -> dict[str, Tensor]:
    """The same steps in plain PyTorch."""
    model, optimizer = made(kind=kind)
    data = Rows(BATCH * num_steps)
    for first in range(0, len(data), BATCH):
        optimizer.zero_grad()
        loss_of(model, data.inputs[first : first + BATCH], data.targets[first : first + BATCH]).backward()
        optimizer.step()
    return values_of(model, optimizer)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def train_planned(folder: Path, plan: Plan, dies_at: tuple[int, int] | None = None, **options: Any) -> Any:
    """Train through the plan, noting every step's examples; the values at the end, None on a replica that left.

    ``dies_at``: (process, step) that kills itself between that step's forward and backward pass.
    """
    team.FORM_TIMEOUT_S = 60.0
    membership = PlannedMembership(plan)
    is_first = membership.me == plan[0][1][0]
    model, optimizer = made(0 if is_first else 1 + membership.me, options.pop("kind", "AdamW"))
    device_batch, copies, how = options.pop("device_batch", None), options.pop("copies", 1), options.pop("how", "")
    if how == "compiled":
        model.layers[0].compile(backend="aot_eager")
    max_norm = options.pop("max_norm", None)
    with (
        a_run(**{"membership": membership, "timeout_s": 120.0, **options}) as run,
        open(folder / f"seen-{membership.me}", "a") as notes,
    ):
        membership.num_steps = lambda: run.num_steps
        loader = run.dataloader(Rows(BATCH * STEPS), BATCH, device_batch_size=device_batch)
        function = shard_mixed if how == "mixed" else shard
        prepared, _ = run.prepare(model, optimizer, shard=function, shard_copies=copies)
        try:
            for _ in run.epochs(1):
                for index, x, y in loader:
                    step, generation = run.num_steps, run.generation
                    loss = loss_of(prepared, x, y)
                    if dies_at == (membership.me, step):
                        os.kill(os.getpid(), signal.SIGKILL)
                    loss.backward()
                    if max_norm is not None:
                        run.clip_grad_norm_(max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    notes.write(json.dumps([step, generation, index.tolist()]) + "\n")
                    notes.flush()
        except Leave:
            return None
        return values_of(model, optimizer)


def consumed(folder: Path) -> Counter[int]:
    """The examples of all steps. A step that was repeated after a loss counts in its last generation."""
    by_step: dict[int, dict[int, list[int]]] = {}
    for path in folder.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, generation, indices = json.loads(line)
            by_step.setdefault(step, {}).setdefault(generation, []).extend(indices)
    return Counter(index for one in by_step.values() for index in one[max(one)])


def check(folder: Path, results: list[Any], reference: dict[str, Tensor]) -> None:
    finished = [values for values in results if values is not None]
    assert finished
    for values in finished:
        assert difference(values, reference) < TOLERANCE
    assert consumed(folder) == Counter(range(BATCH * STEPS))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([(0, [0]), (3, [0, 1]), (6, [0, 1, 2, 3]), (9, [0])], id="1-2-4-1", marks=long),
        pytest.param([(0, [0, 1]), (3, [2, 0, 1]), (5, [1, 2, 3]), (8, [3])], id="2-3-3-1"),
    ],
)
def test_resizes_in_place_give_the_values_of_unsharded_training(tmp_path: Path, plan: Plan) -> None:
    check(tmp_path, replicas(4, train_planned, tmp_path, plan), unsharded())


def train_with(options: dict[str, Any], *args: Any) -> Any:
    return train_planned(*args, **options)


@long
def test_accumulated_steps_and_momentum_are_resized_too(tmp_path: Path) -> None:
    plan: Plan = [(0, [0, 1]), (4, [0, 1, 2]), (8, [0])]
    options = {"kind": "SGD", "device_batch": (1, 3)}
    check(tmp_path, replicas(3, train_with, options, tmp_path, plan), unsharded("SGD"))


@long
def test_a_lost_shard_comes_back_from_the_last_checkpoint(tmp_path: Path) -> None:
    plan: Plan = [(0, [0, 1, 2]), (None, [0, 1]), (10, [0, 1, 3])]
    options = {"checkpoint_dir": tmp_path / "checkpoints", "checkpoint_every_s": 1e-6}
    results = replicas(4, train_with, options, tmp_path, plan, (2, 7), killed=[2])
    check(tmp_path, results, unsharded())
    steps = [json.loads(line)[:2] for line in (tmp_path / "seen-0").read_text().splitlines()]
    assert sum(step == 7 for step, _ in steps) == 2 and [6, 1] not in steps  # one step was repeated, and no more
    files = sorted(path.name for path in max((tmp_path / "checkpoints").glob("step-*")).iterdir())
    assert files == ["manifest.json", *(f"shard-0000{i}-of-00003.safetensors" for i in range(3)), "tensors.safetensors"]


def test_a_lost_shard_comes_back_from_its_copy(tmp_path: Path) -> None:
    plan: Plan = [(0, [0, 1, 2, 3]), (None, [0, 1, 2]), (9, [0, 1])]
    results = replicas(4, train_with, {"copies": 2}, tmp_path, plan, (3, 5), killed=[3])
    check(tmp_path, results, unsharded())


def train_and_die_between_copies(folder: Path, plan: Plan, dies_at: int) -> Any:
    """Process 3 kills itself when all of a step's gradients are summed with its shard's group, but not with its copy.

    Without an agreement, the replicas of one shard would make the step, and that of the other would not.
    """
    if os.environ["RANK"] == "3":
        original, calls = ShardedGradients._complete, Counter[str]()

        def complete(self: ShardedGradients, *args: Any) -> None:
            calls["all"] += 1
            if calls["all"] == dies_at * len(self._groups) + len(self._groups):
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, *args)

        ShardedGradients._complete = complete  # type: ignore[method-assign]
    return train_planned(folder, plan, copies=2)


def test_replicas_with_copies_make_a_step_all_or_none(tmp_path: Path) -> None:
    plan: Plan = [(0, [0, 1, 2, 3]), (None, [0, 1, 2])]
    results = replicas(4, train_and_die_between_copies, tmp_path, plan, 5, killed=[3])
    check(tmp_path, results, unsharded())


def train_and_lose_a_norm(folder: Path, plan: Plan, dies_at: int) -> Any:
    """Process 3 is lost while gradients are clipped, and process 1 alone does not have their norm."""
    original, calls = ShardedGradients.clip, Counter[str]()

    def clip(self: ShardedGradients, max_norm: float) -> Tensor:
        calls["all"] += 1
        if calls["all"] == dies_at and os.environ["RANK"] in ("1", "3"):
            original(self, max_norm)
            if os.environ["RANK"] == "3":
                os.kill(os.getpid(), signal.SIGKILL)
            self.failure = PeerLostError("the sum of the norms was cut short")
        return original(self, max_norm) if self.failure is None else torch.zeros(())

    ShardedGradients.clip = clip  # type: ignore[method-assign]
    return train_planned(folder, plan, copies=2, max_norm=1e9)


@long
def test_replicas_with_copies_agree_after_gradients_were_clipped(tmp_path: Path) -> None:
    plan: Plan = [(0, [0, 1, 2, 3]), (None, [0, 1, 2])]
    results = replicas(4, train_and_lose_a_norm, tmp_path, plan, 5, killed=[3])
    check(tmp_path, results, unsharded())


# --- checkpoints -----------------------------------------------------------------------------------------------------


def train_some(folder: Path, until: int) -> dict[str, Tensor] | None:
    """As torchrun starts it: resumes from the folder, and leaves at a signal in step ``until``."""
    model, optimizer = made()
    with a_run(checkpoint_dir=folder / "checkpoints") as run, open(folder / f"seen-{run.rank}-{until}", "w") as notes:
        loader = run.dataloader(Rows(BATCH * STEPS), BATCH)
        prepared, _ = run.prepare(model, optimizer, shard=shard)
        try:
            for _ in run.epochs(1):
                for index, x, y in loader:
                    notes.write(json.dumps([run.num_steps, 0, index.tolist()]) + "\n")
                    loss_of(prepared, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if run.num_steps + 1 == until and run.rank == 0:
                        os.kill(os.getpid(), signal.SIGUSR1)
        except Leave:
            return None
        return values_of(model, optimizer)


@long
def test_a_checkpoint_is_resumed_by_any_number_of_replicas(tmp_path: Path) -> None:
    for num_replicas, until in ((2, 4), (3, 7), (1, 9)):
        assert replicas(num_replicas, train_some, tmp_path, until) == [None] * num_replicas
    check(tmp_path, replicas(2, train_some, tmp_path, STEPS + 1), unsharded())


def train_an_epoch(folder: str) -> dict[str, Tensor]:
    model, optimizer = made()
    with a_run(checkpoint_dir=folder) as run:
        loader = run.dataloader(Rows(16), 8)
        prepared, _ = run.prepare(model, optimizer, shard=shard, scaling="none")
        for _ in run.epochs(1):
            for _, x, y in loader:
                loss_of(prepared, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return values_of(model, optimizer)


@long
def test_a_run_that_is_resumed_after_its_last_step_saves_what_it_loaded(tmp_path: Path) -> None:
    first, _ = replicas_of(2, train_an_epoch, str(tmp_path))
    again, _ = replicas_of(2, train_an_epoch, str(tmp_path))  # it makes no step, and saves all the same
    assert difference(first, again) == 0.0


@long
def test_a_damaged_shard_makes_all_use_the_checkpoint_before(tmp_path: Path) -> None:
    for until in (4, 7):
        replicas(2, train_some, tmp_path, until)
    path = max((tmp_path / "checkpoints").glob("step-*")) / "shard-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    for old in tmp_path.glob("seen-*-7"):
        old.unlink()
    check(tmp_path, replicas(3, train_some, tmp_path, STEPS + 1), unsharded())


# --- memory ----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those that operations inside have touched."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: one for key, one in self.storages.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


WIDTH, LAYERS = 64, 8


def big_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def shard_big(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_and_weigh(plan: Plan) -> tuple[list[int], bool]:
    """The most memory in each hand-over; and whether the model that the script built is gone."""
    team.FORM_TIMEOUT_S = 60.0
    shards.BUNDLE_BYTES = WIDTH * WIDTH * 4  # one tensor at a time
    membership = PlannedMembership(plan)
    peaks: list[int] = []

    def weighed(name: str) -> None:
        original = getattr(Session, name)

        def call(self: Session, *args: Any) -> Any:
            with Live() as live:
                try:
                    return original(self, *args)
                finally:
                    peaks.append(live.peak)

        setattr(Session, name, call)

    weighed("_resize")
    if membership.me not in plan[0][1]:
        weighed("start")
    model = big_model()
    built = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    with a_run(membership=membership, timeout_s=120.0) as run:
        membership.num_steps = lambda: run.num_steps
        loader = run.dataloader(Rows(4 * 8, WIDTH), 4)
        prepared, _ = run.prepare(model, optimizer, shard=shard_big)
        try:
            for _ in run.epochs(1):
                for _, x, _ in loader:
                    prepared(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except Leave:
            pass
        return peaks, all(one.expired() for one in built)


def test_no_replica_ever_holds_the_whole_state() -> None:
    plan: Plan = [(0, [0, 1, 2]), (2, [0, 1, 2, 3]), (4, [3, 0])]
    parameters = WIDTH * WIDTH * LAYERS * 4
    whole_state = 3 * parameters  # AdamW keeps two moments
    for peaks, is_gone in replicas(4, train_and_weigh, plan):
        assert peaks and is_gone
        # The old shard, the new one, and some copies of a tensor on its way. A gathered state would be all of it.
        assert max(peaks) < 0.95 * whole_state, [peak / whole_state for peak in peaks]


# --- noise scale -----------------------------------------------------------------------------------------------------


def measure(
    kind: str, is_sharded: bool, device_batch: int | None, copies: int = 1, num_epochs: int = 3
) -> tuple[float, float]:
    """The noise scale and its standard error after 180 small steps."""
    Adaptation.interval = lambda self: 1  # type: ignore[method-assign]  # by time otherwise
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"shard": shard_big_enough, "shard_copies": copies} if is_sharded else {}
    with a_run() as run:
        loader = run.dataloader(Rows(960), 16, device_batch_size=device_batch, shuffle=True)
        prepared, _ = run.prepare(model, optimizer, **options)
        for _ in run.epochs(num_epochs):
            for _, x, y in loader:
                loss_of(prepared, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return run.noise_scale, run.noise_scale_error


def shard_big_enough(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model[2], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)


def test_in_adams_metric_a_whole_copy_measures_what_a_replicated_model_does() -> None:
    plain = replicas(2, measure, "AdamW", False, None, 1, 1)
    copied = replicas(2, measure, "AdamW", True, None, 2, 1)
    assert copied[0] == pytest.approx(plain[0], rel=1e-3)


@pytest.mark.parametrize(
    ("num_replicas", "device_batch", "copies"),
    [(2, None, 1), *(pytest.param(*case, marks=long) for case in [(3, 4, 1), (1, 4, 1), (4, None, 2)])],
)
@long
def test_the_noise_scale_is_that_of_a_replicated_model(num_replicas: int, device_batch: int, copies: int) -> None:
    plain = replicas(num_replicas, measure, "SGD", False, device_batch)[0]
    same = replicas(num_replicas, measure, "SGD", True, device_batch, copies)
    assert same == [same[0]] * num_replicas
    assert same[0] == pytest.approx(plain, rel=1e-3)  # the same norms: a replica sees its whole gradient
    phi, error = replicas(num_replicas, measure, "AdamW", False, device_batch)[0]
    sharded = replicas(num_replicas, measure, "AdamW", True, device_batch, copies)[0]
    assert 0 < sharded[1] < sharded[0] / 2  # it tells something
    assert abs(sharded[0] - phi) < 3 * (sharded[1] ** 2 + error**2) ** 0.5


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "tolerance"), [("mixed", 0.05), ("compiled", TOLERANCE)])
@long
def test_compiled_layers_and_mixed_precision_are_resized_too(tmp_path: Path, how: str, tolerance: float) -> None:
    plan: Plan = [(0, [0]), (3, [0, 1]), (8, [1])]
    results = [one for one in replicas(2, train_with, {"how": how}, tmp_path, plan) if one is not None]
    assert len(results) == 1
    assert all(value.dtype == torch.float32 for value in results[0].values())
    assert difference(results[0], unsharded()) < tolerance
    assert consumed(tmp_path) == Counter(range(BATCH * STEPS))


def clip(is_sharded: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = made(kind="SGD")
    norms = []
    with a_run() as run:
        loader = run.dataloader(Rows(BATCH * 4), BATCH)
        prepared, _ = run.prepare(model, optimizer, **({"shard": shard} if is_sharded else {}))
        for _ in run.epochs(1):
            for _, x, y in loader:
                loss_of(prepared, x, y).backward()
                norms.append(float(run.clip_grad_norm_(0.05)))
                optimizer.step()
                optimizer.zero_grad()
        return norms, values_of(model, optimizer)


@long
def test_gradients_are_clipped_by_their_norm_over_all_shards() -> None:
    (norms, values), (sharded_norms, sharded_values) = replicas(2, clip, False)[0], replicas(2, clip, True)[1]
    assert min(norms) > 0.05
    assert sharded_norms == pytest.approx(norms, rel=1e-5)
    assert difference(values, sharded_values) < TOLERANCE


def refuse() -> dict[str, str]:
    """What run.prepare, or the loop's start, says to things that cannot be sharded or resized."""
    heard: dict[str, str] = {}

    def hear(name: str, **options: Any) -> None:
        torch.manual_seed(0)
        model = options.pop("model", None) or small_model()
        kind = options.pop("kind", "AdamW")
        directory = options.pop("directory", None)
        with a_run(checkpoint_dir=directory) as run:
            if name == "sharded before":
                model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            optimizer = getattr(torch.optim, kind)([one for one in model.parameters() if one.dim()])
            loader = run.dataloader(Rows(24), 6)

            def start() -> None:
                given = (model, model) if name == "two models" else model
                run.prepare(given, optimizer, **options)
                next(iter(loader))

            heard[name] = refusal(start)

    def root(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
        fully_shard(model, mesh=mesh, **options)

    hear("sharded before")
    hear("two models", shard=root)
    hear("no function", shard=True)
    hear("a part", shard=lambda model, mesh: fully_shard(model[0], mesh=mesh))
    hear("optimizer", shard=root, kind="LBFGS")
    hear("offload", shard=partial(root, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    hear("columns", shard=_by_columns)
    hear("DDP option", shard=root, bucket_cap_mb=1)
    hear("loss scale", shard=root, grad_scaler=torch.amp.GradScaler("cpu"))
    hear("copies alone", shard_copies=2)
    hear("no copies", shard=root, shard_copies=0)
    hear("URL", shard=root, directory="memory://checkpoints")
    hear("no values", shard=root, model=nn.Linear(6, 1, device="meta"))
    number = nn.Linear(6, 1)
    number.gain = nn.Parameter(torch.tensor(1.0))
    hear("a number", shard=root, model=number)
    return heard


def _by_columns(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Shard(one.dim() - 1) if one.numel() == 48 else None)


def test_what_cannot_be_sharded_is_refused_on_every_rank_before_the_first_step() -> None:
    results = replicas(2, refuse)
    assert results[0] == results[1]
    for name, part in {
        "sharded before": "run.prepare(model, optimizer, shard=",
        "two models": "one torch.nn.Module",
        "no function": "a function of the model and a mesh",
        "a part": "'2.weight' is not sharded",
        "optimizer": "LBFGS cannot train a sharded model",
        "offload": "CPUOffloadPolicy is not supported",
        "columns": "only Shard(0)",
        "DDP option": "'bucket_cap_mb'",
        "loss scale": "bfloat16",
        "copies alone": "pass shard= too",
        "no copies": "shard_copies is 0",
        "URL": "a file system that all nodes share",
        "no values": "'weight' is on the meta device",
        "a number": "'gain' is a single number",
    }.items():
        assert part in results[0][name], (name, results[0][name])
