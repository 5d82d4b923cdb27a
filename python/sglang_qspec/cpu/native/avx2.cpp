// The module for processors without AVX-512: the same operations, compiled for AVX2.
#define QSPEC_MODULE _native_avx2
#include "module.cpp"
