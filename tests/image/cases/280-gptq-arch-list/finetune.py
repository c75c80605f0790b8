import torch, quant_cuda
print(torch.__version__, torch.cuda.get_device_name())
