// Every operation of torch on the pretended GPU.

#pragma once

namespace pretended {

void install_ops();

}  // namespace pretended
