"""The native backend of the CPU: C++ kernels for each instruction set (`native/`), and what drives them."""
