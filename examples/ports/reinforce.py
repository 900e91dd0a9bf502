"""A policy gradient over whole episodes, in the shape of PyTorch's reinforce example."""

import argparse

import torch
from torch import nn, optim
from torch.distributions import Categorical

from pollux.train import init

parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.9)
parser.add_argument("--updates", type=int, default=120)
parser.add_argument("--episodes", type=int, default=16, help="per update")
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--log-interval", type=int, default=20)
args = parser.parse_args()
run = init(print_once=True)
torch.manual_seed(args.seed)


class Corridor:
    """Five cells; a step to the right costs nothing, and the end is worth 1. Twelve steps at most."""

    def reset(self):
        self.cell, self.time = 0, 0
        return torch.eye(5)[0]

    def step(self, action):
        self.cell, self.time = max(self.cell + (1 if action == 1 else -1), 0), self.time + 1
        is_there = self.cell == 4
        return torch.eye(5)[self.cell], float(is_there), is_there or self.time == 12


policy = nn.Linear(5, 2)
optimizer = optim.Adam(policy.parameters(), lr=3e-2)
policy, optimizer = run.prepare(policy, optimizer)


def play(env):
    """The log-probabilities of one episode's actions, and what came after each."""
    state, log_probs, rewards, is_done = env.reset(), [], [], False
    while not is_done:
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        state, reward, is_done = env.step(action.item())
        rewards.append(reward)
    returns = [0.0]
    for reward in reversed(rewards):
        returns.insert(0, reward + args.gamma * returns[0])
    return torch.stack(log_probs), torch.tensor(returns[:-1])


env = Corridor()
for i_update in run.steps(args.updates, batch_size=args.episodes):
    played = [play(env) for _ in range(run.local_batch_size)]
    loss = sum(-(log_probs * returns).sum() for log_probs, returns in played) / len(played)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if run.every(args.log_interval):
        print(f"update {i_update}\treturn {sum(returns[0].item() for _, returns in played) / len(played):.2f}")
run.save(policy.state_dict(), "policy.pt")
with torch.no_grad():
    result = sum(play(env)[1][0].item() for _ in range(100)) / 100
print(f"result {result:.4f}")
