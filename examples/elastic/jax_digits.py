"""Handwritten digits with JAX, data-parallel over processes, resized by restart. Needs jax and scikit-learn."""

import argparse
import functools
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from pollux import elastic

Weights = list[tuple[jax.Array, jax.Array]]


def init_weights(seed: int, sizes: tuple[int, ...] = (64, 128, 64, 10)) -> Weights:
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    shapes = zip(keys, sizes, sizes[1:], strict=False)
    return [(jax.random.normal(key, (n, m)) * jnp.sqrt(2 / n), jnp.zeros(m)) for key, n, m in shapes]


def predict(weights: Weights, x: jax.Array) -> jax.Array:
    for matrix, bias in weights[:-1]:
        x = jax.nn.relu(x @ matrix + bias)
    return x @ weights[-1][0] + weights[-1][1]


def loss_of(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(predict(weights, x))[jnp.arange(len(y)), y])


def sqr_norm(tree: Weights) -> jax.Array:
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))


def make_step(num_replicas: int, momentum: float = 0.9):
    """One step on every replica. The gradients of the parts, before they are averaged, tell the noise scale."""
    num_parts = 2 if num_replicas == 1 else 1  # one replica alone compares two halves of its batch

    def step(weights: Weights, velocity: Weights, x: jax.Array, y: jax.Array, rate: jax.Array):
        parts = zip(jnp.array_split(x, num_parts), jnp.array_split(y, num_parts), strict=True)
        found = [jax.value_and_grad(loss_of)(weights, *part) for part in parts]
        small = sum(sqr_norm(gradient) for _, gradient in found) / num_parts
        gradient = jax.tree.map(lambda *leaves: sum(leaves) / num_parts, *(gradient for _, gradient in found))
        loss = sum(loss for loss, _ in found) / num_parts
        gradient, small, loss = jax.lax.pmean((gradient, small, loss), "replica")
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
        weights = jax.tree.map(lambda w, v: w - rate * v, weights, velocity)
        return weights, velocity, (loss, small, sqr_norm(gradient))

    mesh = jax.make_mesh((num_replicas,), ("replica",))
    own, same = PartitionSpec("replica"), PartitionSpec()
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(same, same, own, own, same), out_specs=(same, same, same), check_vma=False
    )
    return jax.jit(mapped), NamedSharding(mesh, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulate-device", metavar="MS", dest="ms", type=float, default=0.0, help="wait per example")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    jax.config.update("jax_enable_preemption_service", False)  # the job listens to SIGTERM itself
    with elastic.join(
        batch_size=args.batch_size,
        max_batch_size=args.max_batch_size,
        device_batch_size=(2, 256),
        total_examples=args.epochs * len(x),
    ) as job:
        if job.size > 1:
            jax.distributed.initialize(job.address, job.size, job.rank)
        step, sharding = make_step(job.size)
        weights = init_weights(args.seed)
        velocity = jax.tree.map(jnp.zeros_like, weights)
        checkpoint = None if job.directory is None else job.directory / "digits.npz"

        if checkpoint is not None and checkpoint.exists():
            saved = np.load(checkpoint)
            structure = jax.tree.structure((weights, velocity))
            weights, velocity = jax.tree.unflatten(structure, [saved[str(n)] for n in range(structure.num_leaves)])
            job.load_state_dict(json.loads(str(saved["job"])))
        print(f"rank {job.rank} of {job.size}: from step {job.num_steps}, batch {job.batch.total}", flush=True)

        def save() -> None:
            if job.rank == 0 and checkpoint is not None:
                leaves = {str(n): np.asarray(leaf) for n, leaf in enumerate(jax.tree.leaves((weights, velocity)))}
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{checkpoint}.new", "wb") as file:
                    np.savez(file, job=json.dumps(job.state_dict()), **leaves)
                os.replace(f"{checkpoint}.new", checkpoint)

        @functools.cache
        def order_of(epoch: int) -> np.ndarray:
            return np.random.default_rng((args.seed, epoch)).permutation(len(x))

        saved_at = time.monotonic()
        while not job.is_done:
            chosen = [order_of(position // len(x))[position % len(x)] for position in job.positions]
            time.sleep(args.ms * len(chosen) / 1e3)
            share = [jax.make_array_from_process_local_data(sharding, part[chosen]) for part in (x, y)]
            rate = 0.02 * job.gain
            weights, velocity, told = step(weights, velocity, *share, rate)
            loss, small, large = (float(value) for value in told)  # waits for the step
            small_batch = job.batch.share / (2 if job.size == 1 else 1)
            job.observe_noise(small_batch, small, job.batch.total, large)
            job.step(loss=loss)
            if job.should_leave():
                save()
                job.leave()
            if time.monotonic() - saved_at > 10:
                save()
                saved_at = time.monotonic()

        save()  # a job that is started once more must find that it is done
        local = jax.tree.map(np.asarray, weights)
        accuracy = float((np.asarray(predict(local, x_test)).argmax(1) == y_test).mean())
        job.log(accuracy=accuracy)
        if job.rank == 0:
            print(f"test accuracy {accuracy:.2%} after {job.num_steps} steps", flush=True)


if __name__ == "__main__":
    main()
