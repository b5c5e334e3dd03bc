"""Train a generative adversarial network that writes digits: two models, each with its own optimizer.

python examples/gan.py
paceline run -n 2 examples/gan.py
"""

import argparse

import paceline
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

NOISE = 16  # numbers that an image is made of


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--images", type=int, default=4, help="how many to show at the end")
    return parser.parse_args()


def build_models() -> tuple[nn.Module, nn.Module]:
    """A generator of images with 8 x 8 pixels in [0, 1], and a discriminator that tells them from real ones."""
    generator = nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.Sigmoid()),
    )
    discriminator = nn.Sequential(
        *(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        nn.Linear(128, 1),
    )
    return generator, discriminator


def frechet_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Between two sets of images, each seen as a normal distribution of their pixels: 0 if mean and covariance agree.

    Source: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017; there of a network's features.
    """
    a, b = a.double(), b.double()
    means = (a.mean(dim=0) - b.mean(dim=0)).square().sum()
    product = torch.linalg.eigvals(a.T.cov() @ b.T.cov()).real.clamp(min=0)
    return (means + a.var(dim=0).sum() + b.var(dim=0).sum() - 2 * product.sqrt().sum()).item()


def main() -> None:
    args = parse_args()
    run = paceline.init(seed=0, checkpoint_every="1m")
    real_images = torch.tensor(load_digits().data, dtype=torch.float32) / 16  # (1797, 64), in [0, 1]
    train = run.dataloader(TensorDataset(real_images), global_batch_size=args.batch_size, shuffle=True, drop_last=True)
    generator, discriminator = build_models()
    g_optimizer = torch.optim.Adam(generator.parameters(), args.lr, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), args.lr, betas=(0.5, 0.9))
    generator, discriminator, g_optimizer, d_optimizer = run.setup(generator, discriminator, g_optimizer, d_optimizer)
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1)).to(run.device)  # to look at

    for epoch in run.epochs(args.epochs):
        generator.train()
        for (real,) in train:
            # The discriminator learns to score real images above 0, and others below.
            fake = generator(torch.randn(len(real), NOISE, device=run.device))
            real_score, fake_score = discriminator(torch.cat([real, fake.detach()])).chunk(2)
            d_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
            d_optimizer.zero_grad()
            run.backward(d_loss)
            d_optimizer.step()
            # The generator learns to have its images scored above 0. Only its own gradients are wanted here.
            g_loss = F.softplus(-discriminator(fake)).mean()
            g_optimizer.zero_grad()
            run.backward(g_loss, inputs=list(generator.parameters()))
            g_optimizer.step()
            run.log(d_loss=d_loss, g_loss=g_loss)
        generator.eval()
        if epoch == 0 or (epoch + 1) % 5 == 0:
            with torch.no_grad():
                distance = frechet_distance(real_images, generator(noise).cpu())
            run.print(f"epoch {epoch + 1}/{args.epochs} distance to real images {distance:.3f}")
    with torch.no_grad():
        shown = generator(noise[: args.images]).view(-1, 8, 8).cpu()
    for row in range(8):
        run.print("  ".join("".join(" .:-=+*#%@"[int(9.99 * value)] * 2 for value in image[row]) for image in shown))


if __name__ == "__main__":
    main()
