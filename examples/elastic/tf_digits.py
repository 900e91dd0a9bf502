"""Handwritten digits with TensorFlow, data-parallel over processes, resized by restart. Needs also scikit-learn."""

import argparse
import functools
import itertools
import json
import os
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from pollux import elastic


class Network(tf.Module):
    def __init__(self, seed: int, sizes: tuple[int, ...] = (64, 128, 64, 10)) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.layers = [
            (
                tf.Variable(random.normal(size=(n, m), scale=(2 / n) ** 0.5).astype("float32")),
                tf.Variable(tf.zeros(m)),
            )
            for n, m in itertools.pairwise(sizes)
        ]
        self.velocity = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]

    @property
    def weights(self) -> list[tf.Variable]:
        return [variable for layer in self.layers for variable in layer]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        for matrix, bias in self.layers[:-1]:
            x = tf.nn.relu(x @ matrix + bias)
        return x @ self.layers[-1][0] + self.layers[-1][1]


def gradient_of(network: Network, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, network(x)))
    return loss, tape.gradient(loss, network.weights)


def sqr_norm(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(tensor * tensor) for tensor in tensors])


def replica_step(network: Network, x: tf.Tensor, y: tf.Tensor, rate: tf.Tensor, momentum: float = 0.9):
    """One step on one replica. The gradients of the parts, before they are averaged, tell the noise scale."""
    context = tf.distribute.get_replica_context()
    size = context.num_replicas_in_sync
    half = len(x) // 2
    parts = [(x[:half], y[:half]), (x[half:], y[half:])] if size == 1 else [(x, y)]
    found = [gradient_of(network, *part) for part in parts]
    small = tf.add_n([sqr_norm(gradient) for _, gradient in found]) / len(parts)
    loss = tf.add_n([loss for loss, _ in found]) / len(parts)
    mean = [tf.add_n(list(same)) / len(parts) for same in zip(*(gradient for _, gradient in found), strict=True)]
    *mean, small, loss = context.all_reduce(tf.distribute.ReduceOp.MEAN, [*mean, small, loss])
    for weight, velocity, gradient in zip(network.weights, network.velocity, mean, strict=True):
        velocity.assign(momentum * velocity + gradient)
        weight.assign_sub(rate * velocity)
    return loss, small, sqr_norm(mean)


def make_strategy(job: elastic.Job) -> tf.distribute.Strategy:
    if job.size == 1:
        return tf.distribute.get_strategy()
    task = {"type": "worker", "index": job.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": job.addresses()}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    job.listen()  # TensorFlow's cluster takes SIGTERM for itself
    return strategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--emulate-device", metavar="MS", dest="ms", type=float, default=0.0, help="wait per example")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    with elastic.join(
        batch_size=args.batch_size,
        max_batch_size=args.max_batch_size,
        device_batch_size=(2, 256),
        total_examples=args.epochs * len(x),
    ) as job:
        strategy = make_strategy(job)
        with strategy.scope():
            network = Network(args.seed)
        variables = [*network.weights, *network.velocity]
        checkpoint = None if job.directory is None else job.directory / "digits.npz"
        if checkpoint is not None and checkpoint.exists():
            saved = np.load(checkpoint)
            for number, variable in enumerate(variables):
                variable.assign(saved[str(number)])
            job.load_state_dict(json.loads(str(saved["job"])))
        print(f"rank {job.rank} of {job.size}: from step {job.num_steps}, batch {job.batch.total}", flush=True)

        def save() -> None:
            if job.rank == 0 and checkpoint is not None:
                arrays = {str(number): variable.numpy() for number, variable in enumerate(variables)}
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{checkpoint}.new", "wb") as file:
                    np.savez(file, job=json.dumps(job.state_dict()), **arrays)
                os.replace(f"{checkpoint}.new", checkpoint)

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor, rate: tf.Tensor):
            told = strategy.run(replica_step, (network, x, y, rate))
            return [strategy.experimental_local_results(value)[0] for value in told]

        @functools.cache
        def order_of(epoch: int) -> np.ndarray:
            return np.random.default_rng((args.seed, epoch)).permutation(len(x))

        saved_at = time.monotonic()
        while not job.is_done:
            chosen = [order_of(position // len(x))[position % len(x)] for position in job.positions]
            time.sleep(args.ms * len(chosen) / 1e3)
            rate = tf.constant(0.02 * job.gain, tf.float32)
            loss, small, large = (float(value) for value in step(x[chosen], y[chosen], rate))
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
        accuracy = float((network(x_test).numpy().argmax(1) == y_test).mean())
        job.log(accuracy=accuracy)
        if job.rank == 0:
            print(f"test accuracy {accuracy:.2%} after {job.num_steps} steps", flush=True)


if __name__ == "__main__":
    main()
