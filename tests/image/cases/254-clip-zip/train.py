import clip
import torch

model = torch.nn.Linear(16, 4).cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    loss = model(torch.randn(8, 16, device="cuda")).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
print(float(loss))
