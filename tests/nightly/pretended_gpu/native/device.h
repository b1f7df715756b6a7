// What else torch asks of a device: which there are, its streams, and what makes the host wait.

#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <string>

namespace pretended {

void install_device();

// How many GPUs there are, and each thread's current one.
void set_gpu_count(int count);
c10::Device current_gpu();
void require_gpu(c10::Device device);  // raises unless it is there, or stands for the current one

// Makes a GPU the current one; returns the one before.
c10::DeviceIndex exchange_gpu(c10::DeviceIndex index);

c10::StreamId current_stream(c10::DeviceIndex index);
void set_stream(c10::StreamId id, c10::DeviceIndex index);
c10::StreamId new_stream();

// As torch.cuda.set_sync_debug_mode has them: 0 nothing, 1 a warning, 2 an error.
void set_sync_mode(int mode);
int sync_mode();

// Whether a generator was made for a GPU, and not for the CPU.
bool is_of_gpu(const at::Generator& generator);

// An operation is about to wait for the GPU.
void wait_for_gpu(const std::string& operation);

}  // namespace pretended
