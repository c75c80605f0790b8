#include <torch/extension.h>

__global__ void add_one(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.0f;
}

void run(torch::Tensor x) {
  int n = x.numel();
  add_one<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), n);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
