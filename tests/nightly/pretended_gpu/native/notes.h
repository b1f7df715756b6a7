// What a profiler would see.

#pragma once

#include <string>
#include <utility>
#include <vector>

namespace pretended {

void take_notes(bool on);
bool takes_notes();

// Something that the GPU was given, or that the host waited for; names are those of torch's traces.
void note(const std::string& name, bool by_host);
std::vector<std::pair<std::string, bool>> notes();

}  // namespace pretended
