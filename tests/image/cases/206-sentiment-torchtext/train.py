import argparse
import torch
from torchtext.vocab import build_vocab_from_iterator

def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=100)
    args = ap.parse_args()
    model = torch.nn.Linear(512, 512).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(args.steps):
        loss = model(torch.randn(8, 512, device="cuda")).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()

if __name__ == "__main__":
    main()
