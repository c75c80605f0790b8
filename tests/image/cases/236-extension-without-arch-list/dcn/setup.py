from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

setup(
    name="deform_conv",
    ext_modules=[
        CUDAExtension("deform_conv_cuda", ["src/deform_conv_cuda.cu"]),
    ],
    cmdclass={"build_ext": BuildExtension},
)
