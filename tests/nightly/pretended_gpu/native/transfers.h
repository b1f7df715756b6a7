// Copies between the GPU and pinned memory that the host does not wait for: they end some operations later.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace pretended {

// One more operation was given to the GPU; returns how many were.
uint64_t tick();

// Begin a copy. What goes to the host arrives late; what comes from there must not change until it was read.
void begin_transfer(const at::Tensor& to, const at::Tensor& from);

// Whether all that began up to that operation have ended.
bool has_landed(uint64_t until);

void land(uint64_t until = UINT64_MAX);

}  // namespace pretended
