#include <torch/extension.h>

at::Tensor scale_cuda(at::Tensor x, double f) { return x * f; }
