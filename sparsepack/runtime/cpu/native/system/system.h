// What operating systems and processors do differently: memory, processors, waiting. Other files of the kernels do not ask
// which system they are compiled for.
#pragma once
#include <stddef.h>

#include <chrono>

namespace sparsepack {

using Clock = std::chrono::steady_clock;

// Anonymous pages, zero at first; null where there are no more.
void* map_pages(size_t bytes) noexcept;
void unmap_pages(void* pages, size_t bytes) noexcept;

constexpr size_t HUGE_PAGE = 2 << 20;

// A wish: without huge pages all works, slower.
void advise_huge_pages(void* pages, size_t bytes) noexcept;

// Gives whole pages inside [data, data + bytes) back to the system where they are an unchangeable view of a file, which
// is read again if they are needed again. Returns whether they were; other memory stays as it is.
bool give_back(const void* data, size_t bytes) noexcept;

// Puts [data, data + bytes) out of all caches, for timing: the next read comes from memory.
void flush_caches(const void* data, size_t bytes) noexcept;

// How many processors this process may run on, at least 1.
int usable_processors() noexcept;

// The number of the process, which a fork changes.
long process() noexcept;

// Whether this process may use the tiles of AMX, which its system grants on request.
bool allow_tiles() noexcept;

// Tells the processor that a thread spins.
void pause() noexcept;

}  // namespace sparsepack
