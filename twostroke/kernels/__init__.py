"""The operations a forward is made of.

`reference.Kernels` defines each in plain torch; `cuda.CudaKernels` overrides what Triton does
faster; `cpu` loads the native module, which runs whole steps.
"""
