import torch
import rasterizer_cuda

x = torch.zeros(1024, device="cuda")
rasterizer_cuda.run(x)
torch.cuda.synchronize()
print(x.sum())
