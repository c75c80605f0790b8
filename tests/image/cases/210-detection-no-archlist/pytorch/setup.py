import os

import torch
from setuptools import find_packages, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

sources = ["csrc/vision.cpp"]
extension = CppExtension
if (torch.cuda.is_available() and CUDA_HOME is not None) or os.getenv("FORCE_CUDA") == "1":
    extension = CUDAExtension
    sources.append("csrc/scale.cu")

setup(
    name="maskops",
    version="0.1",
    packages=find_packages(),
    ext_modules=[extension("maskops_C", sources)],
    cmdclass={"build_ext": BuildExtension},
)
