// Every operation of torch on the pretended GPU.

#pragma once

namespace pretended {

// Collectives are left to a gloo that is built with CUDA: it takes tensors of a GPU.
void install_ops(bool built_with_cuda);

}  // namespace pretended
