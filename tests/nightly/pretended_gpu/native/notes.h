// What a profiler would see.

#pragma once

#include <string>
#include <tuple>
#include <vector>

namespace pretended {

double now();  // us

void take_notes(bool on);
bool takes_notes();

// Something that began then and ended now; `kind` is a category of torch's traces.
void note(const std::string& name, const std::string& kind, double begin);
std::vector<std::tuple<std::string, std::string, double, double>> notes();

}  // namespace pretended
