// Host memory that passes for a GPU's, and for pinned memory.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pretended {

c10::Allocator* device_allocator();  // on the current GPU
c10::Allocator* pinned_allocator();

bool is_pinned(const void* address);

// The GPU on which an address lies; -1: on none.
c10::DeviceIndex gpu_of(const void* address);

// The blocks on a GPU, from lower addresses to higher ones: where each begins, and its bytes.
std::vector<std::pair<uint64_t, uint64_t>> blocks_on(c10::DeviceIndex index);
int64_t allocated_bytes(c10::DeviceIndex index);

// What a graph allocates while it is captured is its own for good.
void keep_new_blocks(bool keep);

// The contents of all blocks on all GPUs, and back; newer blocks hold garbage then: a capture runs nothing.
using Contents = std::unordered_map<char*, std::string>;
Contents contents();
void restore(const Contents& contents);

}  // namespace pretended
