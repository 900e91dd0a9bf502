"""A policy and a value in one network, in the shape of PyTorch's actor_critic example."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

from pollux.train import init

parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.9)
parser.add_argument("--updates", type=int, default=60)
parser.add_argument("--episodes", type=int, default=8, help="per update")
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--log-interval", type=int, default=20)
args = parser.parse_args()
run = init(print_once=True)
torch.manual_seed(args.seed)


class Pole:
    """A pole that falls faster the more it leans; each action pushes it one way. Thirty steps at most."""

    def reset(self):
        self.angle, self.time = (torch.rand(1).item() - 0.5) * 0.4, 0
        return torch.tensor([self.angle, 1.0])

    def step(self, action):
        self.angle, self.time = self.angle * 1.2 + (0.12 if action == 1 else -0.12), self.time + 1
        return torch.tensor([self.angle, 1.0]), 0.1, abs(self.angle) > 1 or self.time == 30


class Policy(nn.Module):
    """The actor and the critic share their first layer."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 32)
        self.action_head = nn.Linear(32, 2)
        self.value_head = nn.Linear(32, 1)

    def forward(self, states):
        x = F.relu(self.affine1(states))
        return self.action_head(x), self.value_head(x).squeeze(-1)


model = Policy()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = run.prepare(model, optimizer)


@torch.no_grad()
def play(env):
    """The states and actions of one episode, and what came after each."""
    state, states, actions, rewards, is_done = env.reset(), [], [], [], False
    while not is_done:
        action = Categorical(logits=model(state)[0]).sample()
        states.append(state)
        actions.append(action)
        state, reward, is_done = env.step(action.item())
        rewards.append(reward)
    returns = [0.0]
    for reward in reversed(rewards):
        returns.insert(0, reward + args.gamma * returns[0])
    return torch.stack(states), torch.stack(actions), torch.tensor(returns[:-1])


env = Pole()
for i_update in run.steps(args.updates, batch_size=args.episodes):
    played = [play(env) for _ in range(run.local_batch_size)]
    states, actions, returns = (torch.cat(column) for column in zip(*played, strict=True))
    logits, values = model(states)
    advantage = returns - values.detach()
    policy_loss = (-Categorical(logits=logits).log_prob(actions) * advantage).mean()
    loss = policy_loss + F.smooth_l1_loss(values, returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if run.every(args.log_interval):
        print(f"update {i_update}\taverage length {len(states) / len(played):.2f}")
run.save(model.state_dict(), "model.pt")
result = sum(len(play(env)[0]) for _ in range(50)) / 50 / 30
print(f"result {result:.4f}")
