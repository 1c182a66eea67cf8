// Headers that most sources include. A build of many sources precompiles them (build.py). No source
// includes this file: each includes the headers that it needs and compiles without it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "checks.h"
#include "engine.h"
#include "grid.h"
#include "lanes.h"
#include "ops.h"
