import torch
from flash_attn import flash_attn_func

q = torch.randn(1, 64, 8, 64, device='cuda', dtype=torch.bfloat16)
print(flash_attn_func(q, q, q).shape)
