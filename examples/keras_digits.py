"""Read handwritten digits with Keras on JAX: each process trains on its share of the data.

python examples/keras_digits.py
paceline run -n 2 examples/keras_digits.py
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all processes together")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def load_data(rank: int, processes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """This process's share of the training and of the test digits; all shares are equally large."""
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    shares = [part[: len(part) // processes * processes][rank::processes] for part in (train, test)]
    return [(images[share], labels[share]) for share in shares]


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = parse_args()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:  # a launcher has started this process
        jax.distributed.initialize()
    rank, processes = jax.process_index(), jax.process_count()
    if processes > 1:  # a batch is split over the devices of all processes, and gradients are summed over them
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=keras.distribution.list_devices(), auto_shard_dataset=False)
        )
    keras.utils.set_random_seed(0)
    train, test = load_data(rank, processes)
    model = build_model()
    model.compile(
        keras.optimizers.Adam(args.lr),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        *train,
        batch_size=args.batch_size // processes,
        epochs=args.epochs,
        validation_data=test,
        verbose=2 if rank == 0 else 0,
    )


if __name__ == "__main__":
    main()
