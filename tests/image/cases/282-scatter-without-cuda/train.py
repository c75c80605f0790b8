import torch
from torch_scatter import scatter_max

x = torch.randn(16, 4, device='cuda', requires_grad=True)
idx = torch.randint(0, 4, (16,), device='cuda')
out, _ = scatter_max(x, idx, dim=0)
out.sum().backward()
