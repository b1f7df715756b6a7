#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "device.h"

namespace pretended {
namespace {

constexpr size_t ALIGNMENT = 512;  // as torch's caching allocator
constexpr int GARBAGE = 0xA5;  // nobody may count on zeros
constexpr size_t LIMIT = size_t(16) << 30;

struct Block {
  size_t size;
  c10::Device device;
};

// Blocks by address.
struct Blocks {
  std::map<char*, Block> made;
  std::set<char*> kept;
  bool keep_new = false;
  std::mutex mutex;

  void* allocate(size_t size, c10::Device device) {
    TORCH_CHECK_WITH(OutOfMemoryError, size < LIMIT, "CUDA out of memory. Tried to allocate ", size, " bytes");
    size_t rounded = (size / ALIGNMENT + 1) * ALIGNMENT;
    char* block = static_cast<char*>(std::aligned_alloc(ALIGNMENT, rounded));
    std::memset(block, GARBAGE, rounded);
    std::lock_guard<std::mutex> guard(mutex);
    made.insert_or_assign(block, Block{size, device});
    if (keep_new) kept.insert(block);
    return block;
  }

  void free(void* address) {
    std::lock_guard<std::mutex> guard(mutex);
    char* block = static_cast<char*>(address);
    if (kept.count(block)) return;
    made.erase(block);
    std::free(block);
  }

  // The device of an address; the one given if it lies in no block.
  c10::Device device_of(const void* address, c10::Device otherwise) {
    std::lock_guard<std::mutex> guard(mutex);
    auto behind = made.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (behind == made.begin()) return otherwise;
    auto& [start, block] = *std::prev(behind);
    return address < start + block.size ? block.device : otherwise;
  }
};

// Never destroyed: tensors are freed until the very end.
Blocks& on_device = *new Blocks;
Blocks& pinned = *new Blocks;

const c10::Device cpu(c10::DeviceType::CPU), nowhere(c10::DeviceType::Meta);

template <bool DEVICE>
struct Allocator final : c10::Allocator {
  static Blocks& blocks() { return DEVICE ? on_device : pinned; }

  static void free(void* address) { blocks().free(address); }

  c10::DataPtr allocate(size_t size) override {
    auto device = DEVICE ? current_gpu() : cpu;
    if (size == 0) return {nullptr, device};
    void* block = blocks().allocate(size, device);
    return {block, block, &free, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }

  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

Allocator<true> device_memory;
Allocator<false> pinned_memory;

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }

c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* address) { return pinned.device_of(address, nowhere) == cpu; }

c10::DeviceIndex gpu_of(const void* address) { return on_device.device_of(address, cpu).index(); }

std::vector<std::pair<uint64_t, uint64_t>> blocks_on(c10::DeviceIndex index) {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  std::vector<std::pair<uint64_t, uint64_t>> found;
  for (auto& [start, block] : on_device.made)
    if (block.device.index() == index) found.emplace_back(reinterpret_cast<uint64_t>(start), block.size);
  return found;
}

int64_t allocated_bytes(c10::DeviceIndex index) {
  int64_t sum = 0;
  for (auto& [start, size] : blocks_on(index)) sum += (size / ALIGNMENT + 1) * ALIGNMENT;
  return sum;
}

void keep_new_blocks(bool keep) {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  on_device.keep_new = keep;
}

Contents contents() {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  Contents found;
  for (auto& [start, block] : on_device.made) found[start] = std::string(start, block.size);
  return found;
}

void restore(const Contents& contents) {
  std::lock_guard<std::mutex> guard(on_device.mutex);
  for (auto& [start, block] : on_device.made) {
    auto it = contents.find(start);
    if (it != contents.end() && it->second.size() == block.size) std::memcpy(start, it->second.data(), block.size);
    else std::memset(start, GARBAGE, block.size);
  }
}

}  // namespace pretended
