"""Balance a pole on a cart by reinforcement learning: policy gradients, with a learnt value as the baseline.

python examples/reinforcement.py
paceline run -n 2 examples/reinforcement.py
"""

import argparse

import paceline
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--carts", type=int, default=128, help="environments, over all ranks together")
    parser.add_argument("--steps", type=int, default=16, help="steps of each environment per update")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--discount", type=float, default=0.97)
    return parser.parse_args()


class Carts:
    """Carts with poles that must not fall: many at once, each begins anew when its pole has fallen or after 200 steps.

    Source: Barto, Sutton and Anderson, Neuronlike Adaptive Elements That Can Solve Difficult Learning Control Problems,
    1983; the numbers are those of Gymnasium's CartPole.
    """

    def __init__(self, number: int) -> None:
        self.state = self.begin(number)  # position, velocity, angle, angular velocity
        self.age = torch.zeros(number)
        self.lengths: list[float] = []  # of the episodes that have ended

    @staticmethod
    def begin(number: int) -> torch.Tensor:
        return torch.rand(number, 4) * 0.1 - 0.05

    def step(self, push_right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart, for a fiftieth of a second; returns rewards and whose episode is over."""
        x, v, angle, w = self.state.unbind(dim=1)
        force = torch.where(push_right.bool(), 10.0, -10.0)
        push = (force + 0.05 * w.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        speed_up = push - 0.05 * turn * angle.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * speed_up, angle + 0.02 * w, w + 0.02 * turn], dim=1)
        self.age += 1
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        over = fallen | (self.age >= 200)
        self.lengths += self.age[over].tolist()
        self.state[over], self.age[over] = self.begin(int(over.sum())), 0.0
        return 1.0 - fallen.float(), over


class Policy(nn.Module):
    """Scores of both pushes, and what the rewards to come are worth."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.scores, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(state)
        return self.scores(hidden), self.value(hidden).squeeze(-1)


def main() -> None:
    args = parse_args()
    run = paceline.init(seed=0, checkpoint_every="1m")
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), args.lr)
    policy, optimizer = run.setup(policy, optimizer)  # from here on, each rank draws its own random numbers
    carts = Carts(args.carts // run.world_size)

    for update in run.steps(range(args.updates)):
        states, pushes, rewards, overs = [], [], [], []
        with torch.no_grad():
            for _ in range(args.steps):
                states.append(carts.state)
                scores, _ = policy(carts.state.to(run.device))
                pushes.append(Categorical(logits=scores).sample())
                reward, over = carts.step(pushes[-1].cpu())
                rewards.append(reward)
                overs.append(over)
            _, worth = policy(carts.state.to(run.device))
        returns, worth = [], worth.cpu()
        for reward, over in zip(reversed(rewards), reversed(overs), strict=True):
            worth = reward + args.discount * worth * ~over
            returns.insert(0, worth)
        target = torch.cat(returns).to(run.device)
        scores, value = policy(torch.cat(states).to(run.device))
        choice = Categorical(logits=scores)
        advantage = target - value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        loss = -(choice.log_prob(torch.cat(pushes)) * advantage).mean() - 0.01 * choice.entropy().mean()
        loss = loss + 0.5 * F.smooth_l1_loss(value, target)
        optimizer.zero_grad()
        run.backward(loss)
        run.clip_grad_norm(0.5)
        optimizer.step()
        if (update + 1) % 20 == 0:
            length = run.mean(sum(carts.lengths), len(carts.lengths))
            carts.lengths.clear()
            run.print(f"update {update + 1}/{args.updates} steps until the pole falls {length:.1f} of 200")


if __name__ == "__main__":
    main()
