import argparse

import deepspeed
import torch

ap = argparse.ArgumentParser()
ap.add_argument("--local_rank", type=int, default=-1)
ap = deepspeed.add_config_arguments(ap)
args = ap.parse_args()
model = torch.nn.Linear(1024, 1024)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(10):
    loss = engine(torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
