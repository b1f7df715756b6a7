// What else torch asks of a device: which there are, its streams, and what makes the host wait.

#pragma once

#include <c10/core/Stream.h>

#include <string>

namespace pretended {

void install_device();

c10::StreamId current_stream();
void set_stream(c10::StreamId id);
c10::StreamId new_stream();

// As torch.cuda.set_sync_debug_mode has them: 0 nothing, 1 a warning, 2 an error.
void set_sync_mode(int mode);
int sync_mode();

// An operation is about to wait for the GPU.
void wait_for_gpu(const std::string& operation);

}  // namespace pretended
