// Host memory that passes for a GPU's, and for pinned memory.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <string>
#include <unordered_map>

namespace pretended {

inline c10::Device gpu() { return c10::Device(c10::DeviceType::CUDA, 0); }

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

bool is_pinned(const void* address);
int64_t allocated_bytes();  // on the device

// What a graph allocates while it is captured is its own for good.
void keep_new_blocks(bool keep);

// The contents of all blocks on the device, and back: a capture runs nothing.
using Contents = std::unordered_map<char*, std::string>;
Contents contents();
void restore(const Contents& contents);

}  // namespace pretended
