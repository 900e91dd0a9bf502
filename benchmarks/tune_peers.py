"""The same search as ``examples/digits_study.py`` by other tools, with trials of one slot each; for benchmarks/tune.py.

Each peer prints one JSON line for every epoch of every trial: seconds since the start, trial, value. Its workers have
imported torch and loaded the data before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BATCH = 32


def train_trial(params: dict[str, Any], epochs: int, ms: float, after_epoch: Callable[[int, float], bool]) -> None:
    """A plain loop: the same network, data, batch and emulated device. Stops when ``after_epoch`` says so."""
    import torch
    import torch.nn.functional as F
    from digits_study import build_model, load_data, validate

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build_model(int(params["width"]), float(params["dropout"]))
    data, test_data = load_data()
    images, labels = test_data.tensors
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(params["lr"]), momentum=float(params["momentum"]))
    for epoch in range(1, epochs + 1):
        for x, y in loader:
            time.sleep(0.02 + ms * len(x) / 1e3)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not after_epoch(epoch, validate(model, images, labels)[0]):
            return


def say(began: float, trial: int, value: float) -> None:
    line = json.dumps({"at": time.time() - began, "trial": trial, "value": value})
    os.write(1, f"{line}\n".encode())  # in one piece: several workers write


# Optuna ---------------------------------------------------------------------------------------


def optuna_worker(args: argparse.Namespace, url: str, index: int, gate: Any) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import optuna
    from digits_study import load_data

    load_data()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = seeded_by_trial(args.seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    study = optuna.load_study(study_name="s", storage=url, sampler=sampler, pruner=pruner)
    began = gate()

    def objective(trial: Any) -> float:
        params = {
            "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
            "momentum": trial.suggest_float("momentum", 0.5, 0.99),
            "width": trial.suggest_categorical("width", [8, 16, 32]),
            "dropout": trial.suggest_float("dropout", 0.0, 0.6),
        }
        last = [float("inf")]

        def after_epoch(epoch: int, value: float) -> bool:
            say(began, trial.number, value)
            last[0] = value
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
            return True

        train_trial(params, args.epochs, args.ms, after_epoch)
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


def run_ray(args: argparse.Namespace, folder: Path) -> None:
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    folders = (EXAMPLES, Path(__file__).parent, EXAMPLES.parent / "src")
    env = {"PYTHONPATH": ":".join(map(str, folders))}
    ray.init(
        address="local",  # never another program's
        num_cpus=args.slots,
        include_dashboard=False,
        runtime_env={"env_vars": env},
        log_to_driver=False,
    )

    def objective(config: dict[str, Any]) -> None:
        from tune_peers import train_trial as run

        def after_epoch(epoch: int, value: float) -> bool:
            tune.report({"val_loss": value, "epoch": epoch, "at": time.time()})
            return True

        run(config, args.epochs, args.ms, after_epoch)

    space = {
        "lr": tune.loguniform(1e-4, 1.0),
        "momentum": tune.uniform(0.5, 0.99),
        "width": tune.choice([8, 16, 32]),
        "dropout": tune.uniform(0.0, 0.6),
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
    results = tuner.fit()
    for number, result in enumerate(results):
        if (frame := result.metrics_dataframe) is not None:
            for _, row in frame.iterrows():
                print(json.dumps({"at": row["at"] - began, "trial": number, "value": row["val_loss"]}), flush=True)
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["optuna", "ray"])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--ms", type=float, default=3.0)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (run_optuna if args.peer == "optuna" else run_ray)(args, args.folder)


if __name__ == "__main__":
    main()
