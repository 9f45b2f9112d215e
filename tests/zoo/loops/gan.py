"""A GAN: two models, two optimizers, and a step of each in turn."""

import torch
from harness import STEPS, Checkpointer, at, finish
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 32))
critic = nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))

checkpointer = Checkpointer(
    generator=generator, critic=critic, generator_optimizer=generator_optimizer, critic_optimizer=critic_optimizer
)
for step in range(checkpointer.restore(), STEPS):
    at("data")
    real = torch.randn(64, 32) * 2 + 1
    at("forward")
    fake = generator(torch.randn(64, 16))
    critic_optimizer.zero_grad()
    loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    at("backward")
    loss.backward()
    at("optimizer")
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    at("forward")
    generator_loss = F.softplus(-critic(fake)).mean()
    at("backward")
    generator_loss.backward()
    at("optimizer")
    generator_optimizer.step()
    checkpointer.step(step + 1, loss + generator_loss)
finish(checkpointer)
