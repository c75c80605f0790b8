import torch
x = torch.randn(8, 16, device="cuda")
w = torch.nn.Linear(16, 4).cuda()
w(x).sum().backward()
print("step ok", torch.__version__)
