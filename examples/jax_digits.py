"""Read handwritten digits with JAX: each process has its share of every batch.

python examples/jax_digits.py
paceline run -n 2 examples/jax_digits.py
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args()


def initial(key: jax.Array) -> list[dict[str, jax.Array]]:
    """The weights of a network with two layers."""
    sizes, keys = (64, 128, 10), jax.random.split(key, 2)
    return [
        {"weight": jax.random.normal(key, (inside, outside)) * inside**-0.5, "bias": jnp.zeros(outside)}
        for key, inside, outside in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def scores(layers: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ layers[0]["weight"] + layers[0]["bias"])
    return hidden @ layers[1]["weight"] + layers[1]["bias"]


def mean_loss(layers: list[dict[str, jax.Array]], images: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores(layers, images)), labels[:, None], axis=1)
    return -chosen.mean()  # over the batch of all processes


@jax.jit
def step(layers, velocity, images, labels, lr):
    """A step of SGD with momentum. The batch is split over the processes, so JAX sums gradients over them."""
    loss, gradients = jax.value_and_grad(mean_loss)(layers, images, labels)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - lr * v, layers, velocity), velocity, loss


@jax.jit
def accuracy(layers, images, labels):
    return (scores(layers, images).argmax(axis=1) == labels).mean()


def main() -> None:
    args = parse_args()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # a launcher has started this process
        jax.distributed.initialize()
    rank, processes = jax.process_index(), jax.process_count()
    mesh = jax.make_mesh((jax.device_count(),), ("batch",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("batch"))

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    layers = jax.jit(initial, out_shardings=everywhere)(jax.random.key(0))  # the same in all processes
    velocity = jax.tree.map(jnp.zeros_like, layers)

    order = np.random.default_rng(0)
    for epoch in range(args.epochs):
        steps = len(train) // args.batch_size
        for batch in order.permutation(train)[: steps * args.batch_size].reshape(steps, -1):
            mine = batch[rank::processes]
            shares = (jax.make_array_from_process_local_data(split, part[mine]) for part in (images, labels))
            layers, velocity, loss = step(layers, velocity, *shares, args.lr)
        right = float(accuracy(layers, images[test], labels[test]))
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {float(loss):.4f} test accuracy {right:.4f}", flush=True)


if __name__ == "__main__":
    main()
