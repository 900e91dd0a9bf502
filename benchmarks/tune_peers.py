"""The search of benchmarks/tune.py by other tools, with trials of one slot each, which train plain PyTorch at M0.

Each peer prints one JSON line when its clock starts, and one for every epoch of every trial: seconds since the start,
trial, value. Its workers have imported torch, loaded the data and made a step before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pollux.api.space import parse_parameter

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
BATCH = 32
SPACES = {
    "digits": ("lr=log:1e-4..1.0", "momentum=0.5..0.99", "width=choice:8,16,32", "dropout=0.0..0.6"),
    "gpt": ("lr=log:1e-4..3e-2", "beta2=0.9..0.999", "decay=log:1e-3..1.0", "width=choice:128,256"),
}
AfterEpoch = Callable[[int, float], bool]
TrainTrial = Callable[[Mapping[str, Any], AfterEpoch], None]


def load_task(args: argparse.Namespace) -> TrainTrial:
    """With its data loaded: trains a trial until ``after_epoch`` says that it is enough."""
    if args.task == "digits":
        return load_digits(args)
    import torch

    from tune_gpt import load, train_plain

    torch.set_num_threads(1)
    problem = load(args.data, torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.tiny)
    return lambda params, after_epoch: train_plain(problem, params, args, after_epoch)


def load_digits(args: argparse.Namespace) -> TrainTrial:
    import torch
    import torch.nn.functional as F
    from digits_study import build_model, load_data, validate

    data, test_data = load_data()
    images, labels = test_data.tensors
    torch.set_num_threads(1)

    def train_trial(params: Mapping[str, Any], after_epoch: AfterEpoch) -> None:
        """A plain loop: the same network, data, batch and emulated device."""
        torch.manual_seed(0)
        model = build_model(int(params["width"]), float(params["dropout"]))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=float(params["lr"]), momentum=float(params["momentum"]))
        for epoch in range(1, args.epochs + 1):
            for x, y in loader:
                time.sleep((args.emulate_launch + args.ms * len(x)) / 1e3)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not after_epoch(epoch, validate(model, images, labels)[0]):
                return

    return train_trial


def warm_up(args: argparse.Namespace) -> None:
    """A short trial: the first steps load what an optimizer and the device need, which takes seconds."""
    shortest = argparse.Namespace(**{**vars(args), "steps": 20, "epochs": 1, "ms": 0.0, "emulate_launch": 0.0})
    params = {"lr": 1e-3, "beta2": 0.99, "decay": 0.1, "width": 8 if args.task == "digits" else 128}
    load_task(shortest)({**params, "momentum": 0.9, "dropout": 0.0}, lambda *_: False)


def suggest(trial: Any, task: str) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for one in map(parse_parameter, SPACES[task]):
        if one.kind == "choice":
            params[one.name] = trial.suggest_categorical(one.name, list(one.choices))
        else:
            params[one.name] = trial.suggest_float(one.name, one.low, one.high, log=one.is_log)
    return params


def say(began: float, trial: int, value: float) -> None:
    line = json.dumps({"at": time.time() - began, "trial": trial, "value": value})
    os.write(1, f"{line}\n".encode())  # in one piece: several workers write


# Optuna ---------------------------------------------------------------------------------------


def optuna_worker(args: argparse.Namespace, url: str, index: int, gate: Any) -> None:
    sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]
    import optuna

    train_trial = load_task(args)
    warm_up(args)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = seeded_by_trial(args.seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.load_study(study_name="s", storage=url, sampler=sampler, pruner=pruner)
    began = gate()
    if index == 0:
        print(json.dumps({"began": began}), flush=True)

    def objective(trial: Any) -> float:
        last = [float("inf")]

        def after_epoch(epoch: int, value: float) -> bool:
            say(began, trial.number, value)
            last[0] = value
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
            return True

        train_trial(suggest(trial, args.task), after_epoch)
        return last[0]

    done = optuna.study.MaxTrialsCallback(args.trials, states=None)
    study.optimize(objective, callbacks=[done], n_trials=args.trials)


def seeded_by_trial(seed: int) -> Any:
    """TPE as a study of Pollux has it: trial k draws with the same seed there and here."""
    import optuna

    class Sampler(optuna.samplers.TPESampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
            settings = {"multivariate": True, "group": True, "constant_liar": True}
            self.__init__(seed=(seed * 1_000_003 + trial.number) % 2**31, **settings)  # type: ignore[misc]
            return super().infer_relative_search_space(study, trial)

    return Sampler(seed=seed, multivariate=True, group=True, constant_liar=True)


class Gate:
    """All workers begin when all are there."""

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier

    def __call__(self) -> float:
        self._barrier.wait(120)
        return time.time()


def run_optuna(args: argparse.Namespace, folder: Path) -> None:
    import optuna

    url = f"sqlite:///{folder / 'optuna.db'}"
    optuna.create_study(study_name="s", storage=url)
    context = multiprocessing.get_context("spawn")
    gate = Gate(context.Barrier(args.slots))
    workers = [context.Process(target=optuna_worker, args=(args, url, index, gate)) for index in range(args.slots)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(args.timeout)
        if worker.is_alive():
            worker.kill()


# Ray Tune -------------------------------------------------------------------------------------


READY: list[tuple[TrainTrial, float]] = []  # of this process


def ray_worker(args: argparse.Namespace) -> tuple[TrainTrial, float]:
    """In a worker, which is used for many trials: what trains one, and when that was first ready."""
    if not READY:
        train_trial = load_task(args)
        warm_up(args)
        READY.append((train_trial, time.time()))
    return READY[0]


def run_ray(args: argparse.Namespace, folder: Path) -> None:
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    folders = (EXAMPLES, Path(__file__).parent, ROOT / "src")
    env = {"PYTHONPATH": ":".join(map(str, folders))}
    ray.init(
        address="local",  # never another program's
        num_cpus=args.slots,
        include_dashboard=False,
        runtime_env={"env_vars": env},
        log_to_driver=False,
    )

    def objective(config: dict[str, Any]) -> None:
        import tune_peers

        train_trial, ready_at = tune_peers.ray_worker(args)

        def after_epoch(epoch: int, value: float) -> bool:
            tune.report({"val_loss": value, "epoch": epoch, "at": time.time(), "ready_at": ready_at})
            return True

        train_trial(config, after_epoch)

    space = {
        one.name: tune.choice(list(one.choices))
        if one.kind == "choice"
        else (tune.loguniform if one.is_log else tune.uniform)(one.low, one.high)
        for one in map(parse_parameter, SPACES[args.task])
    }
    scheduler = ASHAScheduler(time_attr="epoch", max_t=args.epochs, grace_period=1, reduction_factor=3)
    search = ConcurrencyLimiter(OptunaSearch(seed=args.seed), max_concurrent=args.slots)
    settings = tune.TuneConfig(
        metric="val_loss",
        mode="min",
        num_samples=args.trials,
        scheduler=scheduler,
        search_alg=search,
        reuse_actors=True,  # saves a process for each trial
    )
    run_settings = tune.RunConfig(storage_path=str(folder / "ray"), verbose=0)
    tuner = tune.Tuner(
        tune.with_resources(objective, {"cpu": 1}), param_space=space, tune_config=settings, run_config=run_settings
    )
    began = time.time()
    print(json.dumps({"began": began}), flush=True)
    frames = [(number, one.metrics_dataframe) for number, one in enumerate(tuner.fit())]
    known = [(number, frame) for number, frame in frames if frame is not None]
    ready = sorted({float(at) for _, frame in known for at in frame["ready_at"]})
    began = max([began, *ready[: args.slots]])  # when the last of the first workers was ready
    for number, frame in known:
        for _, row in frame.iterrows():
            print(json.dumps({"at": row["at"] - began, "trial": number, "value": row["val_loss"]}), flush=True)
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["optuna", "ray"])
    parser.add_argument("--task", choices=list(SPACES), default="digits")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--emulate-device", dest="ms", type=float, default=3.0)
    parser.add_argument("--emulate-launch", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (run_optuna if args.peer == "optuna" else run_ray)(args, args.folder)


if __name__ == "__main__":
    main()
