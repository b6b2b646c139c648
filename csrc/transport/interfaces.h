#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tritondt {

// Name and numeric address, IPv4 or IPv6, of every address of an interface that is up, in the
// system's order.
std::vector<std::pair<std::string, std::string>> interface_addresses();

}  // namespace tritondt
