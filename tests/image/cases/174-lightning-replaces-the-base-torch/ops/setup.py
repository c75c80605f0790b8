from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

setup(name="pc_ops", ext_modules=[CUDAExtension("pc_ops", ["pc_ops.cu"])], cmdclass={"build_ext": BuildExtension})
