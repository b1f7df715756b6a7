// CUDA graphs: what is given to the GPU during a capture, to be done again.

#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace pretended {

struct Graph {
  std::vector<std::function<void()>> work;

  void replay() const;
};

// Unlike a GPU's, a capture does the work, so that results have shapes; what it changed is put back at its end.
void begin_capture();
std::shared_ptr<Graph> end_capture();
bool is_capturing();

// Have a graph do this again, if one is being captured.
void capture(std::function<void()> work);

}  // namespace pretended
